"""The bundled example: its limits, and the first command of the README, by the fast search."""

from pathlib import Path

from qsrt_pack.evaluate import evaluate
from qsrt_pack.source.checkpoint import open_checkpoint
from qsrt_pack.source.models import find_experts
from qsrt_pack.validate import validate

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny_moe"


def test_example_is_small_and_its_texts_are_named() -> None:
    experts = find_experts(open_checkpoint(EXAMPLE / "model"))
    weights = experts.geometry.weights_per_expert * experts.geometry.experts * len(experts.layers)
    assert weights == 786_432
    files = [p for p in EXAMPLE.rglob("*") if p.is_file() and "-qsrt" not in str(p)]
    assert sum(path.stat().st_size for path in files) < 6_000_000
    notice = (EXAMPLE / "NOTICE").read_text()
    assert all(licence in notice for licence in ("public domain", "PSF", "PostgreSQL", "BSD"))


def test_example_survives_packing(example: tuple[Path, Path]) -> None:
    source, out = example
    assert validate(out, deep=True, show_progress=False)["experts"] == 8
    report = evaluate(out, source, EXAMPLE / "eval.txt", windows=8, show_progress=False)
    assert report["reference_is_source"]
    # The exact search reaches 0.171 on all of the text; an untrained model is above 3.
    assert 0.05 < report["kl_mean"] < 0.4
    assert report["top1_agreement"] > 0.6
    assert report["reference_score"]["perplexity"] < 25
