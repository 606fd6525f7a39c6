"""Rows times an expert's stored matrices by warps, for a few routes of each expert."""

import functools

import torch

from qsrt_runtime.ops.fused.product import ptx
from qsrt_runtime.ops.fused.product.kernel import product_kernel
from qsrt_runtime.ops.fused.product.wide import wide_kernel
from qsrt_runtime.ops.launch import dependent, labels
from qsrt_runtime.ops.warps import check_shared
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import COLUMNS, Workspace

SHARED_BYTES = 131072  # of the labels of 3 bits
ARITHMETIC = 4  # of a lane's 16 pairs; best of 2 to 5 on an H200


def product(
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
    """As expert_gemm, on GPUs whose multiprocessors have 227 KB to share, PLACES to a block."""
    geometry, pairs = layer.geometry, len(layer.slots) // 8
    compiled = product_kernel[(workspace.programs,)](
        rows,
        layer.atoms.view(torch.int32),
        labels(rows.dtype, rows.device),
        layer.format_codes,
        topk_ids,
        topk_ids if expert_map is None else expert_map,
        workspace.counts,
        workspace.block_experts,
        workspace.block_routes,
        workspace.partial,
        layer.layer,
        layer.slots.start // 8,
        matrix_rows,
        geometry.experts if expert_map is None else len(expert_map),
        geometry.experts,
        HIDDEN=geometry.hidden,
        BUNDLE=geometry.bundle_bytes,
        SLOT_STRIDE=layer.atoms.shape[1],
        PAIRS=geometry.pairs,
        TILES=-(-geometry.hidden // COLUMNS) if down else pairs,
        STEPS=4 * pairs if down else geometry.hidden // 64,
        DIVISOR=divisor,
        TOPK=topk_ids.shape[1],
        DOWN=down,
        UNIFORM=layer.traits.uniform,
        SINGLE=len(topk_ids) == 1,
        HAS_MAP=expert_map is not None,
        STEP=step(rows.dtype == torch.bfloat16),
        PRODUCTS=products(rows.dtype == torch.bfloat16),
        PDL=pdl,
        num_warps=32,
        **dependent(pdl),
    )
    check_shared(compiled.metadata.shared, SHARED_BYTES)


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
        STEP2=wide_step(is_bfloat16, 2),
        STEP4=wide_step(is_bfloat16, 4),
        PDL=pdl,
        num_warps=32,
        **dependent(pdl),
    )
    check_shared(compiled.metadata.shared, SHARED_BYTES)


step = functools.cache(functools.partial(ptx.step, ARITHMETIC))
wide_step = functools.cache(functools.partial(ptx.wide_step, ARITHMETIC))
products = functools.cache(ptx.products)
