"""A report: what its page states, what it refuses, and that it repeats."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import checkpoints
import pytest
from click.testing import CliRunner
from matplotlib import rc_context
from matplotlib.text import Text

from qsrt_pack.cli import main
from qsrt_pack.report import figures, write_report
from qsrt_pack.report.content import check_histogram, read_content
from qsrt_pack.report.sections import build_sections
from qsrt_runtime.format import manifest, schema
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.package import open_package, seal

ALL = {"errors.png", "modes.png", "tokens.png", "thin.png", "bytes.png", "worst.png"}


class _Page(HTMLParser):
    """The rows of each section's tables, its text, and the attributes of all elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: dict[str, list[list[str]]] = {}
        self.texts: dict[str, str] = {}
        self.tags: list[tuple[str, dict]] = []
        self._section, self._in_cell = "", False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self._section = dict(attrs)["id"]
            self.rows[self._section], self.texts[self._section] = [], ""
        elif tag == "tr":
            self.rows[self._section].append([])
        elif tag in ("td", "th"):
            self.rows[self._section][-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = self._in_cell and tag not in ("td", "th")
        self._section = "" if tag == "section" else self._section

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.rows[self._section][-1][-1] += data
        if self._section:
            self.texts[self._section] += data


def report(package: Path, **options: object) -> _Page:
    html = package.with_name("report.html")
    write_report(package, html, show_progress=False, overwrite=True, **options)
    return _Page(html.read_text())


def test_numbers_are_those_of_the_evidence(calibrated: Path) -> None:
    page = report(calibrated)
    rows = page.rows["worst"][1:11]
    by_outputs = [(layer, expert) for expert in (5, 4, 3, 2, 1) for layer in (0, 2)]
    assert [(int(row[0]), int(row[1])) for row in rows] == by_outputs
    rows = page.rows["worst"][12:22]
    worst = [(0, 3), (2, 5), (2, 4), (2, 3), (2, 2), (2, 1), (2, 0), (0, 5), (0, 4), (0, 2)]
    assert [(int(row[0]), int(row[1])) for row in rows] == worst
    assert rows[0] == ["0", "3", "0.01300", "0.00650", "0.90000", "0.03300", "1,200", "R0/R0"]
    assert rows[6] == ["2", "0", "0.03000", "0.01500", "0.00000", "", "0", "R0/R0"]

    assert ["0", "w1, gate", "0.01000", "0.01050", "0.01250", "0.01450", "0.01500"] in page.rows[
        "errors"
    ]
    assert ["2", "tokens", "0", "200", "1,000", "1,800", "2,000"] in page.rows["tokens"]
    thin = page.rows["thin"]
    assert [row[:2] + row[3:] for row in thin[1:5]] == [
        ["0", "0", "0"], ["2", "0", "0"], ["0", "1", "400"], ["2", "1", "400"]
    ]  # fmt: skip
    assert thin[-2:] == [["0", "1", "1"], ["2", "1", "1"]]
    assert ["2", "down (w2)", "0", "6", "6", "0", "0"] in page.rows["modes"]
    total = sum(path.stat().st_size for path in calibrated.iterdir())
    assert page.rows["bytes"][-1] == ["all", f"{total:,}", ""]


def _drawn(package: Path) -> dict[str, tuple[str, list[str]]]:
    """By section its title and the texts of its plot, in the order in which they are drawn."""
    content = read_content(package, None, show_progress=False)
    return {
        s.name: (s.title, [t.get_text() for t in s.figure.findobj(Text) if t.get_text()])
        for s in build_sections(content)
        if s.figure is not None
    }


def _edit(package: Path, change: Callable[[dict], None]) -> None:
    """Change every expert's evidence and seal the package."""
    for path in package.glob("qsrt-layer-*.json"):
        checkpoints.edit_json(path, lambda e: [change(item) for item in e["experts"]])
    seal(package)


def test_the_worst_are_drawn_by_outputs_where_these_are_known(calibrated: Path) -> None:
    title, texts = _drawn(calibrated)["worst"]
    assert title == "Worst ten experts, by error of outputs"
    bars = [text for text in texts if text.startswith(("layer", "0."))]
    assert bars[:4] == ["layer 0, expert 5", "0.03500", "layer 2, expert 5", "0.03500"]
    _edit(calibrated, lambda e: e.update(functional_nmse=None))
    title, texts = _drawn(calibrated)["worst"]
    assert title == "Worst ten experts, by error of weights"
    bars = [text for text in texts if text.startswith(("layer", "0."))]
    assert bars[:4] == ["layer 0, expert 3", "0.90000", "layer 2, expert 5", "0.03500"]


def test_outputs_that_were_not_measured_are_spoken_of(calibrated: Path) -> None:
    sentence = "The error of outputs is not known: no document of the text was left"
    assert sentence not in report(calibrated).texts["errors"]
    _edit(calibrated, lambda e: e.update(functional_nmse=None))
    page = report(calibrated)
    assert sentence in page.texts["errors"] and "outputs on the text" not in page.texts["errors"]


def test_matrices_of_zeros_are_listed(calibrated: Path) -> None:
    assert "zeros" not in report(calibrated).texts["errors"]
    _edit(
        calibrated,
        lambda e: e.update(zero_matrices=["w1", "w2"]) if e["expert"] == 4 else None,
    )
    page = report(calibrated)
    assert page.rows["errors"][:3] == [
        ["layer", "expert", "matrices"], ["0", "4", "w1, w2"], ["2", "4", "w1, w2"]
    ]  # fmt: skip
    assert "Experts with matrices of zeros: the first 2 of 2" in page.texts["errors"]


@pytest.mark.parametrize("key", ["nmse", "functional_nmse", "tokens", "kl"])
def test_the_largest_numbers_are_drawn(
    calibrated: Path, evaluation: dict, tmp_path: Path, key: str
) -> None:
    """Of each sort one; schemas allow them, and axes would overflow."""
    largest = {"nmse": {"w1": 1.7e308, "w3": 0, "w2": 5e-324}, "functional_nmse": 1.7e308}
    largest["tokens"] = 2**52
    if key in largest:
        path = calibrated / "qsrt-layer-002.json"
        checkpoints.edit_json(path, lambda e: e["experts"][5].update({key: largest[key]}))
        seal(calibrated)
    else:
        scores = {"cross_entropy": 709.0, "perplexity": 1.7e308}
        evaluation |= {f"kl_{name}": 1.7e308 for name in ("mean", "median", "p90", "p99", "max")}
        evaluation |= {"kl_mean_interval": None, "package_score": scores}
        evaluation["kl_histogram"] = {"edges": [5e-324, 1, 1.7e308], "counts": [5, 6]}
    file = tmp_path / "eval.json"
    file.write_text(json.dumps(evaluation | {"seal_sha256": open_package(calibrated).seal_sha256}))
    html, png = tmp_path / "page.html", tmp_path / "plots"
    write_report(calibrated, html, png=png, evaluation=file, show_progress=False)
    page = _Page(html.read_text())
    assert {path.name for path in png.iterdir()} == ALL | {"kl.png"}
    said = "4,503,599,627,370,496" if key == "tokens" else "1.7e+308"
    assert any(said in row for rows in page.rows.values() for row in rows)
    assert max(len(cell) for rows in page.rows.values() for row in rows for cell in row) < 100


def test_each_plot_file_has_a_title_and_units(
    calibrated: Path, evaluation: dict, tmp_path: Path
) -> None:
    file = tmp_path / "eval.json"
    file.write_text(json.dumps(evaluation | {"seal_sha256": open_package(calibrated).seal_sha256}))
    units = {
        "kl": {"KL of a position, nats", "positions"},
        "errors": {"squared error, relative", "layer"},
        "modes": {"pairs, %", "layer"},
        "tokens": {"tokens", "layer"},
        "thin": {"experts", "layer"},
        "bytes": {"share of all bytes"},
        "worst": {"squared error of outputs, relative"},
    }
    sections = build_sections(read_content(calibrated, file, show_progress=False))
    assert {section.name for section in sections} == set(units)
    for section in sections:
        figures.png(section.figure, section.title)
        section.figure.draw_without_rendering()
        found = [text for text in section.figure.findobj(Text) if text.get_text()]
        assert {text.get_text() for text in found} >= {section.title, *units[section.name]}
        ticks = [
            label
            for ax in section.figure.axes
            for label in (*ax.get_xticklabels(), *ax.get_yticklabels())
        ]
        boxes = {text.get_text(): text.get_window_extent() for text in found if text not in ticks}
        title = boxes.pop(section.title)
        assert title.x0 >= 0 and title.x1 <= section.figure.bbox.x1
        assert not [name for name, box in boxes.items() if box.overlaps(title)]
        assert title.y0 >= max(ax.get_window_extent().y1 for ax in section.figure.axes)


def test_every_fold_has_a_name_of_its_own(calibrated: Path) -> None:
    write_report(calibrated, calibrated.with_name("p.html"), show_progress=False)
    text = calibrated.with_name("p.html").read_text()
    found = re.findall("<summary>(.*?)</summary>", text)
    assert len(found) == len(set(found)) == 6
    assert "Numbers: Rate modes chosen" in found


def test_a_backend_that_matplotlib_lacks_matters_to_no_report(
    calibrated: Path, repository: Path
) -> None:
    environment = os.environ | {"MPLBACKEND": "bogus", "PYTHONPATH": str(repository)}
    command = [sys.executable, "-m", "qsrt_pack", "-q", "report", str(calibrated)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_snapshot_of_the_hub_is_called_by_its_repository(
    calibrated: Path, evaluation: dict, tmp_path: Path
) -> None:
    snapshot = tmp_path / "models--owner--model-qsrt" / "snapshots" / ("a" * 40)
    shutil.copytree(calibrated, snapshot)
    file, html = tmp_path / "eval.json", tmp_path / "page.html"
    evaluation["reference"] = "/hub/models--owner--model/snapshots/" + "b" * 40
    evaluation["seal_sha256"] = open_package(snapshot).seal_sha256
    file.write_text(json.dumps(evaluation))
    write_report(snapshot, html, evaluation=file, show_progress=False)
    assert _Page(html.read_text()).rows["kl"][1] == ["name", "owner/model", "model-qsrt"]
    assert "<h1>owner/model-qsrt</h1>" in html.read_text()


def test_modes_are_counted_by_layer_and_matrix(mixed: Path) -> None:
    rows = report(mixed).rows["modes"][1:]
    by_layer = {0: [], 1: []}
    for layer in by_layer:
        evidence = json.loads((mixed / f"qsrt-layer-{layer:03}.json").read_text())
        for key in ("mode13", "mode2"):
            by_layer[layer].append([item[key] for item in evidence["experts"]])
    for row in rows:
        modes = by_layer[int(row[0])][row[1] == "down (w2)"]
        counts = [modes.count(mode) for mode in ("R0", "R1", "R2")]
        assert [int(cell) for cell in row[4:]] == counts
        assert int(row[2]) == counts[1] + 2 * counts[2]
        assert int(row[2]) + int(row[3]) == 2 * len(modes)
    assert len(rows) == 4


def test_the_same_package_gives_the_same_bytes(calibrated: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        html, png = tmp_path / f"{name}.html", tmp_path / name
        write_report(calibrated, html, png=png, show_progress=False)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    files = {path.name for path in (tmp_path / "a").iterdir()}
    assert files == ALL
    for name in files:
        data = (tmp_path / "a" / name).read_bytes()
        assert data.startswith(b"\x89PNG") and data == (tmp_path / "b" / name).read_bytes()


def test_strings_of_the_package_stay_strings(
    calibrated: Path, evaluation: dict, tmp_path: Path
) -> None:
    file = tmp_path / "eval.json"
    evaluation["seal_sha256"] = open_package(calibrated).seal_sha256
    file.write_text(json.dumps(evaluation))
    page = report(calibrated, evaluation=file)
    text = (tmp_path / "report.html").read_text()
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "i", "b", "img", "link", "iframe"})
    assert page.rows["thin"][1][2] == '<script>alert(1)</script> & "more" $x^2$'
    assert page.rows["kl"][1] == ["name", "<b>model", "model-qsrt"]
    assert "The reference is not the checkpoint that was packed." in page.texts["kl"]
    for path in (str(tmp_path), "/home/someone"):
        assert path not in text
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = {value for _, attributes in page.tags for value in attributes.values() if value}
    assert all(v.startswith("http://www.w3.org/") for v in links if "//" in v)


def test_a_package_made_elsewhere_says_what_is_not_known(golden: Path, tmp_path: Path) -> None:
    html, png = tmp_path / "page.html", tmp_path / "plots"
    write_report(golden / "publication", html, png=png, show_progress=False)
    page = _Page(html.read_text())
    for name in ("errors", "tokens", "thin", "worst"):
        assert "Not known: the package was made elsewhere" in page.texts[name]
        assert not page.rows[name]
    assert page.rows["modes"][1] == ["5", "gate and up (w1, w3)", "3", "5", "2", "1", "1"]
    assert {path.name for path in png.iterdir()} == {"modes.png", "bytes.png"}


def test_a_package_without_calibration_says_so(clean_package: Path, tmp_path: Path) -> None:
    html = tmp_path / "page.html"
    write_report(clean_package, html, show_progress=False)
    page = _Page(html.read_text())
    for name in ("tokens", "thin"):
        assert "Not calibrated" in page.texts[name] and not page.rows[name]
    assert "Not evaluated" in page.texts["kl"]
    assert len(page.rows["worst"]) == 1 + 8


def test_the_evaluation_that_the_package_holds(calibrated: Path, evaluation: dict) -> None:
    (calibrated / manifest.REPORT).write_bytes(schema.dump(evaluation))
    seal(calibrated)
    page = report(calibrated)
    assert page.rows["kl"][2] == ["perplexity", "18.2500", "20.5000"]
    assert ["same most likely token", "", "81.25 %"] in page.rows["kl"]


def test_evaluations_that_are_not_of_this_package(
    calibrated: Path, evaluation: dict, tmp_path: Path
) -> None:
    file, html = tmp_path / "eval.json", tmp_path / "report.html"
    file.write_text(json.dumps(evaluation))
    with pytest.raises(FormatError, match=r"seal_sha256 is 2+, the package's is .*; evaluate this"):
        report(calibrated, evaluation=file)
    file.write_text(CliRunner().invoke(main, ["inspect", str(calibrated), "--json"]).stdout)
    with pytest.raises(FormatError, match="is a report of inspect, expected one of eval --json"):
        report(calibrated, evaluation=file)
    assert not html.exists()
    (calibrated / manifest.REPORT).write_bytes(
        schema.dump(evaluation | {"encoder_fingerprint": "1" * 64})
    )
    seal(calibrated)
    with pytest.raises(FormatError, match=r"qsrt-eval\.json: encoder_fingerprint is 1+, the"):
        report(calibrated)


@pytest.mark.parametrize(
    ("edges", "counts"),
    [([1, 2, 3], [1, 2, 3]), ([1, 3, 2], [1, 2]), ([-1, 2, 3], [1, 2]), ([1, 2], [1]), ([], [])],
)
def test_a_histogram_whose_edges_do_not_fit(edges: list, counts: list) -> None:
    with pytest.raises(FormatError, match=r"eval\.json: kl_histogram has"):
        check_histogram({"edges": edges, "counts": counts}, Path("eval.json"))


def test_nothing_is_replaced_unasked_or_put_into_a_package(
    calibrated: Path, tmp_path: Path
) -> None:
    def refused(message: str, html: Path, **options: object) -> None:
        with pytest.raises(FormatError, match=message):
            write_report(calibrated, html, show_progress=False, **options)

    taken, plots = tmp_path / "taken.html", tmp_path / "plots"
    taken.write_text("mine")
    plots.mkdir()
    (plots / "mine.png").write_text("mine")
    refused("exists; choose another or give --overwrite", taken)
    refused("is not empty; choose another or give --overwrite", tmp_path / "page.html", png=plots)
    other = shutil.copytree(calibrated, tmp_path / "other")
    for package in (calibrated, other):
        sealed = f"lies in the package {package}, which is sealed"
        refused(sealed, package / "page.html")
    refused(sealed, tmp_path / "page.html", png=other / "plots")
    refused("has 240 bytes, expected at most 239; choose", tmp_path / ("n" * 240))
    refused("lie inside each other", tmp_path / "page.html", png=calibrated / "plots")
    for page in (plots, plots / "page.html"):
        message = "is a folder; name a file" if page == plots else "is to hold the plots alone"
        refused(message, page, png=plots, overwrite=True)
    refused("is to hold the plots alone", tmp_path / "new", png=tmp_path / "new")
    refused("is a folder; name a file", tmp_path)
    refused("is not a folder; make it", tmp_path / "absent" / "page.html")
    assert taken.read_text() == "mine" and [p.name for p in plots.iterdir()] == ["mine.png"]
    assert not (tmp_path / "page.html").exists()
    open_package(calibrated)

    write_report(calibrated, taken, png=plots, overwrite=True, show_progress=False)
    assert taken.read_text().startswith("<!DOCTYPE html>")
    assert {path.name for path in plots.iterdir()} == ALL


def test_what_stands_beside_the_page_is_left_alone(
    calibrated: Path, evaluation: dict, tmp_path: Path
) -> None:
    mine = {name: tmp_path / name for name in ("page.html.partial", "link.html", "pipe.html")}
    mine["page.html.partial"].write_text("mine")
    mine["link.html"].symlink_to(tmp_path / "nowhere")
    os.mkfifo(mine["pipe.html"])
    write_report(calibrated, tmp_path / "page.html", show_progress=False)
    assert mine["page.html.partial"].read_text() == "mine"
    with pytest.raises(FormatError, match="exists; choose another or give --overwrite"):
        write_report(calibrated, mine["link.html"], show_progress=False)
    with pytest.raises(FormatError, match="is no regular file"):
        write_report(calibrated, mine["pipe.html"], overwrite=True, show_progress=False)
    file = tmp_path / "plots" / "eval.json"
    file.parent.mkdir()
    file.write_text(json.dumps(evaluation | {"seal_sha256": open_package(calibrated).seal_sha256}))
    given = {"evaluation": file, "overwrite": True, "show_progress": False}
    with pytest.raises(FormatError, match="would be replaced by what is written"):
        write_report(calibrated, tmp_path / "new.html", png=file.parent, **given)
    with pytest.raises(FormatError, match="would be replaced by what is written"):
        write_report(calibrated, file, **given)
    assert json.loads(file.read_text())["kl_mean"] == 0.125


def test_a_failure_leaves_neither_page_nor_plots(
    calibrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytes:
        raise OSError("no space")

    monkeypatch.setattr(figures, "png", fail)
    with pytest.raises(OSError, match="no space"):
        write_report(calibrated, tmp_path / "p.html", png=tmp_path / "png", show_progress=False)
    assert [path.name for path in tmp_path.iterdir()] == [calibrated.name]


def test_the_users_style_changes_nothing(calibrated: Path, tmp_path: Path) -> None:
    write_report(calibrated, tmp_path / "a.html", show_progress=False)
    with rc_context({"axes.facecolor": "black", "lines.linewidth": 9}):
        write_report(calibrated, tmp_path / "b.html", show_progress=False)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_the_root_folder_is_refused(calibrated: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["report", "/"])
    assert (result.exit_code, "give --html" in result.stderr) == (2, True)
    with pytest.raises(FormatError, match="is the root folder; name a folder in it"):
        write_report(calibrated, tmp_path / "p.html", png=Path("/"), show_progress=False)


def test_the_command(calibrated: Path, tmp_path: Path) -> None:
    html = tmp_path / f"{calibrated.name}-report.html"
    result = CliRunner().invoke(main, ["-q", "report", str(calibrated)])
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{html}\n", "")
    assert html.is_file()
    again = CliRunner().invoke(main, ["report", str(calibrated)])
    assert (again.exit_code, again.stdout) == (1, "")
    assert "give --overwrite" in again.stderr
    plots = tmp_path / "plots"
    options = ["--html", str(html), "--png", str(plots), "--overwrite"]
    assert CliRunner().invoke(main, ["report", str(calibrated), *options]).exit_code == 0
    assert {path.name for path in plots.iterdir()} == ALL


def test_help_has_an_example_that_parses() -> None:
    result = CliRunner().invoke(main, ["report", "--help"])
    (line,) = (line for line in result.stdout.splitlines() if "qsrt-pack report " in line)
    arguments = line.split("qsrt-pack report ")[1].split()
    assert main.commands["report"].make_context("report", arguments).params["png"].name == "plots"
