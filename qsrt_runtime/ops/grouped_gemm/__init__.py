"""Rows times some experts' expanded matrices."""

import functools

import torch

from qsrt_runtime.ops.grouped_gemm import ptx
from qsrt_runtime.ops.grouped_gemm.kernel import grouped_gemm_kernel
from qsrt_runtime.ops.kernel import INTERPRETED
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import PrefillWorkspace


def tiles(block: int, by_warps: bool) -> tuple[int, int, int, int]:
    """A tile's rows of the weights, its warps, its stages, and the programs on a multiprocessor.

    As measured on an H200, see tests/bench/results/prefill_h200.txt; other GPUs have less memory to
    share, see test_compile.py.
    """
    if block <= 16:
        return 128, 4, 5, 4
    if block < 128:
        return 256, 8, 4, 2
    return 256, 16 if by_warps else 8, 4, 1


def grouped_gemm(
    rows: torch.Tensor,
    layer: LayerWeights,
    experts: range,
    workspace: PrefillWorkspace,
    divisor: int,
    matrix_rows: int,
    block: int,
    *,
    down: bool,
    by_warps: bool,
) -> None:
    """Sums of gate and up, or of down, of the routes of a range of experts, to the workspace.

    rows: [n, H] or [n, I held], in word order; route r's row is r // divisor, and for
    up matrix_rows further.   The scratch holds the experts' matrices.   block: routes of a block.
    by_warps: see launching.ways.
    """
    hidden, held = layer.geometry.hidden, 32 * len(layer.slots)
    width, warps, stages, programs = tiles(block, by_warps)
    grouped_gemm_kernel[(programs * workspace.multiprocessors,)](
        rows,
        workspace.scratch.view(torch.int32),
        workspace.first_block,
        workspace.block_experts,
        workspace.order,
        workspace.down_sums if down else workspace.sums,
        experts.start,
        experts.stop,
        matrix_rows,
        ROWS=hidden if down else 2 * held,
        DEPTH=held if down else hidden,
        DIVISOR=divisor,
        DOWN=down,
        BLOCK=block,
        WIDTH=width,
        GROUP=8,
        **converts(rows.dtype),
        STAGES=stages,
        num_warps=warps,
    )


@functools.cache
def converts(dtype: torch.dtype) -> dict[str, str | None]:
    """How the kernel makes rows' type of a word's four labels: PTX, None where there is none."""
    is_plain = INTERPRETED or torch.version.hip is not None
    return {f"CONVERT{i}": None if is_plain else ptx.convert(i, dtype) for i in range(4)}
