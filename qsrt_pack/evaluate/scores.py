"""Next-token distributions compared position by position, and figures of many positions."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from qsrt_runtime.format.errors import FormatError

CHUNK = 1 << 14  # words of the vocabulary that are in float64 at once
DRAWS = 1000  # of the bootstrap
_LEVEL = 0.95
_TOP = 10
_EDGES = tuple(10 ** (step / 4) for step in range(-24, 9))  # 1e-6 to 100 nats, four a decade


@dataclass(frozen=True)
class Compared:
    """Of n positions, float64 on the CPU.

    kl [n]: KL(p || q) in nats, what rounding takes below 0 as 0.   top1 [n]: 1 where both have
    the same likeliest token.   top10 [n]: the share of the ten likeliest that both have.
    reference_nll, nll [t]: of the tokens that follow.
    """

    kl: torch.Tensor
    top1: torch.Tensor
    top10: torch.Tensor
    reference_nll: torch.Tensor
    nll: torch.Tensor


def compare(
    p: torch.Tensor, q: torch.Tensor, targets: torch.Tensor, chunk: int = CHUNK
) -> Compared:
    """Compare logits p with logits q, both [n, vocabulary] of any float dtype.

    targets: [t <= n] int64, the tokens that follow the first t positions.
    Sums are in float64 over `chunk` words at a time; logits must be finite.
    """
    norm_p, norm_q = _logsumexp(p, chunk), _logsumexp(q, chunk)
    kl = torch.zeros_like(norm_p)
    for some in _slices(p.shape[1], chunk):
        log_p = p[:, some].double() - norm_p[:, None]
        log_q = q[:, some].double() - norm_q[:, None]
        kl += (log_p.exp() * (log_p - log_q)).sum(-1)
    top_p, top_q = _top(p, chunk), _top(q, chunk)
    shared = (top_p[:, :, None] == top_q[:, None, :]).any(-1)
    return Compared(
        kl.clamp(min=0).cpu(),
        (top_p[:, 0] == top_q[:, 0]).double().cpu(),
        shared.double().mean(-1).cpu(),
        _nll(p, norm_p, targets),
        _nll(q, norm_q, targets),
    )


def check_finite(logits: torch.Tensor, where: str, chunk: int = CHUNK) -> None:
    """Refuse logits [n, vocabulary] with a NaN or an infinity."""
    for some in _slices(logits.shape[1], chunk):
        if not torch.isfinite(logits[:, some]).all():
            raise FormatError(f"{where}: the model gives logits that are not finite")


class Totals:
    """The positions of one candidate, window by window."""

    def __init__(self) -> None:
        self.kl: list[torch.Tensor] = []  # of each window, float32
        self.sums = torch.zeros(4, dtype=torch.float64)  # top1, top10, both nll
        self.targets = 0

    def add(self, parts: list[Compared]) -> None:
        """parts: of one window, in order."""
        self.kl.append(torch.cat([part.kl for part in parts]).float())
        for part in parts:
            columns = (part.top1, part.top10, part.reference_nll, part.nll)
            self.sums += torch.stack([column.sum() for column in columns])
            self.targets += len(part.nll)

    def figures(self, documents: torch.Tensor) -> dict[str, Any]:
        """What a report says of a candidate.   documents: [windows], to which each belongs."""
        kl = torch.cat(self.kl)
        ordered = kl.double().sort().values
        top1, top10, _, nll = self.sums.tolist()
        return {
            "kl_mean": float(ordered.mean()),
            "kl_median": quantile(ordered, 0.5),
            "kl_p90": quantile(ordered, 0.9),
            "kl_p99": quantile(ordered, 0.99),
            "kl_max": float(ordered[-1]),
            "kl_mean_interval": interval(self.kl, documents),
            "kl_histogram": histogram(ordered),
            "top1_agreement": top1 / len(kl),
            "top10_agreement": top10 / len(kl),
            "score": _score(nll / self.targets),
        }

    def reference_score(self) -> dict[str, float]:
        return _score(float(self.sums[2]) / self.targets)


def quantile(ordered: torch.Tensor, share: float) -> float:
    """Of sorted values [n], linear between neighbours; torch.quantile takes no more than 2^24."""
    place = share * (len(ordered) - 1)
    low, high = (float(ordered[i]) for i in (math.floor(place), math.ceil(place)))
    return low + (high - low) * (place - math.floor(place))


def interval(kl: list[torch.Tensor], documents: torch.Tensor) -> dict[str, float] | None:
    """The middle 95 % of the mean over positions, documents drawn with replacement, seed 0.

    kl: of each window.   documents: [windows] int64 from 0, to which each belongs.
    None of fewer than two documents, which say nothing of their spread.
    """
    count = int(documents.max()) + 1
    if count < 2:
        return None
    sums, sizes = torch.zeros(2, count, dtype=torch.float64)
    sums.index_add_(0, documents, torch.stack([window.double().sum() for window in kl]))
    sizes.index_add_(0, documents, torch.tensor([float(len(w)) for w in kl], dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    means = []
    for _ in range(DRAWS):
        drawn = torch.randint(count, (count,), generator=generator)
        means.append(sums[drawn].sum() / sizes[drawn].sum())
    ordered = torch.stack(means).sort().values
    beside = (1 - _LEVEL) / 2
    return {"low": quantile(ordered, beside), "high": quantile(ordered, 1 - beside)}


def histogram(kl: torch.Tensor) -> dict[str, list]:
    """Counts of values between log-spaced edges; the outermost also count what lies beyond."""
    edges = torch.tensor(_EDGES, dtype=torch.float64)
    place = torch.bucketize(kl.double(), edges, right=True) - 1
    bins = len(_EDGES) - 1
    counts = torch.bincount(place.clamp(0, bins - 1), minlength=bins)
    return {"edges": list(_EDGES), "counts": counts.tolist()}


def _score(cross_entropy: float) -> dict[str, float]:
    return {"cross_entropy": cross_entropy, "perplexity": math.exp(min(cross_entropy, 700))}


def _slices(length: int, chunk: int) -> Iterator[slice]:
    return (slice(first, first + chunk) for first in range(0, length, chunk))


def _logsumexp(logits: torch.Tensor, chunk: int) -> torch.Tensor:
    """Over the vocabulary: [n] float64."""
    parts = [logits[:, some].double().logsumexp(-1) for some in _slices(logits.shape[1], chunk)]
    return torch.stack(parts, -1).logsumexp(-1)


def _top(logits: torch.Tensor, chunk: int) -> torch.Tensor:
    """The likeliest ten, or all of fewer, likeliest first: [n, 10] int64."""
    values, ids = [], []
    for some in _slices(logits.shape[1], chunk):
        part = logits[:, some]
        found = part.topk(min(_TOP, part.shape[1]), dim=-1)
        values.append(found.values)
        ids.append(found.indices + some.start)
    best = torch.cat(values, -1).topk(min(_TOP, logits.shape[1]), dim=-1).indices
    return torch.cat(ids, -1).gather(1, best)


def _nll(logits: torch.Tensor, norm: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    count = len(targets)
    chosen = logits[:count].gather(1, targets.to(logits.device)[:, None])[:, 0]
    return (norm[:count] - chosen.double()).cpu()
