"""Blockwise error feedback against a Hessian (BlockLDLQ)."""

from collections.abc import Generator

import torch

from qsrt_pack.encode.ordered import one_thread
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


@one_thread()
def feedback_factor(hessian: torch.Tensor, damping: float = DAMPING) -> torch.Tensor:
    """Unit block-lower factor of a Hessian, blocks of 16, diagonal blocks zeroed: [K, K].

    hessian: [K, K], symmetric positive semidefinite. Its diagonal grows by damping times its
    mean; a Cholesky that still fails gets twice that more, ten times at most.
    A Hessian of zeros, as of a matrix of zeros, feeds nothing back.
    Raises ValueError when none succeeds.
    """
    mean = hessian.diagonal().mean()
    if not mean:
        return torch.zeros_like(hessian)
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
        with one_thread():
            target = weight[rows] + factor[later, rows].T @ error[later]
        quantized[rows] = yield rows, target
        error[rows] = weight[rows] - quantized[rows]
    return quantized


def ldlq_two_sided(
    weight: torch.Tensor, inputs: torch.Tensor, outputs: torch.Tensor
) -> Generator[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Quantize a matrix tile by tile, feeding errors back along both axes.

    weight: [K, N] float32.   inputs, outputs: feedback_factor of the Hessians of either axis,
    [K, K] and [N, N]. With E the error and F = E + E Lo, tile (i, j) is offered
    W + sum_{j' > j} E Lo + sum_{i' > i} Li^T F: what is left of tr(H E G E^T) then depends on its
    own error alone. Tiles on an anti-diagonal do not depend on each other.
    A generator that yields (tile rows [n], tile columns [n], targets [n, 16, 16]), is sent their
    quantized values, and returns those of the matrix, [K, N] float32.
    """
    rows, columns = (size // TILE for size in weight.shape)
    quantized = torch.empty_like(weight)
    error, total = torch.zeros_like(weight), torch.zeros_like(weight)  # E and F
    views = (x.unflatten(0, (-1, TILE)).unflatten(2, (-1, TILE)) for x in (quantized, error, total))
    quantized_tiles, error_tiles, total_tiles = views  # [K/16, 16, N/16, 16]
    tiles = weight.unflatten(0, (-1, TILE)).unflatten(2, (-1, TILE))
    error_rows = error.unflatten(0, (-1, TILE))  # [K/16, 16, N]
    total_columns = total.unflatten(1, (-1, TILE)).transpose(0, 1)  # [N/16, K, 16]
    output_columns = outputs.unflatten(1, (-1, TILE)).transpose(0, 1)  # [N/16, N, 16]
    input_columns = inputs.unflatten(1, (-1, TILE)).permute(1, 2, 0)  # [K/16, 16, K]
    for wave in range(rows + columns - 2, -1, -1):
        i = torch.arange(max(0, wave - columns + 1), min(rows, wave + 1), device=weight.device)
        j = wave - i
        with one_thread():
            along = error_rows[i] @ output_columns[j]
            target = tiles[i, :, j] + along + input_columns[i] @ total_columns[j]
        values = yield i, j, target
        quantized_tiles[i, :, j] = values
        error_tiles[i, :, j] = tiles[i, :, j] - values
        total_tiles[i, :, j] = tiles[i, :, j] - values + along
    return quantized
