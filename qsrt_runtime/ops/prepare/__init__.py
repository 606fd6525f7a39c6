"""Group a few tokens' routes by expert, and rotate their rows."""

import torch

from qsrt_runtime.ops.launch import dependent
from qsrt_runtime.ops.prepare.kernel import prepare_kernel
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import Workspace, quantized

BLOCKS = 2  # Hadamard blocks of a program


def prepare(
    x: torch.Tensor,
    layer: LayerWeights,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    workspace: Workspace,
    pdl: bool,
    a8: torch.dtype | None = None,
) -> None:
    """Fill the workspace's route map and rotated rows.

    x: [T, H], rows contiguous.   topk_ids: [T, k], contiguous; a value that names no expert takes
    part in nothing, and is counted unless it is -1.   a8: the kind of quantized rows, if they are
    to be, see workspace.quantized.
    """
    tokens, topk = topk_ids.shape
    hidden, experts = layer.geometry.hidden, layer.geometry.experts
    by_route = layer.traits.inputs == 0
    rows = tokens * topk if by_route else tokens
    parts = -(-hidden // (128 * BLOCKS))
    rotated, exponents = workspace.rotated, workspace.rotated
    if a8:
        rotated, exponents = quantized(workspace.rotated, a8)
    prepare_kernel[(1 + rows * parts,)](
        x,
        layer.shared_scales,
        topk_ids,
        topk_ids if expert_map is None else expert_map,
        rotated,
        exponents,
        workspace.counts,
        workspace.block_experts,
        workspace.block_routes,
        workspace.route_places,
        workspace.scratch,
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
        ROUTES=max(16, 1 << (tokens * topk - 1).bit_length()),
        SINGLE=tokens == 1,
        HAS_MAP=expert_map is not None,
        QUANTIZED=a8 is not None,
        PDL=pdl,
        num_warps=4,
        **dependent(pdl),
    )
