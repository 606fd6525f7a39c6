"""A report of bench as a plot."""

from typing import Any

from qsrt_pack.report import figures

_TIMES = "microseconds a layer"


def plot(report: dict[str, Any]) -> bytes:
    """A PNG file: times and shares of the copy bandwidth by number of tokens, a line a way."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for title, key, scale in (
        (_TIMES, "us", 1),
        ("% of the copy bandwidth", "share", 100),
    ):
        lines = {
            way["way"]: [
                (row["tokens"], scale * result[key])
                for row in report["rows"]
                for result in row["results"]
                if result["way"] == way["way"] and key in result
            ]
            for way in report["ways"]
        }
        panels[title] = {name: points for name, points in lines.items() if points}
    sizes = f"{report['hidden_size']} x {report['intermediate_size']}"
    title = f"{report['gpu']['name']}: {sizes}, {report['experts']} experts"
    return figures.png(figures.plot_lines(panels, "tokens", _TIMES), title)
