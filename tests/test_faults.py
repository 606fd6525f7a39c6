"""A sample of tests/faults/run.py, whose long mode tries hundreds of points."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

POINTS = 20


@pytest.fixture(scope="module")
def faults() -> object:
    path = Path(__file__).parent / "faults" / "run.py"
    spec = spec_from_file_location("faults_run", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pk_4a_and_4b_faults_do_no_harm(faults: object, tmp_path: Path) -> None:
    outcomes, wrong, possible = faults.run(tmp_path, POINTS, jobs=2)
    assert wrong == []
    assert outcomes.total() == POINTS < possible
    struck = {(fault, outcome) for fault, outcome in outcomes if outcome != "no effect on the run"}
    expected = {(fault, "killed") for fault in ("kill", "power", "torn")}
    expected |= {(fault, "clean error") for fault in ("eio", "full")}
    assert struck == expected | {("interrupt", "interrupted")}
