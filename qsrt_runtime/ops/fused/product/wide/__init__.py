"""Rows times an expert's stored matrices by warps, for more routes of each expert."""

import functools

import torch

from qsrt_runtime.ops.fused.product import SHARED_BYTES, ptx
from qsrt_runtime.ops.fused.product.wide.kernel import wide_kernel
from qsrt_runtime.ops.launch import dependent, labels
from qsrt_runtime.ops.warps import check_shared
from qsrt_runtime.ops.warps.ptx import BY_ARITHMETIC
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import COLUMNS, Workspace

ARITHMETIC = BY_ARITHMETIC[4]  # not measured here beside others


def wide(
    rows: torch.Tensor,
    layer: LayerWeights,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    workspace: Workspace,
    divisor: int,
    matrix_rows: int,
    places: int,
    *,
    down: bool,
    pdl: bool,
) -> None:
    """As product, MANY_PLACES to a block; for layers whose pairs are all of 3 bits."""
    geometry, pairs = layer.geometry, len(layer.slots) // 8
    is_bfloat16 = rows.dtype == torch.bfloat16
    compiled = wide_kernel[(workspace.programs,)](
        rows,
        layer.atoms.view(torch.int32),
        labels(rows.dtype, rows.device),
        workspace.counts,
        workspace.block_experts,
        workspace.block_routes,
        workspace.partial,
        layer.layer,
        matrix_rows,
        HIDDEN=geometry.hidden,
        BUNDLE=geometry.bundle_bytes,
        SLOT_STRIDE=layer.atoms.shape[1],
        TILES=-(-geometry.hidden // COLUMNS) if down else pairs,
        STEPS=4 * pairs if down else geometry.hidden // 64,
        DIVISOR=divisor,
        DOWN=down,
        PLACES=places,
        STEP2=step(is_bfloat16, 2),
        STEP4=step(is_bfloat16, 4),
        PDL=pdl,
        num_warps=32,
        **dependent(pdl),
    )
    check_shared(compiled.metadata.shared, SHARED_BYTES)


step = functools.cache(functools.partial(ptx.wide_step, ARITHMETIC))
