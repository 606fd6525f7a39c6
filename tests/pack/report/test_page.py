"""The page in a real browser: all is drawn, nothing is asked for, on a phone and in the dark.

Needs Debian's chromium (`apt-get install chromium`) and playwright, which drives it; skipped where
one of them is not there.
"""

import math
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qsrt_pack.report.content import Content, Expert, read_content
from qsrt_pack.report.page import build_page
from qsrt_pack.report.sections import build_sections

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

HEADINGS = [
    "Package",
    "KL against the original",
    "Error by layer and matrix",
    "Rate modes chosen",
    "Calibration tokens of the experts",
    "Thin experts and fallbacks",
    "Bytes by kind",
    "Worst ten experts, by error of outputs",
]
PLOTS = ["kl", "errors", "modes", "tokens", "thin", "bytes", "worst"]
PHONE, DESKTOP = {"width": 360, "height": 740}, {"width": 1280, "height": 900}
DRAWN = """svgs => svgs.map(svg => ({
    name: svg.closest("section").id,
    size: svg.getBoundingClientRect().toJSON(),
    marks: [...svg.querySelectorAll("path, use")].filter(mark => {
        const box = mark.getBoundingClientRect();
        return box.width > 0 || box.height > 0;
    }).length,
    smallest: Math.min(...[...svg.querySelectorAll("text")].map(
        text => text.getBoundingClientRect().height)),
    outside: [...svg.querySelectorAll("text")].filter(text => {
        const box = text.getBoundingClientRect(), all = svg.getBoundingClientRect();
        return box.left < all.left - 1 || box.right > all.right + 1;
    }).map(text => text.textContent),
}))"""

MARKS = """all => all.filter(mark => !mark.closest("defs, clipPath")).map(mark => {
    const style = getComputedStyle(mark);
    return {
        colours: [style.fill, style.stroke].filter(colour => colour != "none"),
        opacity: Math.min(style.opacity, style.fillOpacity, style.strokeOpacity),
    };
})"""
GRID = """body => {
    const mark = body.appendChild(document.createElement("i"));
    mark.style.color = "var(--faint)";
    return getComputedStyle(mark).color;
}"""
# What ends beyond its section, but for what lies in a box that scrolls.
CUT = """all => all.filter(each => {
    const box = each.getBoundingClientRect(), section = each.closest("section");
    return box.right > section.getBoundingClientRect().right && !each.closest(".scroll table");
}).map(each => each.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
    if not any(found):
        pytest.skip("no chromium here; apt-get install chromium")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=next(filter(None, found)))
        yield chromium
        chromium.close()


def _large(content: Content, layers: int, experts: int) -> Content:
    """The content with so many layers, from 3, of as many experts, of all modes."""
    rng = random.Random(0)

    def expert(layer: int, number: int) -> Expert:
        tokens = int(rng.lognormvariate(6, 2)) if number else 0
        evidence = {
            "nmse": {m: 0.02 * rng.lognormvariate(layer / 200, 0.1) for m in ("w1", "w3", "w2")},
            "functional_nmse": 0.03 * rng.lognormvariate(0, 0.3) if tokens else None,
            "tokens": tokens,
            "fallback": None if tokens else "no rows",
            "zero_matrices": [],
        }
        return Expert(layer, number, (rng.randrange(3), rng.randrange(3)), evidence)

    numbers = range(3, 3 + layers)
    found = {layer: [expert(layer, number) for number in range(experts)] for layer in numbers}
    return replace(content, records=16, experts=found)


@pytest.fixture(params=["small", "large"])
def page_file(
    request: pytest.FixtureRequest, calibrated: Path, evaluation: dict, tmp_path: Path
) -> Path:
    """The page of 2 layers of 6 experts, or of 60 of 256."""
    edges = [10 ** (power / 4) for power in range(-24, 5)]
    evaluation |= {
        "kl_histogram": {
            "edges": edges,
            "counts": [int(9000 * math.exp(-(((n - 15) / 4) ** 2))) for n in range(28)],
        }
    }
    content = replace(read_content(calibrated, None, show_progress=False), evaluation=evaluation)
    if request.param == "large":
        content = _large(content, 60, 256)
    text = build_page(content, build_sections(content))
    assert len(text) < 1_000_000
    file = tmp_path / "page.html"
    file.write_text(text)
    return file


def _open(browser: Any, file: Path, viewport: dict, scheme: str) -> tuple[Any, list[str]]:
    """The page, and what went wrong: every console message, error and request but for the file."""
    page = browser.new_page(viewport=viewport, color_scheme=scheme)
    faults: list[str] = []
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda asked: faults.append(asked.url) if asked.url != file.as_uri() else 0)
    page.goto(file.as_uri())
    return page, faults


@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_everything_is_drawn(browser: Any, page_file: Path, viewport: dict) -> None:
    page, faults = _open(browser, page_file, viewport, "light")
    assert [heading.inner_text() for heading in page.locator("h2").all()] == HEADINGS
    drawn = page.locator("section svg").evaluate_all(DRAWN)
    assert [plot["name"] for plot in drawn] == PLOTS
    for plot in drawn:
        assert plot["size"]["width"] > 250 and plot["size"]["height"] > 100, plot
        assert plot["marks"] > 5 and plot["smallest"] > 9 and plot["outside"] == [], plot
    worst = page.locator("#worst table").first
    assert worst.is_visible() and worst.locator("tbody tr").count() == 10
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    for summary in page.locator("summary").all():
        summary.click()
    assert all(table.is_visible() for table in page.locator("table").all())
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    assert faults == []
    page.close()


def _luminance(colour: str) -> float:
    """Relative luminance by WCAG 2 of `rgb(r, g, b)`."""
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _contrast(a: str, b: str) -> float:
    low, high = sorted((_luminance(a), _luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("scheme", "is_dark"), [("light", False), ("dark", True)])
def test_texts_and_plots_can_be_read_in_the_light_and_in_the_dark(
    browser: Any, page_file: Path, scheme: str, is_dark: bool
) -> None:
    page, faults = _open(browser, page_file, PHONE, scheme)
    behind = page.locator("section").first.evaluate("e => getComputedStyle(e).backgroundColor")
    body = page.locator("body").evaluate("e => getComputedStyle(e).backgroundColor")
    assert (_luminance(behind) < 0.1) == (_luminance(body) < 0.1) == is_dark
    texts = page.locator("svg text").evaluate_all("all => all.map(e => getComputedStyle(e).fill)")
    others = page.locator("p, td, caption").evaluate_all(
        "all => all.map(e => getComputedStyle(e).color)"
    )
    assert min(_contrast(colour, behind) for colour in {*texts, *others}) > 4.5  # WCAG AA
    marks = page.locator("svg path, svg use").evaluate_all(MARKS)
    grid = page.locator("body").evaluate(GRID)  # helps to see, says nothing
    colours = {colour for mark in marks for colour in mark["colours"]} - {grid}
    assert len(colours) >= 5 and min(_contrast(colour, behind) for colour in colours) >= 3
    assert {mark["opacity"] for mark in marks} == {1}
    assert faults == []
    page.close()


@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_long_texts_stay_in_their_boxes(
    browser: Any, calibrated: Path, tmp_path: Path, viewport: dict
) -> None:
    content = read_content(calibrated, None, show_progress=False)
    for texts in content.experts.values():
        texts[0].evidence["fallback"] = 20 * "no rows of its own came, so its layer's, " + 200 * "x"
    file = tmp_path / "page.html"
    file.write_text(build_page(content, build_sections(content)))
    page, _ = _open(browser, file, viewport, "light")
    for summary in page.locator("summary").all():
        summary.click()
    cut = page.locator("section *").evaluate_all(CUT)
    assert cut == []
    scrolled = page.locator(".scroll").evaluate_all(
        "all => all.filter(e => e.scrollWidth > e.clientWidth + 1).length"
    )
    assert scrolled == 0 or viewport == PHONE
    widths = page.locator("td.name").evaluate_all("all => all.map(e => e.clientWidth)")
    assert min(widths) > 40  # wrapped by words, not by letters
    page.close()


def test_a_fault_would_be_seen(browser: Any, tmp_path: Path) -> None:
    """The page's policy stops what a string of a package would ask for, and that is noticed."""
    policy = "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'\">"
    file = tmp_path / "page.html"
    file.write_text(f"{policy}<script>alert(1)</script><img src='http://127.0.0.1:9/x.png'>")
    page, faults = _open(browser, file, PHONE, "light")
    assert len(faults) >= 2
    page.close()
