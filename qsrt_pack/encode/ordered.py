"""Sums in one fixed order, so that bytes depend on no thread count, vector width or device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Linear algebra on one CPU thread: with several, its sums are split by their number.

    Also a decorator.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def ordered_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum of the last axis by halves, elementwise in float64: [..., n] -> [...]."""
    x = x.double()
    while (count := x.shape[-1]) > 1:
        half = count // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([folded, x[..., 2 * half :]], dim=-1) if count % 2 else folded
    return x.squeeze(-1)


def ordered_mean_square(x: torch.Tensor) -> torch.Tensor:
    """Mean square of the last axis in float64: [..., n] -> [...]."""
    return ordered_sum(x.double().square()) / x.shape[-1]


def root_mean_square(x: torch.Tensor) -> float:
    """Root mean square of all elements."""
    return float(ordered_mean_square(x.flatten()).sqrt())
