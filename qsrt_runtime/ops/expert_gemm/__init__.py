"""Rows times an expert's stored matrices, for a few routes of each expert."""

import functools

import torch

from qsrt_runtime.format import codebook
from qsrt_runtime.ops.expert_gemm.kernel import plain_kernel
from qsrt_runtime.ops.expert_gemm.warps import ptx
from qsrt_runtime.ops.expert_gemm.warps.kernel import warps_kernel
from qsrt_runtime.ops.launch import dependent
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import COLUMNS, Workspace

SHARED_BYTES = 131072  # of the labels of 3 bits, which the warps' way keeps in shared memory
WIDTH = {"cuda": 128, "cpu": 256}  # columns of a program of the plain way
ARITHMETIC = 4  # of a lane's 16 pairs; best of 2 to 5 on an H200


def expert_gemm(
    rows: torch.Tensor,
    layer: LayerWeights,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    workspace: Workspace,
    divisor: int,
    matrix_rows: int,
    *,
    down: bool,
    warps: bool,
    pdl: bool,
) -> None:
    """Partial sums of gate and up, or of down, to the workspace.

    rows: [n, H] or [n, I held], tiles in fragment order; route r's row is r // divisor, and for
    up matrix_rows further.   warps: the way for GPUs with 227 KB of shared memory.
    """
    geometry, pairs = layer.geometry, len(layer.slots) // 8
    sizes = {
        "HIDDEN": geometry.hidden,
        "BUNDLE": geometry.bundle_bytes,
        "SLOT_STRIDE": layer.atoms.shape[1],
        "PAIRS": geometry.pairs,
        "TILES": -(-geometry.hidden // COLUMNS) if down else pairs,
        "STEPS": 4 * pairs if down else geometry.hidden // 64,
        "DIVISOR": divisor,
        "TOPK": topk_ids.shape[1],
        "SINGLE": len(topk_ids) == 1,
        "HAS_MAP": expert_map is not None,
        "DOWN": down,
        "UNIFORM": layer.traits.uniform,
        "PDL": pdl,
    }
    arguments = (
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
    )
    if not warps:
        width = WIDTH[rows.device.type]
        columns = min(COLUMNS, geometry.hidden) if down else COLUMNS
        grid = (workspace.programs, -(-columns // width))
        plain_kernel[grid](*arguments, **sizes, WIDTH=width, num_warps=8, **dependent(pdl))
        return
    is_bfloat16 = rows.dtype == torch.bfloat16
    compiled = warps_kernel[(workspace.programs,)](
        *arguments,
        **sizes,
        STEP=_step(is_bfloat16),
        PRODUCTS=_products(is_bfloat16),
        num_warps=32,
        **dependent(pdl),
    )
    if compiled.metadata.shared != SHARED_BYTES:
        raise RuntimeError(
            f"this Triton sets {compiled.metadata.shared} bytes of shared memory aside, expected "
            f"{SHARED_BYTES}; use another version"
        )


_step = functools.cache(functools.partial(ptx.step, ARITHMETIC))
_products = functools.cache(ptx.products)


@functools.cache
def labels(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The value of every state at 2, 3 and 4 bits: [3, 65536] in a type that holds it exactly."""
    return torch.stack([codebook.values(bits) for bits in codebook.BITS]).to(dtype).to(device)
