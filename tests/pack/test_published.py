"""Reports of bench that are published with a package; those of eval: test_hub."""

import json
import re
import shutil
from pathlib import Path

import pytest
from benched import bench_report, with_ways
from click.testing import CliRunner
from fakehub import FakeHub
from packages import write_package

from qsrt_pack import job
from qsrt_pack.cli import main
from qsrt_pack.encode.expert import Settings
from qsrt_pack.evaluation import content_sha256
from qsrt_pack.hub import push
from qsrt_pack.restore import decode_package
from qsrt_pack.validate import validate
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.format.package import open_package, seal

NAME = "me/packed"
FACTS = {"license_id": "apache-2.0", "base_model": "org/base", "show_progress": False}
SPEED = """## Speed

Microseconds of a layer's experts on one NVIDIA H200, in bfloat16, by `qsrt-pack bench`. Dense are \
the same weights decoded; speed is the fastest dense way's time over the packed one's:

| tokens | qsrt, packed | torch, dense | triton, dense | speed of qsrt |
|---|---|---|---|---|
| 1 | 30.0 | 90.0 | 24.0 | 0.80 |
| 4,096 | 800.0 | 1000.0 |  | 1.25 |

Bits a weight: qsrt 3.25.
Largest relative errors: qsrt 4.0e-03, torch 4.0e-03, triton 4.0e-03.

"""


@pytest.fixture
def pkg(tmp_path: Path) -> Path:
    return write_package(tmp_path / "pkg", Geometry(128, 256, 2))


def file_of(folder: Path, package: Path, /, **changes: object) -> Path:
    """A file of bench --json, of that package."""
    value = bench_report() | {"content_sha256": content_sha256(open_package(package))} | changes
    (folder / "bench.json").write_text(json.dumps(value))
    return folder / "bench.json"


def test_a_report_is_in_the_card_and_stays(hub: FakeHub, pkg: Path, tmp_path: Path) -> None:
    file = file_of(tmp_path, pkg)
    digest = push(pkg, NAME, bench=file, **FACTS)
    files = hub.repositories[NAME].files()
    assert SPEED in files["README.md"].decode()
    assert json.loads(files["qsrt-bench.json"])["package"] == "model-qsrt"
    assert not any(b"someone" in data for data in files.values())
    assert validate(pkg, show_progress=False)["seal_sha256"] == digest
    assert push(pkg, NAME, bench=file, **FACTS) == digest  # the same command again
    assert push(pkg, NAME, show_progress=False) == digest  # the report stays
    push(pkg, NAME, bench=file_of(tmp_path, pkg, seconds=9.0), **FACTS)  # measured after a push
    assert json.loads((pkg / "qsrt-bench.json").read_text())["seconds"] == 9


def test_all_ways_are_in_the_card(hub: FakeHub, pkg: Path, tmp_path: Path) -> None:
    report = with_ways(bench_report())
    report["rows"][0]["results"][1]["error"] = 0.033
    file = file_of(tmp_path, pkg, ways=report["ways"], rows=report["rows"])
    push(pkg, NAME, bench=file, **FACTS)
    titles = "| tokens | qsrt, packed | qsrt a8, packed | qsrt expanded, packed | torch, dense | \
triton, dense | speed of qsrt | speed of qsrt a8 | speed of qsrt expanded |"
    rows = [
        "|---" * 9 + "|",
        "| 1 | 30.0 | 20.0 | 25.0 | 90.0 | 24.0 | 0.80 | 1.20 | 0.96 |",
        "| 4,096 | 800.0 |  | 500.0 | 1000.0 |  | 1.25 |  | 2.00 |",
    ]
    below = [
        "Bits a weight: qsrt 3.25; qsrt a8 3.25, rows in MXFP8; qsrt expanded 8.25.",
        "Largest relative errors: qsrt 4.0e-03, qsrt a8 3.3e-02, qsrt expanded 4.0e-03, "
        "torch 4.0e-03, triton 4.0e-03.",
    ]
    text = "\n".join([titles, *rows, "", *below, "", "## Load"])
    assert text in (pkg / "README.md").read_text()


def test_the_command(hub: FakeHub, pkg: Path, tmp_path: Path) -> None:
    words = ["--license", "mit", "--base-model", "a/b", "--bench", file_of(tmp_path, pkg)]
    done = CliRunner().invoke(main, ["-q", "push", str(pkg), NAME, *map(str, words)])
    assert (done.exit_code, done.stderr) == (0, "")
    assert "## Speed" in (pkg / "README.md").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"content_sha256": 64 * "1"}, "content_sha256 is 1111.*; measure this package"),
        ({"content_sha256": None, "package": None}, "content_sha256 is None.*; measure this"),
        ({"kind": "eval"}, "is a required property|was expected"),
        ({"schema": "qsrt_report_v2"}, "'qsrt_report_v1' was expected"),
        ({"rows": []}, r"\$\.rows: \[\] should be non-empty"),
        ({"rows": 65 * bench_report()["rows"][:1]}, r"\$\.rows: "),
        ({"rows": 2 * bench_report()["rows"]}, r"tokens stands twice in \[1, 4096, 1, 4096\]"),
        ({"ways": bench_report()["ways"][:2]}, "1 tokens have results of .*, not "),
        ({"ways": 2 * bench_report()["ways"]}, "a way stands twice in"),
        ({"gpu": bench_report()["gpu"] | {"name": "a | b"}}, "name: .* does not match"),
        ({"seconds": 10**400}, r"\$\.seconds: 10{100,} \.\.\. 0* is not of type 'number'$"),
        ({"more": 1}, "'more' was unexpected"),
    ],
)
def test_a_report_of_something_else(
    hub: FakeHub, pkg: Path, tmp_path: Path, changes: dict, message: str
) -> None:
    file = file_of(tmp_path, pkg, **changes)
    with pytest.raises(FormatError, match=message):
        push(pkg, NAME, bench=file, **FACTS)
    assert hub.requests == [] and not (pkg / "qsrt-bench.json").exists()


def test_numbers_out_of_all_proportion(hub: FakeHub, pkg: Path, tmp_path: Path) -> None:
    rows = bench_report()["rows"]
    for row, us in zip(rows, (1e308, 5e-324), strict=True):
        row["results"][0] |= dict.fromkeys(("us", "us_low", "us_high"), us)
    push(pkg, NAME, bench=file_of(tmp_path, pkg, rows=rows), **FACTS)
    text = (pkg / "README.md").read_text()
    assert "| 1 | 1.0e+308 | 90.0 | 24.0 | 2.4e-307 |\n" in text
    assert "| 4,096 | 4.9e-324 | 1000.0 |  | inf |\n" in text


@pytest.mark.parametrize("place", ["/", "//", "."])
def test_a_place_without_a_name(hub: FakeHub, pkg: Path, tmp_path: Path, place: str) -> None:
    digest = push(pkg, NAME, bench=file_of(tmp_path, pkg, package=place), **FACTS)
    assert json.loads((pkg / "qsrt-bench.json").read_text())["package"] == place
    assert push(pkg, NAME, show_progress=False) == digest


@pytest.mark.parametrize(
    "held", ["", "{", json.dumps({"schema": "qsrt_report_v1", "kind": "bench"})]
)
def test_a_report_there_that_cannot_be_read_is_replaced(
    hub: FakeHub, pkg: Path, tmp_path: Path, held: str
) -> None:
    (pkg / "qsrt-bench.json").write_text(held)
    seal(pkg)
    with pytest.raises(FormatError, match=r"qsrt-bench\.json.*; give a new one with --bench$"):
        push(pkg, NAME, **FACTS)
    assert hub.requests == [] and (pkg / "qsrt-bench.json").read_text() == held
    push(pkg, NAME, bench=file_of(tmp_path, pkg), **FACTS)
    assert json.loads((pkg / "qsrt-bench.json").read_text())["package"] == "model-qsrt"


def test_reports_are_not_taken_for_each_other(hub: FakeHub, pkg: Path, tmp_path: Path) -> None:
    file = file_of(tmp_path, pkg)
    message = re.escape(f"{file} is a report of bench, expected one of eval --json")
    with pytest.raises(FormatError, match=message):
        push(pkg, NAME, report=file, **FACTS)


def test_the_report_is_not_the_models(
    hub: FakeHub, clean_checkpoint: Path, clean_package: Path, tmp_path: Path
) -> None:
    """decode leaves it behind, and convert knows its package again."""
    pkg = shutil.copytree(clean_package, tmp_path / "pkg")
    push(pkg, NAME, bench=file_of(tmp_path, pkg), **FACTS)
    decode_package(pkg, tmp_path / "dense", show_progress=False)
    assert not (tmp_path / "dense" / "qsrt-bench.json").exists()
    job.run(job.prepare(clean_checkpoint, pkg, Settings(search="fast")), show_progress=False)
