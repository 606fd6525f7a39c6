"""Coded bytes to dense weights, plainly: the definition every kernel and encoder is held to."""

import torch

from qsrt_runtime.format import labels, tile
from qsrt_runtime.format.atom import Expert, Matrix, record_bits_of
from qsrt_runtime.format.rotation import rotate, rotate_rows


def record_tiles(words: torch.Tensor, rate_axis: str) -> torch.Tensor:
    """The decoded tiles of one record as a matrix, before rotations and scales.

    words: [8, H/16, 16 * bits] int16, or labels, [8, H/16, 256] uint8.
    rate_axis: the axis of the record's 128 channels.
    Returns float32: [H, 128] for "out" (w1, w3), [128, H] for "in" (w2).
    """
    stripes, hidden_tiles, _ = words.shape
    if words.dtype == torch.uint8:
        tiles = labels.values(words.flatten(0, 1))
    else:
        tiles = tile.values(words.flatten(0, 1), record_bits_of(words))
    tiles = tiles.view(stripes, hidden_tiles, 16, 16)
    if rate_axis == "out":
        return tiles.permute(1, 2, 0, 3).reshape(16 * hidden_tiles, 16 * stripes)
    return tiles.permute(0, 2, 1, 3).reshape(16 * stripes, 16 * hidden_tiles)


def matrix_tiles(matrix: Matrix, rate_axis: str) -> torch.Tensor:
    """All decoded tiles of a matrix, [K, N] float32 in stored order."""
    parts = [record_tiles(words, rate_axis) for words in matrix.records]
    return torch.cat(parts, dim=1 if rate_axis == "out" else 0)


def dense_matrix(matrix: Matrix, rate_axis: str) -> torch.Tensor:
    """The dense weight in source orientation, [out, in] float32, I axis in stored order."""
    rotated = rotate_rows(matrix_tiles(matrix, rate_axis)) * matrix.suh.float()[:, None]
    return (rotate(rotated) * matrix.svh.float()).T


def dense_expert(expert: Expert) -> dict[str, torch.Tensor]:
    """w1 and w3 [I, H], w2 [H, I], float32, with the I axis in stored order."""
    return {
        "w1": dense_matrix(expert.w1, "out"),
        "w3": dense_matrix(expert.w3, "out"),
        "w2": dense_matrix(expert.w2, "in"),
    }
