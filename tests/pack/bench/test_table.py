"""A report as a table and as a plot."""

from benched import result, with_ways

from qsrt_pack.bench.figure import plot
from qsrt_pack.bench.table import describe, speeds
from qsrt_pack.report.figures import plot_lines
from qsrt_runtime.format import schema


def test_the_table(report):
    schema.check(report, "report", "report")
    assert describe(report).splitlines() == [
        "/home/someone/model-qsrt: 2048 x 768, 128 experts, top-8, bfloat16 rows",
        "NVIDIA H200, compute capability 9.0, L2 cache 60 MB, copies 4.10 TB/s; torch 2.13.0, "
        "triton 3.6.0",
        "loaded 4 layers, 3.000 GB, in 1.50 s (2.00 GB/s) after 2.25 s of checks",
        "",
        "         --------- qsrt ---------   ----- torch ------   ---- triton ----",
        "     M      us   MB  share  speed       us   MB  share     us   MB  share",
        "     1    30.0  2.0   25 %   0.80     90.0  2.0   25 %   24.0  2.0   25 %",
        "4,096*   800.0  2.0   25 %   1.25   1000.0  2.0   25 %      -    -      -",
        "",
        "us: median of a layer's time; share: of what copying moves in that time, weights",
        "read once and rows in and out; speed: of the fastest dense way, in its times.",
        "*: what the calls go through is not larger than the L2 cache.",
        "Largest relative errors: qsrt 4.0e-03, torch 4.0e-03, triton 4.0e-03.",
        "M = 4096: triton left out: takes too much",
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


def test_all_ways(report):
    report = with_ways(report)
    schema.check(report, "report", "report")
    assert speeds(report, report["rows"][0]) == {
        "qsrt": 0.8,
        "qsrt a8": 1.2,
        "qsrt expanded": 24 / 25,
    }
    lines = describe(report).splitlines()
    assert lines[4:8] == [
        "         --------- qsrt ---------   ------- qsrt a8 -------   ---- qsrt expanded -----   "
        "----- torch ------   ---- triton ----",
        "     M      us   MB  share  speed     us   MB  share  speed      us   MB  share  speed   "
        "    us   MB  share     us   MB  share",
        "     1    30.0  2.0   25 %   0.80   20.0  2.0   25 %   1.20    25.0  2.0   25 %   0.96   "
        "  90.0  2.0   25 %   24.0  2.0   25 %",
        "4,096*   800.0  2.0   25 %   1.25      -    -      -      -   500.0  2.0   25 %   2.00   "
        "1000.0  2.0   25 %      -    -      -",
    ]
    assert plot(report).startswith(b"\x89PNG")


def test_a_time_out_of_all_proportion(report):
    report["rows"][0]["results"][0]["us"] = 1.5e300
    report["rows"][1]["results"][0]["us"] = 0.04
    lines = describe(report).splitlines()
    assert lines[6].split()[:6] == ["1", "1.5e+300", "2.0", "25", "%", "1.6e-299"]
    assert lines[7].split()[:6] == ["4,096*", "4.0e-02", "2.0", "25", "%", "25000.00"]


def test_what_is_left_out_for_one_reason_is_said_once(report):
    report["rows"].append(report["rows"][1] | {"tokens": 8192})
    assert describe(report).splitlines()[-1] == "M = 4096, 8192: triton left out: takes too much"
    for row in report["rows"]:
        row["results"] = [result("qsrt"), result("torch"), result("triton", skipped="no")]
    lines = describe(report).splitlines()
    assert lines[-3:] == [
        "M = 1, 4096, 8192: qsrt left out: takes too much",
        "M = 1, 4096, 8192: torch left out: takes too much",
        "M = 1, 4096, 8192: triton left out: no",
    ]
    assert not any("errors" in line for line in lines)


def test_the_plot(report):
    found = plot(report)
    assert found.startswith(b"\x89PNG") and found == plot(report)
    report["rows"] = report["rows"][1:]  # triton has no point left
    assert plot(report) != found


def test_every_line_of_the_plot_is_another():
    names = [f"way {number}" for number in range(16)]  # as many as a report may have
    panels = {"us": {name: [(1, 1), (2, 3)] for name in names}}
    (axes,) = plot_lines(panels, "tokens", "us").axes
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 16


def test_the_plots_names_lie_within_it(report):
    panels = {"us": {way["way"]: [(1, 1), (2, 3)] for way in with_ways(report)["ways"]}}
    figure = plot_lines(panels, "tokens", "us")
    figure.canvas.draw()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
