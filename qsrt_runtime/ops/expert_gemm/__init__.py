"""Rows times an expert's stored matrices, for a few routes of each expert."""

import torch

from qsrt_runtime.ops.expert_gemm.kernel import plain_kernel
from qsrt_runtime.ops.launch import dependent, labels
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import COLUMNS, Workspace

WIDTH = {"cuda": 128, "cpu": 256}  # columns of a program


def expert_gemm(
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
    exponents: torch.Tensor | None = None,
) -> None:
    """Partial sums of gate and up, or of down, to the workspace.

    rows: [n, H] or [n, I held], tiles in fragment order; route r's row is r // divisor, and for
    up matrix_rows further.   places: of a block of routes.
    exponents: of rows that are quantized, which are bytes then; see workspace.quantized.
    """
    geometry, pairs = layer.geometry, len(layer.slots) // 8
    columns = min(COLUMNS, geometry.hidden) if down else COLUMNS
    width = WIDTH[rows.device.type]
    plain_kernel[(workspace.programs, -(-columns // width))](
        rows,
        rows if exponents is None else exponents,
        layer.atoms.view(torch.int32),
        _labels(rows),
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
        PLACES=places,
        SINGLE=len(topk_ids) == 1,
        HAS_MAP=expert_map is not None,
        DOWN=down,
        UNIFORM=layer.traits.uniform,
        WIDTH=width,
        PDL=pdl,
        num_warps=8,
        **dependent(pdl),
    )


def _labels(rows: torch.Tensor) -> torch.Tensor:
    """The labels that a product with these rows takes: the interpreter has none of E4M3."""
    if rows.dtype != torch.uint8:
        return labels(rows.dtype, rows.device)
    if rows.is_cuda:
        return labels(torch.float8_e4m3fn, rows.device).view(torch.uint8)
    return labels(torch.float32, rows.device)
