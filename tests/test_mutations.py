"""A sample of tests/mutations/run.py, whose long mode tries thousands of mutations."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

SAMPLE = 150


@pytest.fixture(scope="module")
def mutations() -> object:
    path = Path(__file__).parent / "mutations" / "run.py"
    spec = spec_from_file_location("mutations_run", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_mutations_are_refused(mutations: object) -> None:
    tried, free, wrong = mutations.run(each=2, seed=1, sample=SAMPLE)
    assert wrong == []
    assert tried.total() + free.total() == SAMPLE and tried.total() > SAMPLE / 2


def test_an_accepted_mutation_is_reported(mutations: object, tmp_path: Path) -> None:
    good = mutations.write_package(tmp_path / "good")
    for change, names, problem in [
        (lambda folder: None, ("x",), "accepted"),
        (lambda folder: (folder / "config.json").unlink(), ("other",), "none of"),
    ]:
        mutation = mutations.Mutation("nothing", change, names)
        wrong = mutations.judge(good, mutation, tmp_path)
        assert len(wrong) == 2 and all(problem in line for line in wrong)
