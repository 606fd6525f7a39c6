"""What a run tells of how well experts were coded."""

import logging
from typing import Any

from qsrt_pack.assemble.layer import worst_experts

_log = logging.getLogger(__name__)
_WORST_SHOWN = 5
_POOR_NMSE = 0.1  # six times what a matrix has at 3 bits: its scales are below float16's


def report_expert(layer: int, entry: dict[str, Any]) -> None:
    """Log an expert's errors, and a warning of what was not coded well. entry: its evidence."""
    where = f"layer {layer} expert {entry['expert']}"
    errors = entry["nmse"]
    zero = [name for name in entry["zero_matrices"] if not errors[name]]
    lost = [name for name in entry["zero_matrices"] if errors[name]]
    kept = errors.keys() - entry["zero_matrices"]
    if entry["tokens"] is not None:  # calibrated, errors of weights mean little
        kept = set()
    poor = [name for name in errors if name in kept and errors[name] > _POOR_NMSE]
    for names, what in (
        (zero, "all zero"),
        (lost, "too small for float16 scales, decodes to zeros"),
        (poor, "coded poorly"),
    ):
        if names:
            _log.warning("%s: %s %s", where, ", ".join(names), what)
    _log.debug("%s: NMSE %s", where, _mean_nmse([entry]))


def report_layer(layer: int, entries: list[dict[str, Any]], seconds: float) -> None:
    """Log a layer's errors. entries: of its experts' evidence."""
    worst = max(entries, key=lambda entry: max(entry["nmse"].values()))
    _log.info(
        "layer %d: NMSE %s, worst expert %d %.5f, %.1f s",
        layer,
        _mean_nmse(entries),
        worst["expert"],
        max(worst["nmse"].values()),
        seconds,
    )


def _mean_nmse(entries: list[dict[str, Any]]) -> str:
    means = {m: sum(e["nmse"][m] for e in entries) / len(entries) for m in ("w1", "w3", "w2")}
    return " ".join(f"{matrix} {mean:.5f}" for matrix, mean in means.items())


def describe_worst(evidence: dict[int, dict[str, Any]]) -> str:
    """A table of the experts with the largest weight error of any matrix.

    evidence: the evidence document of each layer.
    """
    lines = [f"{'layer':>5} {'expert':>6}  modes   {'NMSE w1':>9} {'w3':>9} {'w2':>9}"]
    for layer, entry in worst_experts(evidence, _WORST_SHOWN):
        errors = " ".join(f"{entry['nmse'][matrix]:9.5f}" for matrix in ("w1", "w3", "w2"))
        modes = f"{entry['mode13']} {entry['mode2']}"
        lines.append(f"{layer:5} {entry['expert']:6}  {modes}   {errors}")
    return "\n".join(["worst experts", *lines])
