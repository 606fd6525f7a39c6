"""A run of one layer's slots in memory, and the experts in it."""

from dataclasses import dataclass

import torch

from qsrt_runtime.format import atom, rates
from qsrt_runtime.format.geometry import SLOTS_PER_PAIR, Geometry


@dataclass(frozen=True)
class Slab:
    """One layer's routed experts as stored: all slots, or those that a rank owns.

    layer: its index in the checkpoint, which decides where each expert's pairs stand.
    geometry: of the whole layer.   slots: the physical slots held.
    format_codes: [E] uint8, (mode of w1 and w3) << 4 | mode of w2, or 0xFF for X4T.
    shared_scales: [3, rows, H] float16, w1.suh, w3.suh, w2.svh; rows is E, or 1 when shared.
    atoms: [len(slots), slot stride] uint8.
    """

    layer: int
    geometry: Geometry
    slots: range
    format_codes: torch.Tensor
    shared_scales: torch.Tensor
    atoms: torch.Tensor


def expert_modes(slab: Slab, expert: int) -> tuple[int, int]:
    """(mode of w1 and w3, mode of w2); FormatError for X4T and unknown nibbles."""
    where = f"layer {slab.layer} expert {expert}"
    return rates.modes_of_code(int(slab.format_codes[expert]), slab.geometry.records, where)


def expert_pairs(slab: Slab, expert: int) -> list[int]:
    """The logical pairs of an expert that stand in the held slots, which are whole pairs."""
    pairs = slab.geometry.pairs
    shift = slab.geometry.pair_shift(slab.layer, expert)
    held = range(slab.slots.start // SLOTS_PER_PAIR, slab.slots.stop // SLOTS_PER_PAIR)
    return sorted((place - shift) % pairs for place in held)


def expert_bundles(slab: Slab, expert: int) -> torch.Tensor:
    """One expert's bundles by logical atom: [8 * its held pairs, bundle bytes] uint8."""
    geometry = slab.geometry
    physical = geometry.physical_slots(slab.layer, expert)
    rows = [
        physical[SLOTS_PER_PAIR * pair + i] - slab.slots.start
        for pair in expert_pairs(slab, expert)
        for i in range(SLOTS_PER_PAIR)
    ]
    place = int((slab.format_codes[:expert] != rates.X4T).sum())  # compressed experts before it
    start = place * geometry.bundle_bytes
    return slab.atoms[rows, start : start + geometry.bundle_bytes]


def unpack_expert(slab: Slab, expert: int) -> atom.Expert:
    """One expert's coded matrices, or the part of them that the held slots store.

    A part has the channels of its pairs alone: w1 and w3 [H, 256 n], w2 [256 n, H].
    """
    modes = expert_modes(slab, expert)
    row = expert if slab.shared_scales.shape[1] > 1 else 0
    return atom.unpack_expert(
        expert_bundles(slab, expert),
        slab.shared_scales[:, row],
        modes,
        slab.geometry,
        expert_pairs(slab, expert),
    )
