"""What calibration says of one expert: from its layer's rows to the encoder's guide."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from qsrt_pack.calibrate.hessian import (
    Activation,
    activation_scores,
    down_moment,
    effective_rows,
    gate_up_moment,
    output_moment,
)
from qsrt_pack.calibrate.modes import choose_modes, errors_by_document
from qsrt_pack.calibrate.statistics import PARTS, ExpertRows, LayerRows, parts_of, rows_of
from qsrt_pack.encode.expert import Dense, Guide, Modes
from qsrt_pack.encode.ordered import one_thread
from qsrt_pack.encode.permutation import weight_scores
from qsrt_runtime.format.geometry import Geometry

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": lambda gate, up: torch.nn.functional.silu(gate) * up
}
_JUDGED = 4096  # rows on which an expert's outputs are compared
NO_ROWS = "no rows: gate and up by the layer's, down by none"
NO_LAYER_ROWS = "no rows in the layer"


@dataclass(frozen=True)
class Guided:
    """An expert's guide, None where its layer has no rows, and what its evidence says of it.

    judge: from decoded w1, w3 and w2, channels in any order, to the error of the outputs on the
    validation documents as a share of their energy, weighted by gate squared; None without rows.
    """

    guide: Guide | None
    tokens: int | None
    fallback: str | None
    judge: Callable[[Dense], float | None]


UNGUIDED = Guided(None, None, None, lambda _decoded: None)


@one_thread()
def make_guide(
    layer: LayerRows,
    prior: torch.Tensor | None,
    number: tuple[int, int],
    weights: Mapping[str, torch.Tensor],
    activation: Activation,
    *,
    held_out: bool,
) -> Guided:
    """Statistics of an expert.

    prior: hessian.layer_moment.   number: of layer and expert.   weights: w1, w3, w2, float32.
    held_out: whether rate modes are to be chosen, by documents that nothing else looks at.
    """
    tokens = int(layer.tokens[number[1]])
    if prior is None:
        return replace(UNGUIDED, tokens=tokens, fallback=NO_LAYER_ROWS)
    source = tuple(weights[name] for name in ("w1", "w3", "w2"))
    w1, w3, w2 = source
    everything = rows_of(layer, number[1], w1.device)
    rows = _part(everything, "fit") if held_out else everything
    choose = partial(_choose, number, everything, source, activation)
    if not effective_rows(rows.gates):
        eye = torch.eye(len(w1), device=w1.device)
        scores = weight_scores(*source)
        guide = Guide(scores, prior, lambda _w1, _w3: (eye, w2), choose)
        return replace(UNGUIDED, guide=guide, tokens=tokens, fallback=NO_ROWS)
    guide = Guide(
        scores=activation_scores(rows, (w1, w3), activation),
        inputs=gate_up_moment(rows, prior),
        down=one_thread()(lambda gate, up: down_moment(rows, (w1, w3), (gate, up), w2, activation)),
        choose=choose,
        outputs=output_moment(rows, (w1, w3), activation),
    )
    return Guided(guide, tokens, None, partial(_functional_nmse, everything, source, activation))


def row_bytes(geometry: Geometry, rows: int) -> int:
    """What calibration takes of an expert: rows and gradients, and moments of its three sides."""
    hidden, intermediate = geometry.hidden, geometry.intermediate
    return 4 * (2 * rows * hidden + 2 * hidden**2 + 6 * intermediate**2)


def _part(rows: ExpertRows, part: str) -> ExpertRows:
    """The rows whose documents belong to a part."""
    chosen = parts_of(rows.documents) == PARTS.index(part)
    gradients = rows.gradients[chosen] if len(rows.gradients) else rows.gradients
    return ExpertRows(rows.rows[chosen], rows.gates[chosen], rows.documents[chosen], gradients)


@one_thread()
def _choose(
    number: tuple[int, int],
    rows: ExpertRows,
    source: Dense,
    activation: Activation,
    decoded: Mapping[Modes, Dense],
) -> Modes:
    """The rate modes of least error on the confirmation documents, if surely better than R0."""
    confirmation, fit = _part(rows, "confirmation"), _part(rows, "fit")
    count = int(rows.documents.max()) + 1 if len(rows.documents) else 0
    expected = _output(confirmation.rows, source, activation)
    errors = [
        errors_by_document(
            _output(confirmation.rows, dense, activation),
            expected,
            confirmation.gates,
            confirmation.documents,
            count,
        )
        for dense in decoded.values()
    ]
    numbers = [part.documents.long().cpu() for part in (confirmation, fit)]  # as the errors are
    seen = [torch.bincount(found, minlength=count) for found in numbers]
    choice = choose_modes(
        list(decoded), torch.stack(errors), *seen, layer=number[0], expert=number[1]
    )
    return choice.selected


@one_thread()
def _functional_nmse(
    rows: ExpertRows, source: Dense, activation: Activation, decoded: Dense
) -> float | None:
    """The error of an expert's outputs on validation documents, as a share of their energy."""
    rows = _part(rows, "validation")
    some, weights = rows.rows[:_JUDGED], rows.gates[:_JUDGED].double().square()
    wanted = _output(some, source, activation)
    left = _output(some, decoded, activation) - wanted
    error, energy = (float(weights @ x.double().square().sum(1)) for x in (left, wanted))
    return error / energy if energy else None


def _output(rows: torch.Tensor, matrices: Dense, activation: Activation) -> torch.Tensor:
    """An expert's outputs [n, H] for rows [n, H]."""
    gate, up, down = matrices
    return activation(rows @ gate.T, rows @ up.T) @ down.T
