"""The command bench: what it takes, where it writes, and what it refuses before it measures."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from packages import write_package

from qsrt_pack.bench import machine, run
from qsrt_pack.bench.shapes import parse_shape
from qsrt_pack.bench.table import describe
from qsrt_pack.bench.ways import ASKED_FOR
from qsrt_pack.cli import main, measure
from qsrt_runtime.format.geometry import Geometry

TINY = "H=128,I=256,E=3,k=2"


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, report: dict) -> list[tuple]:
    """What bench was called with, on a machine that has a GPU."""
    found: list[tuple] = []

    def bench(*arguments: object, also: tuple[str, ...]) -> dict:
        found.append((*arguments, also))
        return report

    monkeypatch.setattr(measure, "one_device", lambda _text: torch.device("cuda", 0))
    monkeypatch.setattr(machine, "machine_of", lambda device: f"machine of {device}")
    monkeypatch.setattr(run, "bench", bench)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("options", [(), ("--device", "cpu")])
def test_without_a_gpu_it_is_one_line(tmp_path: Path, options: tuple) -> None:
    result = invoke(TINY, "--json", tmp_path / "bench.json", *options)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == ("Error: bench times kernels on a CUDA GPU, and there is none to use\n")
    assert list(tmp_path.iterdir()) == []


def test_a_table_json_and_a_plot(given: list, report: dict, tmp_path: Path) -> None:
    files = ("--json", tmp_path / "bench.json", "--png", tmp_path / "bench.png")
    result = invoke(TINY, "-m", "64,1,64", *files)
    assert (result.exit_code, result.stdout) == (0, describe(report) + "\n")
    assert given == [(parse_shape(TINY), [1, 64], "machine of cuda:0", ())]
    assert json.loads((tmp_path / "bench.json").read_text()) == report
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 2

    again = invoke(TINY, *files)
    assert again.exit_code == 1 and len(given) == 1
    assert "bench.json exists; choose another or give --overwrite to replace it" in again.stderr
    assert invoke(TINY, *files, "--overwrite").exit_code == 0
    assert given[1][1] == [1 << power for power in range(13)]


def test_ways_that_are_asked_for(given: list) -> None:
    assert invoke(TINY, "--with", "expanded", "--with", "a8").exit_code == 0
    assert set(given[0][3]) == set(ASKED_FOR)
    result = invoke(TINY, "--with", "bf16")
    assert result.exit_code == 2 and "'bf16' is not one of 'a8', 'expanded'" in result.stderr


def test_a_package(given: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_package(tmp_path / "glm", Geometry(128, 256, 2))
    monkeypatch.chdir(tmp_path)
    assert invoke("./glm", "-m", "1").exit_code == 0
    assert invoke("glm", "-m", "1").exit_code == 0
    assert [arguments[0] for arguments in given] == [folder, parse_shape("glm")]


def test_files_that_cannot_be_written(given: list, tmp_path: Path) -> None:
    folder = write_package(tmp_path / "p", Geometry(128, 256, 2))
    other = write_package(tmp_path / "other", Geometry(128, 256, 2))
    (other / "deep").mkdir()
    (tmp_path / "link").symlink_to(other)
    (tmp_path / "taken").write_text("mine")
    for file, message in (
        (folder / "bench.json", f"lies in the package {folder}, which is sealed"),
        (other / "deep" / "bench.json", f"lies in the package {other}, which is sealed"),
        (tmp_path / "link" / "bench.json", f"lies in the package {other}, which is sealed"),
        (tmp_path / ("n" * 250), "the name has 250 bytes, expected at most 239; choose"),
        (folder, "is a folder; name a file"),
        (tmp_path / "absent" / "bench.json", "is not a folder; make it"),
        (tmp_path / "taken", "exists; choose another"),
    ):
        for option in ("--json", "--png"):
            result = invoke(folder, option, file)
            assert (result.exit_code, result.stdout) == (1, "")
            assert message in result.stderr and result.stderr.count("\n") == 1
    result = invoke(folder, "--json", tmp_path / "new", "--png", tmp_path / "new")
    assert result.exit_code == 2 and "name the same file" in result.stderr
    (tmp_path / "again").symlink_to(tmp_path)
    result = invoke(folder, "--json", tmp_path / "new", "--png", tmp_path / "again" / "new")
    assert result.exit_code == 2 and "name the same file" in result.stderr
    assert given == [] and (tmp_path / "taken").read_text() == "mine"
    assert not (tmp_path / "new").exists()
    assert invoke(folder, "--json", tmp_path / ("n" * 239)).exit_code == 0


def test_a_plot_that_fails_leaves_no_file(
    given: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_report: dict) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("qsrt_pack.bench.figure.plot", fail)
    result = invoke(TINY, "--json", tmp_path / "bench.json", "--png", tmp_path / "bench.png")
    assert result.exit_code == 1 and "No space left" in result.stderr
    assert result.stdout and list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    folder = write_package(tmp_path / "p", Geometry(256, 512, 8), layers=(0, 1))
    files = ("--json", tmp_path / "bench.json", "--png", tmp_path / "bench.png")
    ways = ("--with", "a8", "--with", "expanded")
    result = invoke(folder, "-m", "1,32", *ways, *files)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "bench.json").read_text())
    assert report["load"]["layers"] == 2 and report["load"]["bytes"] > 0
    assert [way["way"] for way in report["ways"]][:3] == ["qsrt", "qsrt a8", "qsrt expanded"]
    assert result.stdout == describe(report) + "\n"
