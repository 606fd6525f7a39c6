"""Which rate modes an expert gets, judged by held-out documents."""

from dataclasses import dataclass

import numpy as np
import torch

MIN_FIT_DOCUMENTS = 6
MIN_CONFIRMATION_DOCUMENTS = 4
_BOOTSTRAPS = 2000
_CHUNK = 512
_SEED = 20260801


@dataclass(frozen=True)
class ModeChoice:
    """proposed: the pair of modes with the least confirmation error.   selected: it, or (0, 0)
    where it is not surely better.   improvement: 1 - error / error of (0, 0), with its 95%
    interval; None where nothing was tried.
    """

    proposed: tuple[int, int]
    selected: tuple[int, int]
    improvement: float | None
    interval: tuple[float, float] | None


def errors_by_document(
    candidate: torch.Tensor,
    reference: torch.Tensor,
    gates: torch.Tensor,
    documents: torch.Tensor,
    count: int,
) -> torch.Tensor:
    """Sum over each document's rows of gate^2 |candidate - reference|^2: [count] float64.

    candidate, reference: [rows, H], an expert's outputs.   gates: [rows].
    documents: [rows], the document of each row, below count.
    """
    square = (candidate - reference).double().square().sum(1) * gates.double().square()
    sums = torch.zeros(count, dtype=torch.float64)  # on a GPU the order would be left to chance
    return sums.index_add_(0, documents.long().cpu(), square.cpu())


def choose_modes(
    modes: list[tuple[int, int]],
    confirmation: torch.Tensor,
    confirmation_rows: torch.Tensor,
    fit_rows: torch.Tensor,
    *,
    layer: int,
    expert: int,
) -> ModeChoice:
    """Propose the modes of least confirmation error; accept them if surely better than (0, 0).

    modes: the candidates, (0, 0) first.   confirmation: [modes, documents], errors_by_document.
    confirmation_rows, fit_rows: rows of this expert in each document of either part; fit rows
    never rank modes. Accepted if the 2.5% quantile of the improvement over 2,000 resamplings of
    the documents is above 0.
    """
    seen = confirmation_rows > 0
    errors = confirmation[:, seen].double().cpu().numpy()
    enough = int((fit_rows > 0).sum()) >= MIN_FIT_DOCUMENTS
    if not enough or errors.shape[1] < MIN_CONFIRMATION_DOCUMENTS:
        return ModeChoice((0, 0), (0, 0), None, None)
    totals = errors.sum(1)
    best = min(range(len(modes)), key=lambda i: (totals[i], sum(modes[i]), modes[i]))
    if modes[best] == (0, 0):
        return ModeChoice((0, 0), (0, 0), None, None)
    generator = np.random.default_rng(_SEED + 1000003 * layer + 97 * expert)
    improvements = []
    for start in range(0, _BOOTSTRAPS, _CHUNK):
        shape = (min(_CHUNK, _BOOTSTRAPS - start), errors.shape[1])
        chosen = generator.integers(0, errors.shape[1], size=shape)
        improvements.append(1 - errors[best][chosen].sum(1) / errors[0][chosen].sum(1))
    low, high = np.quantile(np.concatenate(improvements), [0.025, 0.975])
    return ModeChoice(
        proposed=modes[best],
        selected=modes[best] if low > 0 else (0, 0),
        improvement=float(1 - totals[best] / totals[0]),
        interval=(float(low), float(high)),
    )
