"""The kinds of plots that a report has, and their SVG and PNG files.

Colours are those of a light page; in an SVG each is a variable of the page's style sheet, which
has others for a dark one. The same values give the same bytes.
"""

import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from xml.etree import ElementTree

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

_INK, _FAINT, _COLOURS = "#24292f", "#d0d7de", ("#0969da", "#d4761a", "#1a7f37", "#8250df")
_REST, _LINES = "#7d8590", ("-", "--", "-.", ":")
_LEAST, _LARGEST = 1e-30, 1e30  # ends of what is drawn: near 1e308 matplotlib's axes overflow
_VARIABLES = {_INK: "--ink", _FAINT: "--faint", _REST: "--rest"} | {
    colour: f"--series-{number}" for number, colour in enumerate(_COLOURS)
}
_WIDTH = 4.4  # inches, which are 317 points: on a phone of 360 pixels letters keep their size
_STYLE = {
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 11,
    "text.color": _INK,
    "text.parse_math": False,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _FAINT,
    "legend.frameon": False,
    "svg.fonttype": "none",
}
_SVG = "{http://www.w3.org/2000/svg}"
_XLINK = "{http://www.w3.org/1999/xlink}"
ElementTree.register_namespace("", _SVG.strip("{}"))
ElementTree.register_namespace("xlink", _XLINK.strip("{}"))


@dataclass(frozen=True)
class Spread:
    """Values of a layer's experts: least, tenth, median, ninetieth in a hundred, and largest."""

    low: float
    tenth: float
    median: float
    ninetieth: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    return Spread(
        *np.quantile(np.asarray(values, dtype=np.float64), (0, 0.1, 0.5, 0.9, 1)).tolist()
    )


@contextmanager
def _panels(count: int, height: float) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure of so many axes below each other, each as high, in inches, as said."""
    with style.context(["default", _STYLE]):
        figure = Figure(figsize=(_WIDTH, height * count + 0.35), layout="constrained")
        axes = figure.subplots(count, 1, squeeze=False)[:, 0]
        for each in axes:
            each.grid(axis="y")
        yield figure, list(axes)


def plot_spreads(
    layers: Sequence[int],
    panels: dict[str, dict[int, Spread]],
    label: str,
    *,
    logarithmic: bool = False,
) -> Figure:
    """A panel by title, in it a stroke for each layer, over its range and its middle four fifths.

    label: what the values are, with their unit.   logarithmic: but for values below 1.
    """
    with _panels(len(panels), 1.45 if len(panels) > 1 else 2) as (figure, axes):
        stroke = _stroke(layers)
        for ax, colour, (title, spreads) in zip(axes, _COLOURS, panels.items(), strict=False):
            places = [place for place, layer in enumerate(layers) if layer in spreads]
            found = [spreads[layers[place]] for place in places]
            lows, highs = _drawn(s.low for s in found), _drawn(s.high for s in found)
            ax.vlines(places, lows, highs, color=colour, linewidth=1)
            tenths, ninetieths = (
                _drawn(s.tenth for s in found),
                _drawn(s.ninetieth for s in found),
            )
            ax.vlines(places, tenths, ninetieths, color=colour, linewidth=stroke)
            ax.plot(
                places,
                _drawn(s.median for s in found),
                "_",
                color=_INK,
                markersize=1.4 * stroke,
                markeredgewidth=max(1, stroke / 4),
            )
            ax.set_title(title if len(panels) > 1 else "")
            ax.update_datalim([(0, 0)])
            ax.autoscale_view()
            ax.set_ylim(bottom=0)
            if logarithmic:
                _scale_from_zero(ax, max(highs))
            _name_layers(ax, layers)
        _share_axes(figure, axes, label)
    return figure


def plot_stacks(
    layers: Sequence[int],
    panels: dict[str, dict[str, Sequence[float]]],
    label: str,
    *,
    top: float | None,
) -> Figure:
    """A panel by title, in it a bar for each layer, of two parts by their name.

    The first part is the one to be seen.   label: what the bars count, with its unit.
    top: where the axis ends, None for where the bars do.
    """
    with _panels(len(panels), 1.7) as (figure, axes):
        for ax, (title, parts) in zip(axes, panels.items(), strict=True):
            below = np.zeros(len(layers))
            for colour, (name, values) in zip((_COLOURS[0], _REST), parts.items(), strict=True):
                height = np.asarray(values, dtype=np.float64)
                ax.bar(range(len(layers)), height, 0.8, below, color=colour, label=name)
                below += height
            ax.set_title(title)
            ax.set_ylim(0, top)
            ax.yaxis.set_major_locator(MaxNLocator(4, integer=top is None))
            _name_layers(ax, layers)
        _share_axes(figure, axes, label)
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower right", ncols=len(names))
    return figure


def plot_bars(bars: dict[str, float], label: str, describe: Callable[[float], str]) -> Figure:
    """A horizontal bar for each name, which stands above it with the value's description.

    label: what the values are, with their unit.
    """
    with _panels(1, 0.38 * len(bars)) as (figure, (ax,)):
        values = _drawn(bars.values())
        places = np.arange(len(bars))
        ax.barh(places, values, 0.38, color=_COLOURS[0])
        largest = max(values) or 1
        for place, (name, value) in zip(places, bars.items(), strict=True):
            ax.text(0, place - 0.28, name, va="bottom")
            ax.text(largest, place - 0.28, describe(value), va="bottom", ha="right")
        ax.set_xlim(0, largest)
        ax.set_ylim(len(bars) - 0.7, -0.85)
        ax.set_axis_off()
        ax.set_title(label)
    return figure


def plot_lines(
    panels: dict[str, dict[str, Sequence[tuple[float, float]]]], label: str, logarithmic: str
) -> Figure:
    """A panel by title, in it a line of points by name, over an axis of powers of two.

    label: of that axis.   logarithmic: the panel whose other axis is; those of the rest begin at 0.
    """
    with _panels(len(panels), 2.2) as (figure, axes):
        for ax, (title, lines) in zip(axes, panels.items(), strict=True):
            for place, (name, points) in enumerate(lines.items()):
                stroke = {"color": _COLOURS[place % 4], "linestyle": _LINES[place // 4 % 4]}
                marks = {"marker": "os^D"[place % 4], "markersize": 4, "linewidth": 1.2}
                ax.plot(*zip(*points, strict=True), label=name, **stroke, **marks)
            ax.set_title(title)
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:g}"))
            if title == logarithmic:
                ax.set_yscale("log")
                ax.yaxis.set_minor_formatter(NullFormatter())
            else:
                ax.set_ylim(bottom=0)
            ax.yaxis.set_major_formatter(FuncFormatter(_short))
        axes[-1].set_xlabel(label)
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower right", ncols=min(3, len(names)))
    return figure


def plot_histogram(
    edges: Sequence[float], counts: Sequence[int], marks: dict[str, float], label: str
) -> Figure:
    """Counts between edges on a logarithmic axis.

    edges: ascending, of which the first may be 0; its bin is drawn as wide as the next.
    marks: values to be marked, by name.
    """
    if not edges[0]:
        edges = [edges[1] * (edges[1] / edges[2]), *edges[1:]]
    edges = np.maximum(_drawn(edges), _LEAST)
    with _panels(1, 2.5) as (figure, (ax,)):
        ax.stairs(counts, edges, fill=True, color=_FAINT)
        ax.stairs(counts, edges, color=_COLOURS[0], linewidth=1.5)
        styles = ("-", "--", "-.", ":")
        for style, (name, value) in zip(styles, marks.items(), strict=False):
            ax.axvline(value, color=_INK, linestyle=style, linewidth=1.2, label=name)
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(numticks=6))
        ax.xaxis.set_major_formatter(FuncFormatter(_short))
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.set_xlim(edges[0], edges[-1])
        ax.set_xlabel(label)
        ax.set_ylabel("positions")
        ax.yaxis.set_major_formatter(FuncFormatter(_short))
        if marks:
            figure.legend(loc="outside lower right", ncols=len(marks), handlelength=1.5)
    return figure


def _drawn(values: Iterable[float]) -> np.ndarray:
    return np.minimum(np.fromiter(values, dtype=np.float64), _LARGEST)


def _scale_from_zero(ax: Axes, largest: float) -> None:
    """Logarithmic above 1, with ticks at 0 and every second power of ten."""
    ax.set_yscale("symlog", linthresh=1)
    powers = range(0, max(2, math.ceil(math.log10(largest + 1)) + 1), 2)
    ax.set_yticks([0, *(10**power for power in powers)])
    ax.yaxis.set_major_formatter(FuncFormatter(_short))
    ax.set_ylim(0, 2 * largest + 1)


def _stroke(layers: Sequence[int]) -> float:
    """Points of width that layers side by side leave each of them."""
    return min(8.0, 0.6 * 72 * _WIDTH / len(layers))


def _name_layers(ax: Axes, layers: Sequence[int]) -> None:
    """Layers stand side by side, whatever their numbers."""

    def name(place: float, _position: int) -> str:
        index = round(place)
        return str(layers[index]) if index == place and 0 <= index < len(layers) else ""

    ax.set_xlim(-0.7, len(layers) - 0.3)
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    ax.xaxis.set_major_formatter(FuncFormatter(name))


def _share_axes(figure: Figure, axes: Sequence[Axes], label: str) -> None:
    """One name for all panels' values, and one for their layers."""
    figure.supylabel(label, fontsize=_STYLE["font.size"])
    axes[-1].set_xlabel("layer")
    for ax in axes[:-1]:
        ax.tick_params(labelbottom=False)


def _short(value: float, _position: int = 0) -> str:
    """A tick's number: 1,000 as 1 k."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def png(figure: Figure, title: str) -> bytes:
    """The plot on white under its title, which the figure then has; 150 dots an inch."""
    file = io.BytesIO()
    with style.context(["default", _STYLE]):
        figure.set_figheight(figure.get_figheight() + 0.3)
        figure.suptitle(title, x=0.02, ha="left", fontsize=12, fontweight="bold")
        figure.savefig(file, format="png", dpi=150, metadata={"Software": None})
    return file.getvalue()


def svg(figure: Figure, name: str) -> str:
    """The plot as an element of a page whose style sheet knows the colours.

    name: of the plot, in the page only once. Texts are text; its size is left to the page.
    """
    file = io.BytesIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with style.context(["default", _STYLE | {"svg.hashsalt": name}]):
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    root = ElementTree.fromstring(file.getvalue())
    text = file.getvalue().decode()
    for element in root.iter():
        if (key := element.get("id")) and f"#{key}" not in text:
            del element.attrib["id"]  # figure_1 and the like, which every plot has
    for key in ("width", "height", "version"):
        del root.attrib[key]
    root.attrib |= {"role": "img", "aria-labelledby": f"title-{name}"}
    text = ElementTree.tostring(root, encoding="unicode")
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text
