"""Sort many tokens' routes by expert, and rotate their rows."""

import torch

from qsrt_runtime.ops.group.kernel import group_kernel
from qsrt_runtime.ops.launch import dependent
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import PrefillWorkspace, Workspace

BLOCKS = 2  # Hadamard blocks of a program
WARPS = 32  # of a program where each rotates a block: sorting waits for memory, a little at each
ROUTES = 4096  # looked at at once


def group(
    x: torch.Tensor,
    layer: LayerWeights,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    workspace: Workspace | PrefillWorkspace,
    block: int,
    by_warps: bool,
    pdl: bool,
) -> None:
    """Fill the workspace's map of routes and rotated rows.

    x: [T, H], topk_ids: [T, k], contiguous; a value that names no expert takes part in nothing,
    and is counted unless it is -1.   block: routes of a block.
    Rows are in fragment order for moe_decode, in word order for moe_prefill.
    by_warps: see launching.ways.
    """
    decodes = isinstance(workspace, Workspace)
    order = workspace.block_routes if decodes else workspace.order
    tokens, topk = topk_ids.shape
    hidden, experts = layer.geometry.hidden, layer.geometry.experts
    by_route = layer.traits.inputs == 0
    rows = tokens * topk if by_route else tokens
    programs = (
        -(-rows * (hidden // 128) // WARPS) if by_warps else rows * -(-hidden // (128 * BLOCKS))
    )
    group_kernel[(1 + programs,)](
        x,
        layer.shared_scales,
        topk_ids,
        topk_ids if expert_map is None else expert_map,
        workspace.rotated,
        workspace.counts,
        workspace.first_block,
        workspace.cursors,
        workspace.block_experts,
        order,
        workspace.route_places if decodes else order,
        rows,
        tokens * topk,
        experts if expert_map is None else len(expert_map),
        experts,
        HIDDEN=hidden,
        SCALE_ROWS=layer.shared_scales.shape[1],
        TOPK=topk,
        BY_ROUTE=by_route,
        INPUTS=2 if by_route else layer.traits.inputs,
        BLOCKS=BLOCKS,
        EXPERTS=1 << (experts - 1).bit_length(),
        ROUTES=group_size(tokens * topk),
        BLOCK=block,
        BY_WORD=not decodes,
        HAS_PLACES=decodes,
        WARPS=WARPS if by_warps else 0,
        HAS_MAP=expert_map is not None,
        PDL=pdl,
        num_warps=WARPS if by_warps else 4,
        **dependent(pdl),
    )


def group_size(routes: int) -> int:
    """How many routes are looked at at once."""
    return min(ROUTES, 1 << (routes - 1).bit_length())
