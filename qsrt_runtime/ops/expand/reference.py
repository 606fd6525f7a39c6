"""An expert's stored matrices as labels' values, in plain torch."""

import torch

from qsrt_runtime.format.decode import record_tiles
from qsrt_runtime.format.geometry import RECORD, SLOTS_PER_PAIR
from qsrt_runtime.format.slab import unpack_expert
from qsrt_runtime.weights import LayerWeights


def expand_reference(
    layer: LayerWeights, expert: int, order: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """T1 and T3 together, [2 I held, H], and T2, [H, I held]; float32, tiles in channel order.

    order: of the held pairs, in_slot_order. A pair's rows of the first are gate's low and high
    record, then up's; its columns of the second are 8 slots of 32 channels.
    """
    coded = unpack_expert(layer, expert)
    rows, columns = [], []
    for i in order:
        sides = range(2 * i, 2 * i + 2)
        rows += [record_tiles(m.records[s], "out").T for m in (coded.w1, coded.w3) for s in sides]
        down = torch.stack([record_tiles(coded.w2.records[s], "in") for s in sides])
        by_slot = down.unflatten(1, (SLOTS_PER_PAIR, 16)).transpose(0, 1)
        columns.append(by_slot.reshape(2 * RECORD, -1).T)
    return torch.cat(rows), torch.cat(columns, 1)
