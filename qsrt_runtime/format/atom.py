"""Bundles: which byte of a slot row belongs to which expert, matrix and tile.

A coded matrix is held as records in stored order, each int16 [8 stripes, H/16 tiles, 16 * bits].
Stripe q is the q-th group of 16 of the record's 128 channels. Atom 8p + q is stripe q of records
2p (its low side) and 2p + 1 (its high side); the same formula serves w1, w3 and w2.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qsrt_runtime.format.geometry import ATOM, LOCAL_BYTES, SLOTS_PER_PAIR, TILE, Geometry
from qsrt_runtime.format.rates import stored_bits

MATRICES = ("w1", "w3", "w2")  # the order inside a bundle


@dataclass(frozen=True)
class Matrix:
    """One coded matrix [K inputs, N outputs] in stored order.

    records: words, int16 [8, H/16, 16 * bits] each, or labels, uint8 [8, H/16, 256].
    suh: [K] float16.   svh: [N] float16.
    """

    records: tuple[torch.Tensor, ...]
    suh: torch.Tensor
    svh: torch.Tensor


@dataclass(frozen=True)
class Expert:
    """The three coded matrices of one expert and their rate modes."""

    w1: Matrix
    w3: Matrix
    w2: Matrix
    mode13: int
    mode2: int

    @property
    def shared_scales(self) -> torch.Tensor:
        """The vectors on the hidden side, not in bundles: w1.suh, w3.suh, w2.svh, [3, H]."""
        return torch.stack([self.w1.suh, self.w3.suh, self.w2.svh])


def record_bits_of(words: torch.Tensor) -> int:
    """The bits a weight of one record's words [..., 16 * bits]."""
    return words.shape[-1] // TILE


def pack_expert(expert: Expert) -> torch.Tensor:
    """The bundles of an expert by logical atom: [I/32, bundle bytes] uint8."""
    trellis = [_pack_trellis(m.records) for m in (expert.w1, expert.w3, expert.w2)]
    local = [_pack_local(v) for v in (expert.w1.svh, expert.w3.svh, expert.w2.suh)]
    return torch.cat(trellis + local, dim=1)


def unpack_expert(
    bundles: torch.Tensor,
    shared_scales: torch.Tensor,
    modes: tuple[int, int],
    geometry: Geometry,
    pairs: Sequence[int] | None = None,
) -> Expert:
    """The inverse of pack_expert, for all pairs or some.

    bundles: [8 * len(pairs), bundle bytes] uint8 by logical atom.   shared_scales: [3, H] float16.
    modes: the rate mode of w1 and w3, and that of w2.   pairs: the logical pairs of the bundles;
    None: all.
    """
    pairs = range(geometry.pairs) if pairs is None else pairs
    size = geometry.trellis_bytes
    records = []
    for i in range(3):
        bits = stored_bits(modes[i == 2], geometry.records)
        low_bits = [bits[2 * pair] for pair in pairs]
        part = bundles[:, size * i : size * (i + 1)]
        records.append(_unpack_trellis(part, low_bits, geometry.hidden_tiles))
    return assemble(records, local_scales(bundles), shared_scales, modes)


def assemble(
    records: Sequence[tuple[torch.Tensor, ...]],
    local: torch.Tensor,
    shared_scales: torch.Tensor,
    modes: tuple[int, int],
) -> Expert:
    """An expert of the records of w1, w3 and w2.

    local: see local_scales.   shared_scales: [3, H] float16.   modes: as unpack_expert's.
    """
    return Expert(
        w1=Matrix(records[0], shared_scales[0], local[0]),
        w3=Matrix(records[1], shared_scales[1], local[1]),
        w2=Matrix(records[2], local[2], shared_scales[2]),
        mode13=modes[0],
        mode2=modes[1],
    )


def local_scales(bundles: torch.Tensor) -> torch.Tensor:
    """The vectors on the intermediate side: w1.svh, w3.svh, w2.suh, [3, 256 n] float16.

    bundles: [8 n, bundle bytes] uint8 by logical atom, or the last LOCAL_BYTES of each.
    """
    parts = bundles[:, -LOCAL_BYTES:].split(2 * ATOM, dim=1)
    return torch.stack([_unpack_local(part) for part in parts])


def _pack_trellis(records: tuple[torch.Tensor, ...]) -> torch.Tensor:
    pairs = [
        torch.cat([low.flatten(1), high.flatten(1)], dim=1)
        for low, high in zip(records[::2], records[1::2], strict=True)
    ]
    return torch.cat(pairs).contiguous().view(torch.uint8)


def _unpack_trellis(
    part: torch.Tensor, low_bits: list[int], hidden_tiles: int
) -> tuple[torch.Tensor, ...]:
    words = part.contiguous().view(torch.int16).unflatten(0, (-1, SLOTS_PER_PAIR))
    records = []
    for pair, bits in zip(words, low_bits, strict=True):
        low = hidden_tiles * TILE * bits
        records += [
            side.unflatten(1, (hidden_tiles, -1)) for side in (pair[:, :low], pair[:, low:])
        ]
    return tuple(records)


def _pack_local(vector: torch.Tensor) -> torch.Tensor:
    sides = vector.view(-1, 2, SLOTS_PER_PAIR, TILE).transpose(1, 2)
    return sides.reshape(-1, ATOM).contiguous().view(torch.uint8)


def _unpack_local(part: torch.Tensor) -> torch.Tensor:
    atoms = part.contiguous().view(torch.float16)
    return atoms.view(-1, SLOTS_PER_PAIR, 2, TILE).transpose(1, 2).flatten()
