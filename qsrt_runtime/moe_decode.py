"""moe_decode: the routed experts for a few tokens, in one to five launches on the stored bytes."""

from contextlib import nullcontext

import torch

from qsrt_runtime.arguments import check_arguments
from qsrt_runtime.launching import check_call, check_compiled, compiled, ways
from qsrt_runtime.ops.activate import activate
from qsrt_runtime.ops.combine import combine
from qsrt_runtime.ops.expert_gemm import expert_gemm
from qsrt_runtime.ops.fused import fused, is_small, makes_rows
from qsrt_runtime.ops.fused.product import product
from qsrt_runtime.ops.fused.product.wide import wide
from qsrt_runtime.ops.group import group
from qsrt_runtime.ops.label_gemm import label_gemm
from qsrt_runtime.ops.prepare import prepare
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import FEW_TOKENS, MANY_PLACES, PLACES, Workspace

MANY_ROWS = 6  # of an expert on average; on an H200, see tests/bench/results/prefill_h200.txt


def moe_decode(
    x: torch.Tensor,
    layer: LayerWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    workspace: Workspace,
    out: torch.Tensor,
    *,
    expert_map: torch.Tensor | None = None,
    weight_on_input: bool = False,
) -> torch.Tensor:
    """The routed experts' output for up to MAX_TOKENS tokens, as moe_forward_reference, to out.

    x: [T, H] float16 or bfloat16.   out: [T, H] of x's type.   All contiguous.
    workspace: of this geometry, top-k and type. Nothing is allocated and nothing waited for, so
    that calls can be captured in graphs, after one outside with the same number of tokens, which
    compiles; without it RuntimeError. The same call gives the same bits every time.
    Differs from the reference: an id or map entry that names no expert gives nothing, as -1 does;
    workspace.invalid_routes() counts them. Rows are rounded to x's type before each product.
    Raises ValueError for shapes, devices, strides or a workspace or out that do not fit, TypeError
    for other dtypes, before any launch.
    """
    if layer.labels is not None and not x.is_cuda:
        raise ValueError("moe_decode runs expanded layers on CUDA alone; moe_prefill runs them")
    check_arguments(x, layer, topk_ids, topk_weights, expert_map)
    check_call(x, layer, topk_ids, topk_weights, expert_map, workspace, out)
    tokens, topk = topk_ids.shape
    if not tokens or not topk:
        return out.zero_()
    kernels = (layer.geometry, layer.slots, layer.traits, x.dtype, x.device, tokens, topk)
    kernels += (layer.atoms.shape[1], layer.shared_scales.shape[1], layer.labels is None)
    kernels += (topk_ids.dtype, topk_weights.dtype, weight_on_input)
    kernels += (None if expert_map is None else expert_map.dtype,)
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        check_compiled(kernels)
        _launch(x, layer, topk_ids, topk_weights, workspace, out, expert_map, weight_on_input)
    compiled.add(kernels)
    return out


def places_of(layer: LayerWeights, topk_ids: torch.Tensor) -> int:
    """Routes of a block: MANY_PLACES where experts have MANY_ROWS on average."""
    tokens, topk = topk_ids.shape
    many = tokens > FEW_TOKENS and tokens * topk >= MANY_ROWS * layer.geometry.experts
    return MANY_PLACES if many and layer.traits.uniform and layer.labels is None else PLACES


def _launch(
    x: torch.Tensor,
    layer: LayerWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    workspace: Workspace,
    out: torch.Tensor,
    expert_map: torch.Tensor | None,
    weight_on_input: bool,
) -> None:
    tokens, topk = topk_ids.shape
    by_warps, pdl = ways(x.device)
    few = tokens <= FEW_TOKENS
    if by_warps and few and layer.labels is None and is_small(layer, topk_ids):
        if not makes_rows(layer, tokens):
            prepare(x, layer, topk_ids, expert_map, workspace, pdl)
        fused(x, layer, topk_ids, expert_map, topk_weights, weight_on_input, workspace, out, pdl)
        return
    before, after = (topk_weights, None) if weight_on_input else (None, topk_weights)
    routed = (layer, topk_ids, expert_map)
    by_route = layer.traits.inputs == 0
    divisor = 1 if by_route else topk
    up = 0 if layer.traits.inputs == 1 else tokens * topk // divisor  # rows from gate's to up's
    places = places_of(layer, topk_ids)
    gemm = expert_gemm
    if layer.labels is not None:
        gemm = label_gemm
    elif by_warps:
        gemm = product if places == PLACES else wide
    if few:
        prepare(x, *routed, workspace, pdl)
    else:
        group(x, *routed, workspace, places, by_warps, pdl)
    gemm(workspace.rotated, *routed, workspace, divisor, up, places, down=False, pdl=pdl)
    activate(*routed, before, workspace, places, pdl)
    gemm(workspace.middle, *routed, workspace, 1, 0, places, down=True, pdl=pdl)
    combine(*routed, after, workspace, out, places, pdl)
