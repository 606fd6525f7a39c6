"""Quantized rows times an expert's stored matrices by warps, for a few routes of each expert."""

import functools

import torch

from qsrt_runtime.ops.fused.product.quantized import ptx
from qsrt_runtime.ops.fused.product.quantized.kernel import quantized_kernel
from qsrt_runtime.ops.launch import dependent, labels
from qsrt_runtime.ops.warps import check_shared
from qsrt_runtime.ops.warps.ptx import BY_ARITHMETIC, copy
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import COLUMNS, Workspace

SHARED_BYTES = 65536  # of the labels of 3 bits
ARITHMETIC = BY_ARITHMETIC[4]  # what is best for halves, not measured here


def quantized_product(
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
    exponents: torch.Tensor,
) -> None:
    """As expert_gemm of bytes, for GPUs in ptx.LABELS and layers with all pairs of 3 bits."""
    geometry, pairs = layer.geometry, len(layer.slots) // 8
    first = ptx.LABELS[torch.cuda.get_device_capability(rows.device)]
    compiled = quantized_kernel[(workspace.programs,)](
        rows,
        exponents,
        layer.atoms.view(torch.int32),
        labels(torch.float8_e4m3fn, rows.device).view(torch.uint8),
        topk_ids,
        topk_ids if expert_map is None else expert_map,
        workspace.counts,
        workspace.block_experts,
        workspace.block_routes,
        workspace.partial,
        layer.layer,
        matrix_rows,
        geometry.experts if expert_map is None else len(expert_map),
        geometry.experts,
        HIDDEN=geometry.hidden,
        BUNDLE=geometry.bundle_bytes,
        SLOT_STRIDE=layer.atoms.shape[1],
        TILES=-(-geometry.hidden // COLUMNS) if down else pairs,
        STEPS=4 * pairs if down else geometry.hidden // 64,
        DIVISOR=divisor,
        TOPK=topk_ids.shape[1],
        DOWN=down,
        SINGLE=len(topk_ids) == 1,
        HAS_MAP=expert_map is not None,
        COPY=copy(first),
        STEP=step(ARITHMETIC, first),
        PDL=pdl,
        num_warps=32,
        **dependent(pdl),
    )
    check_shared(compiled.metadata.shared, SHARED_BYTES)


step = functools.cache(ptx.step)
