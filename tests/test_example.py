"""The bundled example: its limits, the first command of the README, and each of the scripts."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from transformers import AutoTokenizer

from qsrt_pack.evaluate import evaluate
from qsrt_pack.source.checkpoint import open_checkpoint
from qsrt_pack.source.models import find_experts
from qsrt_pack.validate import validate

EXAMPLES = Path(__file__).parents[1] / "examples"
EXAMPLE = EXAMPLES / "tiny_moe"
RUN_BY = {  # every script, and the test that runs it
    "draw_overview.py": "test_example.py",
    "parallel_experts.py": "test_parallel.py",
    "tiny_moe/prepare_text.py": "test_example.py",
    "tiny_moe/train.py": "test_example.py",
}


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


def _run(script: str, *arguments: object) -> str:
    """What a script prints."""
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


def test_every_script_is_run() -> None:
    assert {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")} == set(RUN_BY)
    for script, test in RUN_BY.items():
        assert Path(script).name in (Path(__file__).parent / test).read_text()


def test_the_picture_is_what_its_script_draws(tmp_path: Path) -> None:
    _run("draw_overview.py", tmp_path / "overview.svg")
    text = (tmp_path / "overview.svg").read_text()
    assert text == (EXAMPLES / "overview.svg").read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "3.05 bits a weight" in text and "prefers-color-scheme: dark" in text
    assert not re.search("https?://", text.replace("http://www.w3.org/2000/svg", ""))


def _lzw(data: bytes) -> bytes:
    """A short run of bytes in the coding of `compress`, 9 bits each, without the header."""
    assert len(data) < 250  # as long as no code needs 10
    value = sum(byte << (9 * place) for place, byte in enumerate(data))
    return value.to_bytes((9 * len(data) + 7) // 8, "little")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What prepare_text.py cuts out of a stand-in for its packages: pages of the texts here."""
    folder = tmp_path_factory.mktemp("text")
    documents = "<|endoftext|>".join((EXAMPLE / f"{n}.txt").read_text() for n in ("calib", "eval"))
    pages = folder / "packages" / "sqlite3-doc" / "usr/share/doc/sqlite3"
    pages.mkdir(parents=True)
    for number, document in enumerate(documents.split("<|endoftext|>")):
        body = "<p>".join(re.sub("[<&]", "", document).splitlines())
        (pages / f"{number}.html").write_text(f"<nav>menu</nav><p>{body}")
    for name in ("devil", "jargon"):
        file = folder / "packages" / f"dict-{name}" / f"usr/share/dictd/{name}.dict.dz"
        file.parent.mkdir(parents=True)
        file.write_bytes(gzip.compress(b"00-database\n\nword\n  its meaning\n\nother\n  another"))
    bible = folder / "packages" / "bible-kjv-text" / "usr/lib/bible.data"
    bible.parent.mkdir(parents=True)
    block = _lzw(b"Ge1:1 In the beginning God created the heaven and the earth.\n")
    ends = [0x5C + 8 + 3, 0x5C + 8 + 3 + len(block)]
    table = b"".join(n.to_bytes(4, "big") for n in (1, *ends))
    bible.write_bytes(bytes(0x58) + table + b"\x1f\x9d\x90" + block)
    printed = _run("tiny_moe/prepare_text.py", folder / "packages", folder / "text")
    assert re.search(r"train: wrote \d+ documents", printed)
    return folder / "text"


def test_the_texts_are_cut(text: Path) -> None:
    found = {path.stem: path.read_text() for path in text.iterdir()}
    assert set(found) == {"train", "calib", "eval"} and all(map(len, found.values()))
    assert "menu" not in found["train"].split("\n")[0]
    held_out = {split: set(found[split].split("<|endoftext|>")) for split in found}
    assert held_out["train"].isdisjoint(held_out["eval"] | held_out["calib"])


def test_the_model_is_trained(text: Path, tmp_path: Path) -> None:
    printed = _run("tiny_moe/train.py", "train", text, tmp_path, "--steps", 3, "--batch", 2)
    losses = json.loads((tmp_path / "training.json").read_text())["losses"]
    assert len(losses) == 3 and losses[-1]["train"] < losses[0]["train"], printed
    assert find_experts(open_checkpoint(tmp_path / "model")).geometry.experts == 4
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) == 1024
    (tmp_path / "eval.txt").write_text(text.joinpath("eval.txt").read_text()[:4000])
    said = json.loads(_run("tiny_moe/train.py", "evaluate", tmp_path))
    assert 100 < said["perplexity"] < 2000
