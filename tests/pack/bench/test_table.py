"""A report as a table and as a plot."""

from qsrt_pack.bench.figure import plot
from qsrt_pack.bench.table import describe, speeds
from qsrt_runtime.format import schema


def test_the_table(report):
    schema.check(report, "report", "report")
    assert describe(report).splitlines() == [
        "/home/someone/model-qsrt: 2048 x 768, 128 experts, top-8, bfloat16 rows",
        "NVIDIA H200, compute capability 9.0, L2 cache 60 MB, copies 4.10 TB/s; torch 2.13.0, "
        "triton 3.6.0",
        "loaded 4 layers, 3.000 GB, in 1.50 s (2.00 GB/s) after 2.25 s of checks",
        "",
        "     M  qsrt us  qsrt MB  qsrt share  torch us  torch MB  torch share  triton us  "
        "triton MB  triton share  qsrt speed",
        "     1     30.0      2.0        25 %      90.0       2.0         25 %       24.0        "
        "2.0          25 %        0.80",
        "4,096*    800.0      2.0        25 %    1000.0       2.0         25 %          -          "
        "-             -        1.25",
        "",
        "us: median of a layer's time; share: of what copying moves in that time, weights",
        "read once and rows in and out; speed: of the fastest dense way, in its times.",
        "*: what the calls go through is not larger than the L2 cache.",
        "M = 4096, triton left out: takes too much",
    ]


def test_without_a_package_or_dense_ways(report):
    report |= dict.fromkeys(("package", "seal_sha256", "content_sha256", "load"))
    report["dense_absent"] = "too large"
    report["ways"] = report["ways"][:1]
    for row in report["rows"]:
        row["results"] = row["results"][:1]
    schema.check(report, "report", "report")
    text = describe(report)
    assert text.startswith("random words: 2048 x 768")
    assert "loaded" not in text and "No dense ways: too large." in text
    assert speeds(report, report["rows"][0]) == {}


def test_another_packed_way_is_another_column(report):
    """What comes later, with weights of its own kind, needs no change."""
    report["ways"].insert(1, {"way": "qsrt w4a8", "weights": "packed", "expert_bytes": 500})
    for row in report["rows"]:
        row["results"].insert(1, row["results"][0] | {"way": "qsrt w4a8", "us": 20})
    schema.check(report, "report", "report")
    assert speeds(report, report["rows"][0]) == {"qsrt": 0.8, "qsrt w4a8": 1.2}
    assert describe(report).splitlines()[5].endswith("  0.80             1.20")
    assert plot(report).startswith(b"\x89PNG")


def test_the_plot(report):
    found = plot(report)
    assert found.startswith(b"\x89PNG") and found == plot(report)
    report["rows"] = report["rows"][1:]  # triton has no point left
    assert plot(report) != found
