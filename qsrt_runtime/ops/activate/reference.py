"""Sums of gate and up to the rows that down receives, in plain torch."""

import torch

from qsrt_runtime.format.geometry import RECORD, SLOTS_PER_PAIR
from qsrt_runtime.format.manifest import ACTIVATIONS
from qsrt_runtime.format.rotation import rotate
from qsrt_runtime.format.slab import unpack_expert
from qsrt_runtime.moe_reference import activation_reference
from qsrt_runtime.weights import LayerWeights


def activate_reference(
    sums: torch.Tensor, layer: LayerWeights, expert: int, order: list[int], weights: torch.Tensor
) -> torch.Tensor:
    """((act(g, u) * suh2) B): [n, I held] float32, of each pair of slots 8 slots of 32 channels.

    sums: [n, 512 held pairs] as gate_up_reference.   order: its in_slot_order.
    weights: [n], factors of g and u.
    """
    coded, found = unpack_expert(layer, expert), []
    name = ACTIVATIONS[int(layer.activations[expert])]
    for place, i in enumerate(order):
        channels = slice(2 * RECORD * i, 2 * RECORD * (i + 1))
        gate, up = rotate(sums[:, 512 * place : 512 * (place + 1)]).split(256, 1)
        gate = gate * coded.w1.svh[channels].float() * weights[:, None]
        up = up * coded.w3.svh[channels].float() * weights[:, None]
        middle = rotate(activation_reference(name, gate, up) * coded.w2.suh[channels].float())
        by_slot = middle.unflatten(1, (2, SLOTS_PER_PAIR, 16)).transpose(1, 2)
        found.append(by_slot.flatten(1))
    return torch.cat(found, 1)
