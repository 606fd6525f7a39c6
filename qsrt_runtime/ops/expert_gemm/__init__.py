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
) -> None:
    """Partial sums of gate and up, or of down, to the workspace.

    rows: [n, H] or [n, I held], tiles in fragment order; route r's row is r // divisor, and for
    up matrix_rows further.   places: of a block of routes.
    """
    geometry, pairs = layer.geometry, len(layer.slots) // 8
    columns = min(COLUMNS, geometry.hidden) if down else COLUMNS
    width = WIDTH[rows.device.type]
    plain_kernel[(workspace.programs, -(-columns // width))](
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
