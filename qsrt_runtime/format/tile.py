"""One tile: edges, words, states, and the place of each trellis position.

A tile is 16x16 weights of the transposed matrix: row = input feature, column = output feature.
Its 256 edges form a closed path, so that any edges are valid and no start state is stored.
"""

import functools

import torch

from qsrt_runtime.format import codebook

POSITIONS = 256
_CPU = torch.device("cpu")


@functools.cache
def row_major_place(device: torch.device = _CPU) -> torch.Tensor:
    """16 * row + column of each trellis position: [256] int64, a permutation.

    The order of an mma fragment: lane = position // 8 holds rows 2*(lane % 4) + {0, 1, 8, 9} of
    columns lane // 4 and lane // 4 + 8.
    """
    position = torch.arange(POSITIONS)
    lane, j = position // 8, position % 8
    row = 2 * (lane % 4) + (j & 1) + 8 * ((j >> 1) & 1)
    return (16 * row + lane // 4 + 8 * (j >> 2)).to(device)


@functools.cache
def trellis_position(device: torch.device = _CPU) -> torch.Tensor:
    """The trellis position of each row-major place, the inverse of `row_major_place`."""
    return torch.argsort(row_major_place()).to(device)


def to_trellis_order(tiles: torch.Tensor) -> torch.Tensor:
    """[n, 16, 16] row-major tiles -> [n, 256] in trellis order, any dtype."""
    return tiles.flatten(1)[:, row_major_place(tiles.device)]


def to_row_major(path: torch.Tensor) -> torch.Tensor:
    """[n, 256] in trellis order -> [n, 16, 16] row-major tiles, any dtype."""
    return path[:, trellis_position(path.device)].unflatten(1, (16, 16))


def of_matrix(matrix: torch.Tensor) -> torch.Tensor:
    """Cut a matrix into tiles: [16 a, 16 b] -> [a, b, 16, 16]."""
    return matrix.unflatten(1, (-1, 16)).unflatten(0, (-1, 16)).transpose(1, 2)


def to_matrix(tiles: torch.Tensor) -> torch.Tensor:
    """The inverse of of_matrix: [a, b, 16, 16] -> [16 a, 16 b]."""
    return tiles.transpose(1, 2).flatten(2).flatten(0, 1)


def pack_edges(edges: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack closed paths into stored words.

    edges: [n, 256] uint8, trellis order, each < 2**bits.   bits: 2, 3 or 4.
    Returns words: [n, 16 * bits] int16; read as little-endian uint32, the path runs from each
    top bit down.
    """
    shifts = torch.arange(bits - 1, -1, -1, device=edges.device)
    stream = (edges.to(torch.int32)[:, :, None] >> shifts) & 1
    stream = stream.reshape(len(edges), 16 * bits, 16)
    weights = 1 << torch.arange(15, -1, -1, device=edges.device, dtype=torch.int32)
    return _swap_neighbours((stream * weights).sum(-1).to(torch.int16))


def states(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The 16-bit state at every trellis position.

    words: [n, 16 * bits] int16 as stored.   Returns [n, 256] int32, each in 0..65535.
    State i is the 16 bits of the cyclic stream that end with the last bit of edge i.
    """
    stream = _swap_neighbours(words).to(torch.int32) & 0xFFFF
    end = (torch.arange(POSITIONS, device=words.device) + 1) * bits
    start = (end - 16) % (POSITIONS * bits)
    first, offset = start // 16, start % 16
    second = (first + 1) % (16 * bits)
    window = (stream[:, first] << offset) | (stream[:, second] >> (16 - offset))
    return (window & 0xFFFF).to(torch.int32)


def states_of_edges(edges: torch.Tensor, bits: int) -> torch.Tensor:
    """The state at every position of closed paths: [n, 256] uint8 -> [n, 256] int32."""
    state = torch.zeros_like(edges, dtype=torch.int32)
    for age in range(-(-16 // bits)):
        state |= edges.roll(age, dims=1).to(torch.int32) << (bits * age)
    return state & 0xFFFF


def edges(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack stored words: [n, 16 * bits] int16 -> [n, 256] uint8, the inverse of pack_edges."""
    return (states(words, bits) & ((1 << bits) - 1)).to(torch.uint8)


def values(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The weights of tiles: words [n, 16 * bits] int16 -> [n, 16, 16] float32, row-major."""
    return to_row_major(codebook.values(bits, words.device)[states(words, bits)])


def _swap_neighbours(words: torch.Tensor) -> torch.Tensor:
    return words.unflatten(1, (-1, 2)).flip(2).flatten(1)
