"""Rows times an expert's stored matrices by warps, for a few routes of each expert."""

import functools

import torch

from qsrt_runtime.ops.fused.product import ptx
from qsrt_runtime.ops.fused.product.kernel import product_kernel
from qsrt_runtime.ops.launch import dependent, labels
from qsrt_runtime.ops.warps import check_shared
from qsrt_runtime.ops.warps.ptx import BY_ARITHMETIC
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import COLUMNS, Workspace

SHARED_BYTES = 131072  # of the labels of 3 bits


def arithmetic_pairs(layer: LayerWeights, topk_ids: torch.Tensor) -> tuple[int, ...]:
    """Which of a lane's pairs are decoded by arithmetic: of those tried on an H200 the best, or
    within 1 % of it.

    Where blocks have several routes, loading their rows leaves less room for reading labels.
    """
    several = topk_ids.numel() >= 2 * layer.geometry.experts
    return BY_ARITHMETIC[5 if several else 4]


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
        STEP=step(arithmetic_pairs(layer, topk_ids), rows.dtype == torch.bfloat16),
        PRODUCTS=products(rows.dtype == torch.bfloat16),
        PDL=pdl,
        num_warps=32,
        **dependent(pdl),
    )
    check_shared(compiled.metadata.shared, SHARED_BYTES)


step = functools.cache(ptx.step)
products = functools.cache(ptx.products)
