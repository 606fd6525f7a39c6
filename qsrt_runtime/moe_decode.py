"""moe_decode: the routed experts for a few tokens, in one to five launches on the stored bytes."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch

from qsrt_runtime.arguments import check_arguments
from qsrt_runtime.arithmetic import arithmetic_of
from qsrt_runtime.launching import check_call, check_compiled, compiled, ways
from qsrt_runtime.ops import fused
from qsrt_runtime.ops.activate import activate
from qsrt_runtime.ops.combine import combine
from qsrt_runtime.ops.expert_gemm import expert_gemm
from qsrt_runtime.ops.fused import alone
from qsrt_runtime.ops.fused.product import product
from qsrt_runtime.ops.fused.product.quantized import quantized_product
from qsrt_runtime.ops.fused.product.wide import wide
from qsrt_runtime.ops.group import group
from qsrt_runtime.ops.label_gemm import label_gemm
from qsrt_runtime.ops.prepare import prepare
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import FEW_TOKENS, MANY_PLACES, PLACES, Workspace, quantized

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
    activation: str = "a16",
) -> torch.Tensor:
    """The routed experts' output for up to MAX_TOKENS tokens, as moe_forward_reference, to out.

    x: [T, H] float16 or bfloat16.   out: [T, H] of x's type.   All contiguous.
    workspace: of this geometry, top-k and type. Nothing is allocated and nothing waited for, so
    that calls can be captured in graphs, after one outside with the same number of tokens, which
    compiles; without it RuntimeError. The same call gives the same bits every time.
    Differs from the reference: an id or map entry that names no expert gives nothing, as -1 does;
    workspace.invalid_routes() counts them. Rows are rounded to x's type before each product.
    activation: "a8" quantizes them instead, "auto" does what is quicker; see arithmetic.
    Raises ValueError for shapes, devices, strides or a workspace or out that do not fit, and for
    what "a8" does not take; TypeError for other dtypes; before any launch.
    """
    if layer.labels is not None and not takes_labels(x.device):
        raise ValueError(
            "moe_decode runs expanded layers on NVIDIA GPUs alone; moe_prefill runs them"
        )
    check_arguments(x, layer, topk_ids, topk_weights, expert_map)
    check_call(x, layer, topk_ids, topk_weights, expert_map, workspace, out, Workspace)
    arithmetic = arithmetic_of(activation, x, layer)
    tokens, topk = topk_ids.shape
    if not tokens or not topk:
        return out.zero_()
    kernels = (arithmetic, layer.geometry, layer.slots, layer.traits, x.dtype, x.device)
    kernels += (tokens, topk)
    kernels += (layer.atoms.shape[1], layer.shared_scales.shape[1], layer.labels is None)
    kernels += (topk_ids.dtype, topk_weights.dtype, weight_on_input)
    kernels += (None if expert_map is None else expert_map.dtype,)
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        check_compiled(kernels)
        launch = _launch_a8 if arithmetic == "a8" else _launch
        launch(x, layer, topk_ids, topk_weights, workspace, out, expert_map, weight_on_input)
    compiled.add(kernels)
    return out


def takes_labels(device: torch.device) -> bool:
    """Whether expanded layers run here, whose product is PTX."""
    return device.type == "cuda" and torch.version.hip is None


def places_of(layer: LayerWeights, topk_ids: torch.Tensor) -> int:
    """Routes of a block: MANY_PLACES where experts have MANY_ROWS on average."""
    tokens, topk = topk_ids.shape
    many = tokens > FEW_TOKENS and tokens * topk >= MANY_ROWS * layer.geometry.experts
    return MANY_PLACES if many and layer.traits.uniform and layer.labels is None else PLACES


def rows_of(layer: LayerWeights, topk_ids: torch.Tensor) -> tuple[int, int]:
    """How many routes share a rotated row, and how many rows stand between gate's and up's."""
    tokens, topk = topk_ids.shape
    divisor = 1 if layer.traits.inputs == 0 else topk
    return divisor, 0 if layer.traits.inputs == 1 else tokens * topk // divisor


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
    tokens = len(topk_ids)
    by_warps, pdl = ways(x.device)
    few = tokens <= FEW_TOKENS
    if by_warps and few and layer.labels is None:
        call = (layer, topk_ids, expert_map, topk_weights, weight_on_input, workspace, out, pdl)
        if alone.takes(layer, topk_ids, workspace.programs):
            return alone.alone(x, *call)
        if fused.takes(layer, topk_ids):
            prepare(x, layer, topk_ids, expert_map, workspace, pdl)
            return fused.fused(*call)
    before, after = (topk_weights, None) if weight_on_input else (None, topk_weights)
    routed = (layer, topk_ids, expert_map)
    divisor, up = rows_of(layer, topk_ids)
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


def _launch_a8(
    x: torch.Tensor,
    layer: LayerWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    workspace: Workspace,
    out: torch.Tensor,
    expert_map: torch.Tensor | None,
    weight_on_input: bool,
) -> None:
    pdl = ways(x.device)[1]
    before, after = (topk_weights, None) if weight_on_input else (None, topk_weights)
    routed = (layer, topk_ids, expert_map)
    divisor, up = rows_of(layer, topk_ids)
    gemm, kind = a8_product(layer, x.device)
    first, of_first = quantized(workspace.rotated, kind)
    second, of_second = quantized(workspace.middle, kind)
    if kind == torch.uint8:
        up_gemm, down_gemm = partial(gemm, exponents=of_first), partial(gemm, exponents=of_second)
    else:
        up_gemm = down_gemm = gemm
    prepare(x, *routed, workspace, pdl, kind)
    up_gemm(first, *routed, workspace, divisor, up, PLACES, down=False, pdl=pdl)
    activate(*routed, before, workspace, PLACES, pdl, kind)
    down_gemm(second, *routed, workspace, 1, 0, PLACES, down=True, pdl=pdl)
    combine(*routed, after, workspace, out, PLACES, pdl)


def a8_product(
    layer: LayerWeights, device: torch.device
) -> tuple[Callable[..., None], torch.dtype]:
    """The product of W4A8, and the kind of its rows, see workspace.quantized.

    sm_90's mma has no E4M3: ptxas makes products of float16 of it, in 385 instructions a step where
    bfloat16 takes 296. There W4A16's own product takes the rows' numbers in bfloat16, which holds
    them exactly. Others take bytes: sm_89 by warps where all pairs are of 3 bits, else the plain
    way.
    """
    if ways(device)[0]:
        return product, torch.bfloat16
    is_sm_89 = device.type == "cuda" and torch.cuda.get_device_capability(device) == (8, 9)
    by_warps = is_sm_89 and layer.traits.uniform
    return quantized_product if by_warps else expert_gemm, torch.uint8
