"""What calibration keeps of a layer: routed rows, routes, gradients, documents and moments."""

import hashlib
from dataclasses import dataclass

import torch

PARTS = ("fit", "confirmation", "validation")
_SIXTEENTHS = (12, 3, 1)  # of the documents, in the order of PARTS
_CHUNK = 1 << 14  # rows whose products are summed at once


@dataclass(frozen=True)
class LayerRows:
    """Rows that reached the experts of a layer.

    rows: [n, H] bfloat16, the experts' inputs.   ids: [n, k] int32, the experts that keep the row,
    -1 for those that have enough without it.   gates: [n, k] float32, route weights.
    documents: [n] int32.   places: [n] int64, of the rows in the text.
    gradients: [n, H] bfloat16, of the model's loss at the sum of the experts' outputs; no rows,
    [0, H], without a backward pass.
    moments: [3, H, H] float32, for each part the sum of w x x^T over all of its rows, w the sum
    of gate squared over a row's routes.   weights: [3, 2] float64, sums of w and of w squared.
    tokens: [E] int64, rows routed to each expert, kept or not.   dropped: [1] int64, rows that
    were not finite, which are in none of the others.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    gates: torch.Tensor
    documents: torch.Tensor
    places: torch.Tensor
    gradients: torch.Tensor
    moments: torch.Tensor
    weights: torch.Tensor
    tokens: torch.Tensor
    dropped: torch.Tensor


@dataclass(frozen=True)
class ExpertRows:
    """The rows that an expert keeps: rows and gradients [n, H] float32, gates, documents [n]."""

    rows: torch.Tensor
    gates: torch.Tensor
    documents: torch.Tensor
    gradients: torch.Tensor


def part_of(document: int) -> str:
    """The part of a document, drawn by its number: fit 12, confirmation 3, validation 1 of 16."""
    digest = hashlib.blake2b(f"qsrt document {document}".encode(), digest_size=8).digest()
    drawn = int.from_bytes(digest, "little") % sum(_SIXTEENTHS)
    for part, count in zip(PARTS, _SIXTEENTHS, strict=True):
        if drawn < count:
            return part
        drawn -= count
    raise AssertionError


def parts_of(documents: torch.Tensor) -> torch.Tensor:
    """The place in PARTS of each row's document: [n] int64."""
    numbers, places = documents.unique(return_inverse=True)
    parts = [PARTS.index(part_of(number)) for number in numbers.tolist()]
    return torch.tensor(parts, dtype=torch.int64, device=documents.device)[places]


def gather(
    rows: torch.Tensor,
    ids: torch.Tensor,
    gates: torch.Tensor,
    documents: torch.Tensor,
    experts: int,
    *,
    limit: int,
    seed: int,
    device: torch.device,
) -> LayerRows:
    """Keep at most `limit` rows of each expert, drawn by their places in the text alone.

    rows: [T, H], ids: [T, k] integers, gates: [T, k] float32, documents: [T], on the CPU.
    Returns them without gradients.
    """
    finite = _finite_rows(rows, gates)
    ids = torch.where(finite[:, None], ids.long(), -1)
    tokens = torch.bincount(ids[ids >= 0], minlength=experts)
    moments, weights = _moments(rows, ids, gates, documents, device)
    kept = _reservoir(ids, experts, limit, seed)
    places = (kept >= 0).any(1).nonzero()[:, 0]
    return LayerRows(
        rows=rows[places].to(torch.bfloat16),
        ids=kept[places].int(),
        gates=gates[places],
        documents=documents[places].int(),
        places=places,
        gradients=torch.empty(0, rows.shape[1], dtype=torch.bfloat16),
        moments=moments.cpu(),
        weights=weights,
        tokens=tokens,
        dropped=(~finite).sum()[None],
    )


def most_rows(layer: LayerRows) -> int:
    """The most rows that an expert of a layer keeps."""
    kept = layer.ids[layer.ids >= 0]
    return int(torch.bincount(kept).max()) if len(kept) else 0


def rows_of(layer: LayerRows, expert: int, device: torch.device) -> ExpertRows:
    """The rows that one expert keeps, on a device."""
    place, choice = (layer.ids == expert).nonzero(as_tuple=True)
    gradients = layer.gradients[place] if len(layer.gradients) else layer.gradients
    return ExpertRows(
        rows=layer.rows[place].to(device).float(),
        gates=layer.gates[place, choice].to(device),
        documents=layer.documents[place].to(device),
        gradients=gradients.to(device).float(),
    )


def _finite_rows(rows: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Which rows are finite, and stay so in bfloat16: [T] bool."""
    finite = [part.to(torch.bfloat16).isfinite().all(1) for part in rows.split(_CHUNK)]
    return torch.cat(finite) & gates.isfinite().all(1)


def _moments(
    rows: torch.Tensor,
    ids: torch.Tensor,
    gates: torch.Tensor,
    documents: torch.Tensor,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's moments and weights by part."""
    hidden = rows.shape[1]
    moments = torch.zeros(len(PARTS), hidden, hidden, device=device)
    power = torch.where(ids >= 0, gates.double().square(), 0.0).sum(1)
    part = parts_of(documents)
    weights = torch.zeros(len(PARTS), 2, dtype=torch.float64)
    for place in range(len(PARTS)):
        chosen = ((part == place) & (power > 0)).nonzero()[:, 0]
        weights[place] = torch.stack([power[chosen].sum(), power[chosen].square().sum()])
        for some in chosen.split(_CHUNK):
            x = rows[some].to(device).float()
            moments[place] += (x.T * power[some].to(device).float()) @ x
    return moments, weights


def _reservoir(ids: torch.Tensor, experts: int, limit: int, seed: int) -> torch.Tensor:
    """ids with -1 where the expert has `limit` rows of an earlier draw: [T, k]."""
    drawn = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    kept = torch.full_like(ids, -1)
    in_order = ids[drawn]
    for expert in range(experts):
        place, choice = (in_order == expert).nonzero(as_tuple=True)
        place, choice = drawn[place[:limit]], choice[:limit]
        kept[place, choice] = expert
    return kept
