"""Experts decoded to E4M3 labels, a byte for each weight: in which order they stand in memory.

A layer's labels are flat. First those of gate and up together, [E, 2 I held / 8, H / 64, 8, 64]:
of each physical pair the rows of gate's low and high record, then up's. Then those of down,
[E, H / 8, I held / 64, 8, 64]: of each slot the columns of the low record, then of the high one.
A row's 16 columns of a tile are in the order of the trellis, 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15,
as a lane of a tensor core takes them.
"""

import torch

from qsrt_runtime.format import codebook, tile


def matrices(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of gate and up, and those of down, of all experts: flat views."""
    first, second = labels.split([len(labels) // 3 * 2, len(labels) // 3])
    return first, second


def records(
    labels: torch.Tensor, expert: int, experts: int, hidden: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where one expert's labels stand, of w1, w3 and w2: views [physical pairs held, 2 sides, ...].

    What follows, taken as one run, is a record in the order of its words: 8 stripes, H/16 tiles,
    256 trellis positions.
    """
    both, down = (each.view(experts, -1)[expert] for each in matrices(labels))
    # pair, matrix, side, stripe, half tile, 64 hidden, column, tile, quarter, four rows
    both = both.view(-1, 2, 2, 8, 2, hidden // 64, 8, 4, 4, 4)
    w1, w3 = both.permute(1, 0, 2, 3, 5, 7, 6, 8, 4, 9)
    # 64 hidden, tile, half tile, pair, two stripes, column, stripe, side, quarter, four rows
    down = down.view(hidden // 64, 4, 2, -1, 4, 8, 2, 2, 4, 4)
    return w1, w3, down.permute(3, 7, 4, 6, 0, 1, 5, 8, 2, 9)


def of_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The labels of tiles: words [n, 16 * bits] int16 -> [n, 256] uint8, trellis order."""
    return codebook.labels(bits).to(words.device)[tile.states(words, bits)]


def values(labels: torch.Tensor) -> torch.Tensor:
    """The weights of tiles: labels [n, 256] uint8 -> [n, 16, 16] float32, row-major."""
    return tile.to_row_major(labels.view(torch.float8_e4m3fn).float())
