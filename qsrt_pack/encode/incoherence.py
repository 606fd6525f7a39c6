"""Signs, Hadamard rotations and scales that make a matrix look like noise of one size.

Matrices here are [K inputs, N outputs]. With suh [K] and svh [N] the source is
diag(suh) B_K (rotated matrix) B_N diag(svh); see qsrt_runtime.format.rotation.
"""

import statistics
from collections.abc import Generator, Sequence

import torch

from qsrt_pack.encode.ordered import ordered_mean_square, ordered_sum
from qsrt_runtime.format.geometry import RECORD, TILE
from qsrt_runtime.format.rotation import rotate, rotate_rows
from qsrt_runtime.format.tile import to_trellis_order

# Root mean square of the rotated matrix before the global scale; the sign is the published one.
TARGET_RMS = -1.24371088
_TINY = 1e-10  # keeps the scale of a row off zero
_UNEVEN = 16  # such a column has the power of two blocks of 128 others
_COARSE = tuple(0.1 + 0.2 * step for step in range(10))
_FINE_STEP = 0.075


def regularize(
    weight: torch.Tensor,
    input_signs: torch.Tensor,
    output_signs: torch.Tensor,
    row_scales: torch.Tensor | None = None,
    column_scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate a matrix and give it one size (FORMAT of the published encoder, step 6).

    weight: [K, N] float32.   input_signs: [K], output_signs: [N] of +1 and -1.
    row_scales: [K], see layer_scales, 0 only where rows are; by default each row gets the target
    size.
    column_scales: [N], positive, see column_scales; by default 1.
    Returns (rotated [K, N], suh [K], svh [N]), float32. Zero rows get suh 0, zero columns svh 0,
    so that they are exact whatever the tiles decode to.
    """
    svh = torch.where((weight != 0).any(0), output_signs, 0)
    if column_scales is not None:
        svh = svh * column_scales
    rotated = rotate(weight / torch.where(svh == 0, 1, svh))
    row_rms = ordered_mean_square(rotated).sqrt().float()
    sizes = row_scales if row_scales is not None else row_rms / -TARGET_RMS + _TINY
    suh = torch.where(row_rms > 0, -input_signs * sizes, 0)
    rotated = rotate_rows(rotated / torch.where(suh == 0, 1, suh)[:, None])
    if row_scales is None:
        return rotated, suh, svh
    size = float(ordered_mean_square(rotated.flatten()).sqrt()) / -TARGET_RMS or 1.0
    return rotated / size, suh, svh * size


def is_uneven(weight: torch.Tensor) -> bool:
    """Whether a column's largest weight is far above that of most, so that the columns need scales.

    weight: [K, N]. Without scales a row's size is that of its largest column, to which the tiles
    of all the others are then near zero.
    """
    largest = weight.abs().amax(0)
    largest = largest[largest > 0]
    return bool(len(largest) and largest.max() > _UNEVEN * largest.median())


def column_scales(weight: torch.Tensor) -> torch.Tensor:
    """Scales that even out the columns of a matrix by half, and its blocks of 128 wholly: [N].

    weight: [K, N] float32. A column's scale is the square root of its root mean square, times
    what gives all blocks the mean square 1 after it; so that a tile's error does not count by its
    block's size, and large columns keep some of theirs.
    """
    power = ordered_mean_square(weight.T)
    even = power.sqrt().sqrt().clamp_min(_TINY)
    blocks = ordered_sum((power / even.square()).unflatten(0, (-1, RECORD))) / RECORD
    scales = even.unflatten(0, (-1, RECORD)) * blocks.sqrt().clamp_min(_TINY)[:, None]
    return scales.flatten().float()


def layer_scales(powers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Row scales that all gate and up matrices of a layer can share: [H] float32, positive.

    powers: of each matrix the mean square of its rows, [H] float64, in a fixed order.
    The profile over rows is the mean of the matrices' own, each relative to its matrix, and the
    size that of the median matrix, so that no matrix decides for the others.
    """
    means = [float(ordered_sum(power)) / len(power) for power in powers]
    relative = [power / mean for power, mean in zip(powers, means, strict=True) if mean]
    if not relative:
        return torch.ones(len(powers[0]))
    profile = ordered_sum(torch.stack(relative, -1)) / len(relative)
    size = statistics.median_low(mean for mean in means if mean) ** 0.5
    return (profile.sqrt() * size / -TARGET_RMS + _TINY).float()


def scale_search_tiles(rotated: torch.Tensor) -> torch.Tensor:
    """The tiles on which the global scale is tried: [n, 256] in trellis order.

    Three tiles at each step of a wrapped diagonal as long as the longer side, then the tiles of
    highest (descending) and lowest (ascending) root mean square, at least eight of each.
    """
    grid = rotated.unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE)).transpose(1, 2)
    rows, columns = grid.shape[:2]
    steps, extremes = _scale_search_counts(rows, columns)
    diagonal = [
        (step % rows) * columns + (step + more) % columns
        for step in range(steps)
        for more in range(3)
    ]
    tiles = grid.flatten(0, 1)
    by_size = ordered_mean_square(tiles.flatten(1)).argsort(descending=True, stable=True)
    diagonal = torch.tensor(diagonal, device=rotated.device)
    chosen = torch.cat([diagonal, by_size[:extremes], by_size[-extremes:].flip(0)])
    return to_trellis_order(tiles[chosen])


def scale_search_tile_count(inputs: int, outputs: int) -> int:
    """How many tiles scale_search_tiles chooses from a matrix [inputs, outputs]."""
    steps, extremes = _scale_search_counts(inputs // TILE, outputs // TILE)
    return 3 * steps + 2 * extremes


def _scale_search_counts(rows: int, columns: int) -> tuple[int, int]:
    """Steps of the diagonal, and tiles of highest (and of lowest) root mean square."""
    steps = max(rows, columns)
    return steps, min(max(8, steps * 3 // 16), rows * columns)


def scale_search_count(tiles: int) -> tuple[int, int]:
    """How many tiles search_scale quantizes coarsely and finely when given so many."""
    return len(_COARSE) * -(-tiles // 3), 5 * tiles


def search_scale(
    tiles: torch.Tensor,
) -> Generator[tuple[bool, torch.Tensor], torch.Tensor, tuple[float, float]]:
    """The global scale g with the least mean square of q(g t) / g - t, and that of the grid.

    tiles: [n, 256] float32. A generator that yields (whether q is the fine one, values to
    quantize [m, 256]) and is sent the quantized values: first a coarse grid on every third tile,
    then a fine one around its best on all. The scale is the vertex of the parabola through the
    best three, at most half a step away.
    """
    if not tiles.any():
        return 1.0, 0.0
    errors = yield from _scale_errors(False, tiles[::3], _COARSE)
    best = _COARSE[min(range(len(_COARSE)), key=errors.__getitem__)]
    grid = [best + _FINE_STEP * step for step in range(-2, 3)]
    grid = [scale for scale in grid if scale > 0]
    errors = yield from _scale_errors(True, tiles, grid)
    at = min(range(len(grid)), key=errors.__getitem__)
    offset = 0.0
    if 0 < at < len(grid) - 1:
        before, least, after = errors[at - 1 : at + 2]
        curvature = before - 2 * least + after
        if curvature > 0:
            offset = max(-0.5, min(0.5, 0.5 * (before - after) / curvature))
    return grid[at] + offset * _FINE_STEP, errors[at]


def _scale_errors(
    fine: bool, tiles: torch.Tensor, scales: Sequence[float]
) -> Generator[tuple[bool, torch.Tensor], torch.Tensor, list[float]]:
    """Mean square of q(g t) / g - t for each scale g, all quantized at once."""
    factors = torch.tensor(scales, device=tiles.device)[:, None, None]
    values = yield fine, (tiles * factors).flatten(0, 1)
    errors = values.unflatten(0, (len(scales), -1)) / factors - tiles
    return ordered_mean_square(errors.flatten(1)).tolist()
