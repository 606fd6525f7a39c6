"""Rows of a few routes times an expanded layer's matrices."""

import functools

import torch

from qsrt_runtime.ops.label_gemm import ptx
from qsrt_runtime.ops.label_gemm.kernel import label_gemm_kernel
from qsrt_runtime.ops.launch import dependent
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import COLUMNS, Workspace


def label_gemm(
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
    """As expert_gemm, for an expanded layer on CUDA; PLACES to a block."""
    hidden, held, experts = layer.geometry.hidden, 32 * len(layer.slots), layer.geometry.experts
    matrix, depth = (hidden, held) if down else (2 * held, hidden)
    gate_up, down_labels = layer.matrices()
    label_gemm_kernel[(workspace.programs,)](
        rows,
        (down_labels if down else gate_up).view(torch.int32),
        topk_ids,
        topk_ids if expert_map is None else expert_map,
        workspace.counts,
        workspace.block_experts,
        workspace.block_routes,
        workspace.partial,
        matrix_rows,
        experts if expert_map is None else len(expert_map),
        experts,
        ROWS=matrix,
        TILES=-(-matrix // COLUMNS),
        STEPS=depth // 64,
        DIVISOR=divisor,
        TOPK=topk_ids.shape[1],
        DOWN=down,
        SINGLE=len(topk_ids) == 1,
        HAS_MAP=expert_map is not None,
        LOAD=load(depth * 8),
        STEP=step(rows.dtype),
        PDL=pdl,
        num_warps=32,
        **dependent(pdl),
    )


load, step = functools.cache(ptx.load), functools.cache(ptx.step)
