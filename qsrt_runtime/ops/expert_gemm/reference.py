"""Rows times an expert's stored trellis in plain torch, columns as the kernels have them."""

import torch

from qsrt_runtime.format.decode import record_tiles
from qsrt_runtime.format.geometry import RECORD, SLOTS_PER_PAIR
from qsrt_runtime.format.slab import expert_pairs, unpack_expert
from qsrt_runtime.weights import LayerWeights


def gate_up_reference(
    gate: torch.Tensor, up: torch.Tensor, layer: LayerWeights, expert: int
) -> torch.Tensor:
    """Rows times T1 and T3: [n, 512 held pairs] float32, of each pair in its place on the slots.

    gate, up: [n, H] float32.   A pair's columns: gate's low and high record, then up's.
    """
    coded = unpack_expert(layer, expert)
    return torch.cat(
        [
            rows @ record_tiles(matrix.records[2 * i + side], "out")
            for i in in_slot_order(layer, expert)
            for rows, matrix in ((gate, coded.w1), (up, coded.w3))
            for side in (0, 1)
        ],
        1,
    )


def down_reference(rows: torch.Tensor, layer: LayerWeights, expert: int) -> torch.Tensor:
    """Rows [n, I held] times T2: [n, H] float32; channels as activate_reference leaves them."""
    records = unpack_expert(layer, expert).w2.records
    total = torch.zeros(len(rows), layer.geometry.hidden, device=rows.device)
    for place, i in enumerate(in_slot_order(layer, expert)):
        both = rows[:, 2 * RECORD * place : 2 * RECORD * (place + 1)]
        both = both.unflatten(1, (SLOTS_PER_PAIR, 2, 16)).transpose(1, 2).flatten(2)
        for side in (0, 1):
            total += both[:, side] @ record_tiles(records[2 * i + side], "in")
    return total


def in_slot_order(layer: LayerWeights, expert: int) -> list[int]:
    """Which of an expert's held pairs, by place in expert_pairs, stands in each pair of slots."""
    pairs, shift = expert_pairs(layer, expert), layer.geometry.pair_shift(layer.layer, expert)
    places = [(pair + shift) % layer.geometry.pairs for pair in pairs]
    return sorted(range(len(pairs)), key=places.__getitem__)
