"""Blockwise error feedback against a Hessian (BlockLDLQ)."""

from collections.abc import Generator

import torch

from qsrt_runtime.format.geometry import TILE
from qsrt_runtime.format.rotation import rotate, rotate_rows

DAMPING = 0.025
_RETRIES = 10


def rotate_hessian(hessian: torch.Tensor, suh: torch.Tensor) -> torch.Tensor:
    """The Hessian of the rotated matrix: B diag(suh) H diag(suh) B, [K, K] float32.

    With suh its signs alone this is the published rotation; with the scales, the error of row k
    counts by suh_k squared, as it does in the decoded matrix.
    """
    return rotate(rotate_rows(hessian * suh[:, None] * suh))


def feedback_factor(hessian: torch.Tensor, damping: float = DAMPING) -> torch.Tensor:
    """Unit block-lower factor of a Hessian, blocks of 16, diagonal blocks zeroed: [K, K].

    hessian: [K, K], symmetric positive semidefinite. Its diagonal grows by damping times its
    mean; a Cholesky that still fails gets twice that more, ten times at most.
    Raises ValueError when none succeeds.
    """
    mean = hessian.diagonal().mean()
    damped = hessian.clone()
    for attempt in range(_RETRIES + 1):
        damped.diagonal().add_(mean * damping * (2 if attempt else 1))
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            break
    else:
        raise ValueError(f"Hessian is not positive definite after {_RETRIES} rounds of damping")
    return _unit_blocks(lower)


def _unit_blocks(lower: torch.Tensor) -> torch.Tensor:
    """A Cholesky factor with its columns divided by their diagonal blocks, which become 0."""
    blocks = lower.unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE))  # [k, 16, k, 16]
    place = torch.arange(len(blocks), device=lower.device)
    inverses = torch.linalg.inv(blocks[place, :, place])
    columns = lower.unflatten(1, (-1, TILE)).transpose(0, 1) @ inverses
    unit = columns.transpose(0, 1).contiguous()
    unit.unflatten(0, (-1, TILE))[place, :, place] = 0
    return unit.flatten(1)


def ldlq(
    weight: torch.Tensor, factor: torch.Tensor | None
) -> Generator[tuple[slice, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Quantize a matrix in blocks of 16 rows from the last to the first, feeding errors back.

    weight: [K, N] float32.   factor: feedback_factor's [K, K], or None for an identity Hessian,
    with which no error is fed back and all rows go at once.
    A generator that yields (rows, their targets [n, N]), is sent their quantized values, and
    returns those of the matrix, [K, N] float32.
    """
    if factor is None:
        return (yield slice(0, len(weight)), weight)
    quantized = torch.empty_like(weight)
    error = torch.zeros_like(weight)
    for start in range(len(weight) - TILE, -1, -TILE):
        rows, later = slice(start, start + TILE), slice(start + TILE, None)
        quantized[rows] = yield rows, weight[rows] + factor[later, rows].T @ error[later]
        error[rows] = weight[rows] - quantized[rows]
    return quantized
