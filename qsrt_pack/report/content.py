"""What a report is about: a package's summary, every expert's evidence, and its evaluation."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from qsrt_pack.evaluation import check_evaluation, read_evaluation, shown_name
from qsrt_pack.inspect import inspect
from qsrt_pack.progress import bar
from qsrt_runtime.format import slab
from qsrt_runtime.format.container import Layer
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.manifest import REPORT
from qsrt_runtime.format.package import Package, open_package, read_checked_layer, verify_file


@dataclass(frozen=True)
class Expert:
    """One expert of a package.

    modes: of w1 and w3, and of w2.   evidence: its entry, None in packages made elsewhere.
    """

    layer: int
    expert: int
    modes: tuple[int, int]
    evidence: dict[str, Any] | None

    @property
    def tokens(self) -> int | None:
        return self.evidence and self.evidence["tokens"]

    @property
    def fallback(self) -> str | None:
        return self.evidence and self.evidence["fallback"]

    @property
    def zero_matrices(self) -> list[str]:
        return self.evidence["zero_matrices"] if self.evidence else []


@dataclass(frozen=True)
class Content:
    """summary: of `inspect`.   records: of 128 channels in an expert.   experts: of each layer.

    evaluation: of `eval`, None where there was none.
    """

    name: str
    summary: dict[str, Any]
    records: int
    experts: dict[int, list[Expert]]
    evaluation: dict[str, Any] | None

    @property
    def is_calibrated(self) -> bool:
        return any(e.tokens is not None for experts in self.experts.values() for e in experts)


def read_content(path: Path, evaluation: Path | None, *, show_progress: bool) -> Content:
    """Read a package's documents and the headers of its layer files.

    evaluation: a file of `eval --json`; without it the report that the package holds, if any.
    Raises FormatError naming what is wrong.
    """
    package = open_package(path)
    evaluated = _read_evaluation(package, evaluation)
    summary = inspect(path, show_progress=show_progress)
    experts = {}
    with bar("experts", len(package.layers), "layers", show_progress) as advance:
        for number in package.layers:
            layer, evidence = read_checked_layer(package, number, range(0))
            entries = evidence["experts"] if package.documents.is_ours else None
            experts[number] = _experts(layer, entries)
            advance(1)
    name = shown_name(str(package.path))
    return Content(name, summary, package.geometry.records, experts, evaluated)


def _experts(layer: Layer, entries: list[dict[str, Any]] | None) -> list[Expert]:
    """entries: the evidence of each, None where it is not known."""
    count = layer.geometry.experts
    return [
        Expert(layer.layer, expert, slab.expert_modes(layer, expert), entry)
        for expert, entry in enumerate(entries or [None] * count)
    ]


def _read_evaluation(package: Package, path: Path | None) -> dict[str, Any] | None:
    if path is None and REPORT not in package.digests:
        return None
    if path is None:
        verify_file(package, REPORT)
    where = path or package.path / REPORT
    value = read_evaluation(where)
    check_evaluation(value, package, where)
    check_histogram(value["kl_histogram"], where)
    return value


def check_histogram(histogram: dict[str, Any], where: Path) -> None:
    """Refuse edges and counts that do not fit each other, which no schema can say."""
    edges, counts = histogram["edges"], histogram["counts"]
    ascends = all(low < high for low, high in pairwise(edges))
    if len(counts) < 2 or len(edges) != len(counts) + 1 or edges[0] < 0 or not ascends:
        raise FormatError(
            f"{where}: kl_histogram has {len(counts)} counts and {len(edges)} edges, expected two "
            "counts or more, and edges that ascend from 0 or above, one more than counts"
        )
