"""The output of a few tokens from the sums of down."""

import torch

from qsrt_runtime.ops.combine.kernel import combine_kernel
from qsrt_runtime.ops.launch import dependent
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import COLUMNS, Workspace

ROTATED = 2  # routes at once, where each is rotated by itself


def combine(
    layer: LayerWeights,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    weights: torch.Tensor | None,
    workspace: Workspace,
    out: torch.Tensor,
    places: int,
    pdl: bool,
) -> None:
    """Sum each token's routes, rotate and scale.

    weights: [T, k], factors of the routes' results, or None.   out: [T, H], contiguous.
    places: of a block of routes.
    """
    hidden, experts, topk = layer.geometry.hidden, layer.geometry.experts, topk_ids.shape[1]
    choices, by_route = 1 << (topk - 1).bit_length(), layer.traits.inputs == 0
    combine_kernel[(len(out), -(-hidden // 256))](
        workspace.partial,
        layer.shared_scales[2],
        layer.activations if weights is None else weights,
        topk_ids,
        topk_ids if expert_map is None else expert_map,
        workspace.counts,
        workspace.block_experts,
        workspace.route_places,
        out,
        workspace.programs,
        experts if expert_map is None else len(expert_map),
        experts,
        HIDDEN=hidden,
        SCALE_ROWS=layer.shared_scales.shape[1],
        TILES=-(-hidden // COLUMNS),
        STEPS=len(layer.slots) // 2,
        TOPK=topk,
        CHOICES=choices,
        CHUNK=min(choices, ROTATED) if by_route else choices,
        BY_ROUTE=by_route,
        WEIGH=weights is not None,
        PLACES=places,
        SINGLE=len(topk_ids) == 1,
        PARTS=8 if len(topk_ids) == 1 else 2,
        HAS_MAP=expert_map is not None,
        PDL=pdl,
        num_warps=4,
        **dependent(pdl),
    )
