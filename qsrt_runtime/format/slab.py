"""A run of one layer's slots in memory, and the experts in it."""

from dataclasses import dataclass, field

import torch

from qsrt_runtime.format import atom, rates
from qsrt_runtime.format import labels as layouts
from qsrt_runtime.format.geometry import LOCAL_BYTES, RECORD, SLOTS_PER_PAIR, Geometry


@dataclass(frozen=True)
class Slab:
    """One layer's routed experts as stored, or expanded: all slots, or those that a rank owns.

    layer: its index in the checkpoint, which decides where each expert's pairs stand.
    geometry: of the whole layer.   slots: the physical slots held.
    format_codes: [E] uint8, (mode of w1 and w3) << 4 | mode of w2, or 0xFF for X4T.
    shared_scales: [3, rows, H] float16, w1.suh, w3.suh, w2.svh; rows is E, or 1 when shared.
    atoms: [len(slots), slot stride] uint8; where there are labels, of bundles' local scales alone,
    [len(slots), E LOCAL_BYTES].
    labels: [3 E H 32 len(slots)] uint8, what the words decode to, as format.labels has them.
    """

    layer: int
    geometry: Geometry
    slots: range
    format_codes: torch.Tensor
    shared_scales: torch.Tensor
    atoms: torch.Tensor
    labels: torch.Tensor | None = field(default=None, kw_only=True)

    @property
    def bundle_bytes(self) -> int:
        """Bytes of one expert in a row of atoms."""
        return self.geometry.bundle_bytes if self.labels is None else LOCAL_BYTES

    @property
    def local_offset(self) -> int:
        """Where in them its local scales begin."""
        return self.bundle_bytes - LOCAL_BYTES

    def matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Its labels of gate and up, and of down: flat, all experts', see format.labels."""
        return layouts.matrices(self.labels)

    @property
    def label_bytes(self) -> int:
        """Bytes of its labels, which it need not have."""
        pairs = len(self.slots) // SLOTS_PER_PAIR
        return 3 * self.geometry.experts * self.geometry.hidden * 2 * RECORD * pairs


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
    """One expert's bundles by logical atom: [8 * its held pairs, slab.bundle_bytes] uint8."""
    geometry = slab.geometry
    physical = geometry.physical_slots(slab.layer, expert)
    rows = [
        physical[SLOTS_PER_PAIR * pair + i] - slab.slots.start
        for pair in expert_pairs(slab, expert)
        for i in range(SLOTS_PER_PAIR)
    ]
    place = int((slab.format_codes[:expert] != rates.X4T).sum())  # compressed experts before it
    start = place * slab.bundle_bytes
    return slab.atoms[rows, start : start + slab.bundle_bytes]


def unpack_expert(slab: Slab, expert: int) -> atom.Expert:
    """One expert's coded matrices, or the part of them that the held slots store.

    A part has the channels of its pairs alone: w1 and w3 [H, 256 n], w2 [256 n, H].
    """
    modes = expert_modes(slab, expert)
    row = expert if slab.shared_scales.shape[1] > 1 else 0
    bundles, shared = expert_bundles(slab, expert), slab.shared_scales[:, row]
    if slab.labels is None:
        pairs = expert_pairs(slab, expert)
        return atom.unpack_expert(bundles, shared, modes, slab.geometry, pairs)
    shape = (SLOTS_PER_PAIR, slab.geometry.hidden_tiles, -1)
    sides = [(place, side) for place in _places(slab, expert) for side in (0, 1)]
    records = [
        tuple(matrix[at].reshape(shape) for at in sides)
        for matrix in _label_records(slab, slab.labels, expert)
    ]
    return atom.assemble(records, atom.local_scales(bundles), shared, modes)


def expand(slab: Slab, labels: torch.Tensor) -> None:
    """The labels of a slab that has none, plainly: what every kernel that makes them is held to.

    labels: [slab.label_bytes] uint8, written. Raises FormatError for an X4T expert.
    """
    for expert in range(slab.geometry.experts):
        coded, places = unpack_expert(slab, expert), _places(slab, expert)
        matrices = (coded.w1, coded.w3, coded.w2)
        for matrix, target in zip(matrices, _label_records(slab, labels, expert), strict=True):
            for i, words in enumerate(matrix.records):
                found = layouts.of_words(words.flatten(0, 1), atom.record_bits_of(words))
                there = target[places[i // 2], i % 2]
                there.copy_(found.view(there.shape))


def without_words(slab: Slab) -> torch.Tensor:
    """The atoms of an expanded slab: bundles' local scales alone, [len(slots), E LOCAL_BYTES]."""
    bundles = slab.atoms[:, : slab.geometry.experts * slab.bundle_bytes]
    bundles = bundles.unflatten(1, (-1, slab.bundle_bytes))
    return bundles[..., slab.local_offset :].flatten(1).contiguous()


def _places(slab: Slab, expert: int) -> list[int]:
    """For each of an expert's held pairs, which of the held pairs of slots it stands in."""
    shift, first = slab.geometry.pair_shift(slab.layer, expert), slab.slots.start // SLOTS_PER_PAIR
    return [(pair + shift) % slab.geometry.pairs - first for pair in expert_pairs(slab, expert)]


def _label_records(slab: Slab, labels: torch.Tensor, expert: int) -> tuple[torch.Tensor, ...]:
    return layouts.records(labels, expert, slab.geometry.experts, slab.geometry.hidden)
