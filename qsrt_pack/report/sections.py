"""What a report shows, section by section: a plot, the numbers in it, and what they mean."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure

from qsrt_pack.calibrate.hessian import PRIOR
from qsrt_pack.evaluation import shown_name
from qsrt_pack.inspect import BYTE_KINDS
from qsrt_pack.report import figures
from qsrt_pack.report.content import Content, Expert
from qsrt_pack.report.figures import Spread, spread
from qsrt_runtime.format.rates import pair_kinds

_WORST = 10
_LISTED = 20  # thin experts, and zero matrices
_MATRICES = {"w1": "w1, gate", "w3": "w3, up", "w2": "w2, down"}
_SIDES = ("gate and up (w1, w3)", "down (w2)")
_NO_EVIDENCE = "Not known: the package was made elsewhere, its evidence does not say."
_NOT_CALIBRATED = "Not calibrated: the experts were coded without a text."
_STROKES = (
    "A stroke is a layer: thin from its least expert to its largest, thick over the middle 80 %, "
    "the bar across it its median."
)


@dataclass(frozen=True)
class Table:
    """Texts, by rows; those of the first `names` columns are names, the others numbers."""

    columns: list[str]
    rows: list[list[str]]
    names: int = 1
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """name: of its plot's file.   folded: tables that are opened on demand, others are shown."""

    name: str
    title: str
    text: str
    figure: Figure | None = None
    tables: list[Table] = field(default_factory=list)
    folded: list[Table] = field(default_factory=list)


def build_sections(content: Content) -> list[Section]:
    """All sections, in the page's order; those of which nothing is known say so."""
    return [
        _evaluation(content),
        _errors(content),
        _modes(content),
        _tokens(content),
        _thin(content),
        _bytes(content),
        _worst(content),
    ]


def _evaluation(content: Content) -> Section:
    name, title = "kl", "KL against the original"
    report = content.evaluation
    if report is None:
        text = "Not evaluated."
        if content.summary["is_ours"]:
            text += " What qsrt-pack eval --json prints can be given with --eval."
        return Section(name, title, text)
    text = f"On {report['positions']:,} positions in windows of {report['window']:,}, in float32."
    if not report["reference_is_source"]:
        text += " The reference is not the checkpoint that was packed."
    tables = [Table(["", "original", "package"], _evaluation_rows(report))]
    edges, counts = report["kl_histogram"]["edges"], report["kl_histogram"]["counts"]
    # The outermost counts hold what lies beyond too.
    lows = ["0", *(f"{edge:.3g}" for edge in edges[1:-1])]
    highs = [*(f"{edge:.3g}" for edge in edges[1:-1]), "and above"]
    columns = zip(lows, highs, counts, strict=True)
    rows = [[low, high, f"{count:,}"] for low, high, count in columns]
    keys = {"median": "kl_median", "mean": "kl_mean", "90 %": "kl_p90", "99 %": "kl_p99"}
    marks = {mark: report[key] for mark, key in keys.items() if edges[0] < report[key] < edges[-1]}
    figure = figures.plot_histogram(edges, counts, marks, "KL of a position, nats")
    folded = [Table(["from, nats", "to", "positions"], rows, names=2)]
    return Section(name, title, text, figure, tables, folded)


def _evaluation_rows(report: dict[str, Any]) -> list[list[str]]:
    reference, packed = report["reference_score"], report["package_score"]
    rows = [
        ["name", shown_name(report["reference"]), shown_name(report["package"])],
        ["perplexity", _decimal(reference["perplexity"], 4), _decimal(packed["perplexity"], 4)],
        ["KL, mean, nats", "", _decimal(report["kl_mean"])],
    ]
    if interval := report["kl_mean_interval"]:
        low, high = interval["low"], interval["high"]
        rows.append(
            ["its 95 % interval over documents", "", f"{_decimal(low)} to {_decimal(high)}"]
        )
    if floor := report["noise_floor"]:
        rows.append(["KL, mean, of bfloat16 against float32", _decimal(floor["kl_mean"]), ""])
    return [
        *rows,
        ["KL, median", "", _decimal(report["kl_median"])],
        ["KL, 90 % are below", "", _decimal(report["kl_p90"])],
        ["KL, 99 % are below", "", _decimal(report["kl_p99"])],
        ["KL, largest", "", _decimal(report["kl_max"])],
        ["same most likely token", "", f"{100 * report['top1_agreement']:.2f} %"],
        ["of the ten most likely", "", f"{100 * report['top10_agreement']:.2f} %"],
        ["text", shown_name(report["text"]), ""],
    ]


def _errors(content: Content) -> Section:
    name, title = "errors", "Error by layer and matrix"
    if not content.summary["is_ours"]:
        return Section(name, title, _NO_EVIDENCE)
    panels = {
        label: _spreads(content, lambda e, m=matrix: e["nmse"][m])
        for matrix, label in _MATRICES.items()
    }
    outputs = _spreads(content, lambda e: e["functional_nmse"])
    text = f"Squared error of each matrix against its weights' squares (NMSE). {_STROKES}"
    if outputs:
        panels["outputs on the text"] = outputs
        text += (
            " Calibration trades weights for outputs: it is the outputs' error that it makes small."
        )
    elif content.is_calibrated:
        text += (
            " The error of outputs is not known: no document of the text was left for measuring it."
        )
    tables = []
    if zeros := [e for each in content.experts.values() for e in each if e.zero_matrices]:
        text += " Matrices of zeros alone are kept exactly, and count as without error."
        tables = [_zero_table(zeros)]
    figure = figures.plot_spreads(list(content.experts), panels, "squared error, relative")
    folded = [_spread_table(content, panels, _decimal)]
    return Section(name, title, text, figure, tables, folded)


def _zero_table(experts: list[Expert]) -> Table:
    rows = [[str(e.layer), str(e.expert), ", ".join(e.zero_matrices)] for e in experts[:_LISTED]]
    caption = f"Experts with matrices of zeros: the first {len(rows):,} of {len(experts):,}"
    return Table(["layer", "expert", "matrices"], rows, names=3, caption=caption)


def _tokens(content: Content) -> Section:
    name, title = "tokens", "Calibration tokens of the experts"
    if not content.summary["is_ours"]:
        return Section(name, title, _NO_EVIDENCE)
    if not content.is_calibrated:
        return Section(name, title, _NOT_CALIBRATED)
    panels = {"tokens": _spreads(content, lambda e: e["tokens"])}
    figure = figures.plot_spreads(list(content.experts), panels, "tokens", logarithmic=True)
    text = f"How many tokens of the text the router sent to an expert. {_STROKES}"
    table = _spread_table(content, panels, lambda value: f"{value:,.0f}")
    return Section(name, title, text, figure, folded=[table])


def _spreads(
    content: Content, value: Callable[[dict[str, Any]], float | None]
) -> dict[int, Spread]:
    """By layer that of what the evidence of its experts states, where it does."""
    found = {
        layer: [v for e in experts if (v := value(e.evidence)) is not None]
        for layer, experts in content.experts.items()
    }
    return {layer: spread(values) for layer, values in found.items() if values}


def _spread_table(
    content: Content, panels: dict[str, dict[int, Spread]], write: Callable[[float], str]
) -> Table:
    columns = ["layer", "of", "least", "10 %", "median", "90 %", "largest"]
    rows = []
    for layer in content.experts:
        for label, spreads in panels.items():
            if (s := spreads.get(layer)) is not None:
                values = (s.low, s.tenth, s.median, s.ninetieth, s.high)
                rows.append([str(layer), label, *map(write, values)])
    return Table(columns, rows, names=2)


def _modes(content: Content) -> Section:
    layers, records = list(content.experts), content.records
    pairs = {
        side: [
            Counter(kind for e in experts for kind in pair_kinds(e.modes[number], records))
            for experts in content.experts.values()
        ]
        for number, side in enumerate(_SIDES)
    }
    panels = {
        side: {
            kind: [100 * found[kind] / found.total() for found in counts] for kind in ("P24", "P33")
        }
        for side, counts in pairs.items()
    }
    rows = []
    for place, (layer, experts) in enumerate(content.experts.items()):
        for number, side in enumerate(_SIDES):
            modes = Counter(e.modes[number] for e in experts)
            kinds = [pairs[side][place][kind] for kind in ("P24", "P33")]
            counts = [*kinds, *(modes[mode] for mode in (0, 1, 2))]
            rows.append([str(layer), side, *(f"{count:,}" for count in counts)])
    text = (
        "A pair is 256 channels: P33 codes all at 3 bits, P24 the less important half at 2 and the "
        "other at 4. An expert of mode R0 has only P33, of R1 one P24, of R2 two."
    )
    columns = ["layer", "matrices", "P24", "P33", "R0", "R1", "R2"]
    return Section(
        name="modes",
        title="Rate modes chosen",
        text=text,
        figure=figures.plot_stacks(layers, panels, "pairs, %", top=100),
        folded=[Table(columns, rows, names=2, caption="Pairs by kind, experts by mode")],
    )


def _thin(content: Content) -> Section:
    name, title = "thin", "Thin experts and fallbacks"
    if not content.summary["is_ours"]:
        return Section(name, title, _NO_EVIDENCE)
    if not content.is_calibrated:
        return Section(name, title, _NOT_CALIBRATED)
    enough = PRIOR * content.summary["true_hidden_size"]
    counts = {"fallback": [], "thin": []}
    listed: list[Expert] = []
    for experts in content.experts.values():
        fallbacks = [e for e in experts if e.fallback is not None]
        thin = [
            e for e in experts if e.fallback is None and e.tokens is not None and e.tokens < enough
        ]
        counts["thin"].append(len(thin))
        counts["fallback"].append(len(fallbacks))
        listed += thin + fallbacks
    text = (
        f"Thin: fewer than {enough:,} tokens of the text, {PRIOR} a hidden channel, came to it; "
        "the fewer, the more its layer's Hessian stands for its own. Fallback: something else "
        "stood in."
    )
    if not listed:
        return Section(name, title, f"{text} There are none.")
    listed.sort(key=lambda e: (e.tokens or 0, e.layer, e.expert))
    rows = [
        [str(e.layer), str(e.expert), e.fallback or "", f"{e.tokens or 0:,}"]
        for e in listed[:_LISTED]
    ]
    caption = f"The {len(rows):,} with the fewest tokens, of {len(listed):,}"
    shown = Table(["layer", "expert", "fallback", "tokens"], rows, names=3, caption=caption)
    numbers = zip(content.experts, counts["fallback"], counts["thin"], strict=True)
    by_layer = Table(["layer", "fallback", "thin"], [[f"{n:,}" for n in row] for row in numbers])
    figure = figures.plot_stacks(list(content.experts), {"": counts}, "experts", top=None)
    return Section(name, title, text, figure, [shown], [by_layer])


def _bytes(content: Content) -> Section:
    sizes = content.summary["bytes"]
    found = {label: sizes[kind] for kind, label in BYTE_KINDS.items() if sizes[kind]}
    total = sizes["total"]
    rows = [[label, f"{n:,}", f"{100 * n / total:.2f} %"] for label, n in found.items()]
    rows.append(["all", f"{total:,}", ""])
    return Section(
        name="bytes",
        title="Bytes by kind",
        text=f"{total:,} bytes in {content.summary['files']:,} files.",
        figure=figures.plot_bars(found, "share of all bytes", lambda n: f"{100 * n / total:.1f} %"),
        folded=[Table(["kind", "bytes", "share"], rows)],
    )


def _worst(content: Content) -> Section:
    """By what was made small: the error of outputs where the evidence has it, else of weights."""
    name, title = "worst", "Worst ten experts"
    if not content.summary["is_ours"]:
        return Section(name, title, _NO_EVIDENCE)
    experts = [e for each in content.experts.values() for e in each]
    ranked = _largest(experts, _weight_error)
    tables = [_expert_table("By the largest NMSE of their matrices", ranked)]
    error, what = _weight_error, "weights"
    text = "Largest first; the bars are the largest NMSE of a matrix."
    if by_outputs := _largest(experts, lambda e: e["functional_nmse"]):
        ranked, error, what = by_outputs, lambda e: e["functional_nmse"], "outputs"
        tables.insert(0, _expert_table("By the error of their outputs on the text", ranked))
        text = "Largest first; the bars are the squared error of outputs against their squares."
    bars = {f"layer {e.layer}, expert {e.expert}": error(e.evidence) for e in ranked}
    figure = figures.plot_bars(bars, f"squared error of {what}, relative", _decimal)
    return Section(name, f"{title}, by error of {what}", text, figure, tables)


def _weight_error(evidence: dict[str, Any]) -> float:
    return max(evidence["nmse"].values())


def _largest(
    experts: list[Expert], value: Callable[[dict[str, Any]], float | None]
) -> list[Expert]:
    known = [e for e in experts if value(e.evidence) is not None]
    return sorted(known, key=lambda e: (-value(e.evidence), e.layer, e.expert))[:_WORST]


def _expert_table(caption: str, experts: list[Expert]) -> Table:
    columns = ["layer", "expert", "w1", "w3", "w2", "outputs", "tokens", "modes"]
    rows = []
    for e in experts:
        outputs, tokens = e.evidence["functional_nmse"], e.tokens
        rows.append(
            [
                str(e.layer),
                str(e.expert),
                *(_decimal(e.evidence["nmse"][matrix]) for matrix in _MATRICES),
                "" if outputs is None else _decimal(outputs),
                "" if tokens is None else f"{tokens:,}",
                "/".join(f"R{mode}" for mode in e.modes),
            ]
        )
    return Table(columns, rows, names=2, caption=caption)


def _decimal(value: float, places: int = 5) -> str:
    return f"{value:.{places}f}" if value < 1000 else f"{value:.{places}g}"
