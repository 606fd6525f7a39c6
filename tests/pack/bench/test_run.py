"""bench from end to end: on tiny layers in the interpreter, or on a GPU for real."""

import re
from dataclasses import replace

import pytest
import torch
from packages import write_package

from qsrt_pack.bench import dense, packed
from qsrt_pack.bench.machine import machine_of
from qsrt_pack.bench.run import bench
from qsrt_pack.bench.shapes import parse_shape
from qsrt_pack.bench.table import describe
from qsrt_pack.evaluation import content_sha256
from qsrt_runtime.format import schema
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import Geometry, TrueSizes
from qsrt_runtime.format.package import open_package

TINY = parse_shape("H=128,I=256,E=3,k=2")
HALF = torch.float16
interpreted = pytest.mark.usefixtures("interpreted", "one_choice")


def results(report, tokens):
    (row,) = (row for row in report["rows"] if row["tokens"] == tokens)
    return {result["way"]: result for result in row["results"]}


@interpreted
def test_sizes(machine, clock):
    report = bench(TINY, [1, 17], machine, dtype=HALF)
    schema.check(report, "report", "report")
    for key in ("package", "seal_sha256", "content_sha256", "load"):
        assert report[key] is None
    assert [way["way"] for way in report["ways"]] == ["qsrt", "torch", "triton"]
    assert [way["weights"] for way in report["ways"]] == ["packed", "dense", "dense"]
    small, large = (report["ways"][place]["expert_bytes"] for place in (0, 1))
    assert (small, large) == (8 * 3 * (12 * 128 + 64), 3 * 128 * 256 * 2)
    assert report["layers_in_turn"] == 2
    for tokens, experts in ((1, 2), (17, 3)):
        found = results(report, tokens)
        assert [r["error"] > 0 for r in found.values()] == [True] * 3
        assert max(r["error"] for r in found.values()) < 2e-3
        assert found["qsrt"]["bytes"] == experts * small + tokens * 128 * 4
        assert found["torch"]["bytes"] == experts * large + tokens * 128 * 4
        for each in found.values():
            assert each["us_low"] < each["us"] < each["us_high"]
            rate = report["gpu"]["copy_bytes_per_s"]
            assert each["share"] == pytest.approx(each["bytes"] / each["us"] * 1e6 / rate)
    choices = [results(report, n)[way]["choice"] for n in (1, 17) for way in ("qsrt", "triton")]
    assert choices == [
        *("moe_decode", "gemm (64, 64, 1, 1) (64, 128, 1, 1, 1)"),
        *("moe_prefill", "gemm (64, 64, 1, 1) (64, 128, 1, 1, 1)"),
    ]
    assert set(clock.timed[1:]) == {row["calls"] for row in report["rows"]}
    assert "no GPU" in describe(report)


@interpreted
def test_all_ways(machine):
    report = bench(TINY, [1, 17], machine, also=["expanded", "a8"], dtype=HALF)
    names = ["qsrt", "qsrt a8", "qsrt expanded", "torch", "triton"]
    assert [way["way"] for way in report["ways"]] == names
    assert [way["weights"] for way in report["ways"]] == ["packed"] * 3 + ["dense"] * 2
    small, same, large = (way["expert_bytes"] for way in report["ways"][:3])
    assert (small, same, large) == (38_400, 38_400, 3 * 128 * 256 + 8 * 3 * 64)
    one, many = (results(report, tokens) for tokens in (1, 17))
    assert many["qsrt a8"] == {"way": "qsrt a8", "skipped": "takes up to 16 tokens"}
    assert one["qsrt a8"]["bytes"] == one["qsrt"]["bytes"] == 2 * small + 128 * 4
    assert one["qsrt expanded"]["bytes"] == 2 * large + 128 * 4
    assert many["qsrt expanded"]["bytes"] == 3 * large + 17 * 128 * 4
    assert 1e-2 < one["qsrt a8"]["error"] < 9e-2
    assert max(found["qsrt expanded"]["error"] for found in (one, many)) < 2e-3
    assert one["qsrt a8"]["choice"] == "moe_decode"
    assert describe(report).endswith("\nM = 17: qsrt a8 left out: takes up to 16 tokens")


@interpreted
def test_expanded_layers_that_are_others_are_refused(machine, monkeypatch):
    real = packed.expanded

    def wrong(layer):
        found = real(layer)
        labels = found.matrices()[0].view(3, -1)  # of each expert's gate and up
        labels[:, : labels.shape[1] // 16] = 0
        return found

    monkeypatch.setattr(packed, "expanded", wrong)
    with pytest.raises(FormatError, match=r"qsrt expanded \(moe_prefill\) .* differs from the"):
        bench(TINY, [1], machine, also=["expanded"], dtype=HALF)


@interpreted
def test_ways_that_cannot_run_here(machine, with_free):
    report = bench(TINY, [1], replace(machine, capability=(8, 6)), also=["a8"], dtype=HALF)
    found = results(report, 1)
    assert found["qsrt a8"]["skipped"] == "takes an NVIDIA GPU of capability 8.9 or newer"
    assert found["torch"]["us"] > 0
    report = bench(TINY, [1], with_free(600_000), also=["expanded"], dtype=HALF)
    found = results(report, 1)
    assert found["qsrt expanded"]["skipped"].startswith("labels take 0.00 GB of memory, ")
    assert report["dense_absent"] and found["qsrt"]["us"] > 0


@interpreted
def test_a_package(machine, tmp_path):
    sizes = TrueSizes(192, 256)
    geometry = sizes.padded(3)
    folder = write_package(tmp_path / "p", geometry, layers=(0, 2), true_sizes=sizes)
    report = bench(folder, [2], machine, dtype=HALF)
    assert report["package"] == str(folder)
    assert report["seal_sha256"] == open_package(folder).seal_sha256
    assert report["content_sha256"] == content_sha256(open_package(folder))
    assert (report["hidden_size"], report["intermediate_size"]) == (192, 256)
    assert (report["experts"], report["topk"]) == (3, 2)
    assert report["load"]["layers"] == 2
    files = sum((folder / f"qsrt-layer-00{n}.safetensors").stat().st_size for n in (0, 2))
    assert 0.9 * files < report["load"]["bytes"] <= files
    assert report["load"]["seconds"] > 0 and report["load"]["verify_seconds"] > 0
    found = results(report, 2)
    assert all("us" in each for each in found.values())
    experts = report["rows"][0]["experts"]
    assert found["torch"]["bytes"] == experts * 3 * 192 * 256 * 2 + 2 * 2 * 192 * 2


@interpreted
def test_many_tokens(machine, monkeypatch):
    """Tiles for many tokens alone, since these are the routes of more than the others take."""
    monkeypatch.setattr(dense, "MAX_ROUTES", 8)
    found = results(bench(TINY, [17], machine, dtype=HALF), 17)
    assert found["triton"]["choice"] == "grouped (32, 128, 64, 4, 1) (32, 128, 64, 4, 1)"
    assert found["triton"]["error"] < 1e-2  # bfloat16, to which the interpreter cuts off


@interpreted
def test_a_wrong_result_is_not_timed(machine, clock, monkeypatch):
    real = packed.moe_decode

    def wrong(x, layer, ids, weights, workspace, out, **options):
        real(x, layer, ids, weights, workspace, out, **options)
        out[-1] *= 1.02

    monkeypatch.setattr(packed, "moe_decode", wrong)
    message = (
        r"qsrt \(wrong\) with 1 tokens differs from the reference by 2.0e-02, expected at most"
    )
    with pytest.raises(FormatError, match=message):
        bench(TINY, [1], machine, dtype=HALF)
    assert len(clock.timed) == 1  # the copies


@interpreted
def test_a_wrong_dense_way_is_left_out(machine, monkeypatch):
    real = dense.Dense.torch

    def wrong(self, x, ids, weights, out):
        real(self, x, ids, weights, out)
        out *= 0

    monkeypatch.setattr(dense.Dense, "torch", wrong)
    found = results(bench(TINY, [2], machine, dtype=HALF), 2)
    assert re.fullmatch(
        r"torch \(torch._grouped_mm\) with 2 tokens differs from the reference by 1\.0e\+00, "
        r"expected at most 0\.01; it was not timed",
        found["torch"]["skipped"],
    )
    assert found["qsrt"]["us"] > 0 and found["triton"]["us"] > 0


@interpreted
def test_a_way_that_this_torch_does_not_have(machine, monkeypatch):
    def refuse(*_arguments):
        raise RuntimeError("grouped gemm is for sm_90\nand more")

    monkeypatch.setattr(dense.Dense, "torch", refuse)
    report = bench(TINY, [2], machine, dtype=HALF)
    assert results(report, 2)["torch"] == {"way": "torch", "skipped": "grouped gemm is for sm_90"}
    assert results(report, 2)["triton"]["us"] > 0
    assert "M = 2: torch left out: grouped gemm is for sm_90" in describe(report)


def test_a_gpu_too_small_for_the_layers(machine, with_free, tmp_path):
    message = "take 0.00 GB of memory, and no GPU has 0.00 GB free; use one with more"
    with pytest.raises(FormatError, match="2 packed layers of these sizes " + message):
        bench(TINY, [1], with_free(100_000), dtype=HALF)
    folder = write_package(tmp_path / "p", Geometry(128, 256, 3))
    with pytest.raises(FormatError, match="2 of its layers " + message):
        bench(folder, [1], with_free(100_000), dtype=HALF)
    huge = parse_shape("H=99968,I=99840,E=9999,k=2")
    with pytest.raises(FormatError, match=r"1 packed layers of these sizes take 112\d{3}\.\d\d GB"):
        bench(huge, [1], machine)


@interpreted
def test_no_memory_for_the_dense_layers(with_free):
    report = bench(TINY, [1], with_free(900_000), dtype=HALF)
    assert report["dense_absent"] == "their weights take 0.00 GB of memory, 0.00 GB are free"
    assert [way["way"] for way in report["ways"]] == ["qsrt"]
    assert results(report, 1)["qsrt"]["us"] > 0
    assert "No dense ways: their weights take" in describe(report)


def test_no_memory_for_all_layers_of_a_package(with_free, tmp_path):
    folder = write_package(tmp_path / "p", Geometry(128, 256, 3), layers=(0, 1, 2, 3))
    for free, layers in ((400_000, 2), (600_000, 4)):
        report = bench(folder, [4096], with_free(free), dtype=HALF)
        assert (report["load"]["layers"], report["layers_in_turn"]) == (layers, 2)
        assert "us" not in results(report, 4096)["qsrt"]


@interpreted
def test_no_memory_for_so_many_tokens(with_free):
    report = bench(TINY, [1, 65536], with_free(8_000_000), dtype=HALF)
    assert results(report, 1)["qsrt"]["us"] > 0
    row = report["rows"][1]
    assert (row["experts"], row["distinct_bytes"]) == (None, None)
    for found in row["results"]:
        assert re.fullmatch(r"takes 0\.\d\d GB of memory, 0\.01 GB are free", found["skipped"])


@interpreted
def test_another_activation(machine, mixed):
    report = bench(mixed, [1], replace(machine, l2_bytes=1 << 18), dtype=HALF)
    assert report["dense_absent"] == "the experts have another activation than SiLU"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("text", "tokens"),
    [("H=128,I=256,E=4,k=2", [1, 3, 64, 300]), ("qwen30b", [1, 16, 512])],
)
def test_on_a_gpu(text, tokens):
    machine = machine_of(torch.device("cuda", 0))
    report = bench(parse_shape(text), tokens, machine, also=["a8", "expanded"])
    schema.check(report, "report", "report")
    assert report["dtype"] == "bfloat16"
    assert report["gpu"]["copy_bytes_per_s"] > 1e11
    for row in report["rows"]:
        found = results(report, row["tokens"])
        assert set(found) == {"qsrt", "qsrt a8", "qsrt expanded", "torch", "triton"}
        has_a8 = row["tokens"] <= 16 and machine.capability >= (8, 9)
        assert ("us" in found["qsrt a8"]) is has_a8
        for name in ("qsrt", "qsrt expanded", "triton", *["qsrt a8"] * has_a8):
            assert 0 < found[name]["us_low"] <= found[name]["us"] <= found[name]["us_high"]
            assert found[name]["error"] < (9e-2 if name == "qsrt a8" else 1e-2)
            assert 0 < found[name]["share"] < 1.2  # reading alone is quicker than copying
    if text == "qwen30b":  # larger than the cache
        assert all(row["distinct_bytes"] > report["gpu"]["l2_bytes"] for row in report["rows"])
