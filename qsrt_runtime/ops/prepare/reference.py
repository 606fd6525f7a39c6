"""The route map and the rotated rows in plain torch."""

import torch

from qsrt_runtime.format.rotation import rotate
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import PLACES


def map_routes_reference(experts: list[int]) -> tuple[list[int], list[list[int]], list[int]]:
    """Group routes into blocks of PLACES of one expert, in the order of their first routes.

    experts: of each route, -1 for none.
    Returns the expert of each block, its routes (-1 where empty), and of each route
    block PLACES + place, -1 for none.
    """
    block_experts: list[int] = []
    block_routes: list[list[int]] = []
    places, filling = [], {}
    for route, expert in enumerate(experts):
        if expert < 0:
            places.append(-1)
            continue
        block = filling.get(expert)
        if block is None or block_routes[block][-1] >= 0:
            block = filling[expert] = len(block_routes)
            block_experts.append(expert)
            block_routes.append([-1] * PLACES)
        place = block_routes[block].index(-1)
        block_routes[block][place] = route
        places.append(PLACES * block + place)
    return block_experts, block_routes, places


def rotate_rows_reference(
    x: torch.Tensor, layer: LayerWeights, experts: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """((x * suh) B) of gate and of up for every route: [R, H] float32 each.

    x: [T, H].   experts: of each route, none of them -1.
    """
    rows = x.float().repeat_interleave(len(experts) // len(x), 0)
    gate, up = (layer.shared_scales[matrix, experts].float() for matrix in (0, 1))
    return rotate(rows * gate), rotate(rows * up)
