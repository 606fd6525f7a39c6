"""moe_prefill: the routed experts for many tokens; each weight is decoded once for all its rows."""

from contextlib import nullcontext

import torch

from qsrt_runtime.arguments import check_arguments
from qsrt_runtime.launching import check_call, check_compiled, compiled, ways
from qsrt_runtime.ops.activate_routes import activate_routes
from qsrt_runtime.ops.combine_routes import combine_routes
from qsrt_runtime.ops.expand import expand
from qsrt_runtime.ops.group import group, group_size
from qsrt_runtime.ops.grouped_gemm import grouped_gemm
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import MAX_BLOCK, MIN_BLOCK, PrefillWorkspace


def moe_prefill(
    x: torch.Tensor,
    layer: LayerWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    workspace: PrefillWorkspace,
    out: torch.Tensor,
    *,
    expert_map: torch.Tensor | None = None,
    weight_on_input: bool = False,
) -> torch.Tensor:
    """The routed experts' output for many tokens, as moe_forward_reference, to out.

    Arguments, errors and promises as moe_decode's. Some experts at a time are decoded to E4M3
    labels, in the workspace's scratch; their routes' rows are then multiplied by these. An expanded
    layer has them already. Besides moe_decode's roundings, bfloat16 rows have down's sums rounded
    to bfloat16.
    """
    check_arguments(x, layer, topk_ids, topk_weights, expert_map)
    check_call(x, layer, topk_ids, topk_weights, expert_map, workspace, out, PrefillWorkspace)
    if layer.traits.inputs != workspace.inputs and workspace.inputs:
        raise ValueError(
            f"the layer's traits have {layer.traits.inputs} inputs; the workspace is for "
            f"{workspace.inputs}"
        )
    if layer.labels is None and not len(workspace.scratch):
        raise ValueError("the workspace has no scratch, and is for expanded layers alone")
    tokens, topk = topk_ids.shape
    if not tokens or not topk:
        return out.zero_()
    block = block_size(layer, tokens * topk)
    kernels = ("prefill", layer.geometry, layer.slots, layer.traits, x.dtype, x.device, topk)
    kernels += (block, group_size(tokens * topk), layer.atoms.shape[1], layer.labels is None)
    kernels += (len(_shares(layer, workspace, down=True)) > 1,)  # of which the first is another
    kernels += (layer.shared_scales.shape[1], topk_ids.dtype, topk_weights.dtype, weight_on_input)
    kernels += (None if expert_map is None else expert_map.dtype,)
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        check_compiled(kernels)
        _launch(x, layer, topk_ids, topk_weights, workspace, out, expert_map, weight_on_input)
    compiled.add(kernels)
    return out


def block_size(layer: LayerWeights, routes: int) -> int:
    """Routes of a block of the products: an expert's average, rounded up to a power of two."""
    average = -(-routes // layer.geometry.experts)
    return min(MAX_BLOCK, max(MIN_BLOCK, 1 << (average - 1).bit_length()))


def _launch(
    x: torch.Tensor,
    layer: LayerWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    workspace: PrefillWorkspace,
    out: torch.Tensor,
    expert_map: torch.Tensor | None,
    weight_on_input: bool,
) -> None:
    tokens, topk = topk_ids.shape
    before, after = (topk_weights, None) if weight_on_input else (None, topk_weights)
    divisor = 1 if layer.traits.inputs == 0 else topk
    up = 0 if layer.traits.inputs == 1 else tokens * topk // divisor  # rows from gate's to up's
    block, (by_warps, beside) = block_size(layer, tokens * topk), ways(x.device)
    group(x, layer, topk_ids, expert_map, workspace, block, by_warps, pdl=False)
    for experts in _shares(layer, workspace, down=False):
        labels = _labels(layer, experts, workspace, down=False, by_warps=by_warps, beside=False)
        routes = (layer, experts, labels, workspace, divisor, up, block)
        grouped_gemm(workspace.rotated, *routes, down=False, by_warps=by_warps)
    beside = by_warps and beside and layer.labels is None  # of an expansion
    for experts in _shares(layer, workspace, down=True):
        is_first = experts.start == 0
        options = {"by_warps": by_warps, "beside": beside and is_first}
        labels = _labels(layer, experts, workspace, down=True, **options)
        if is_first:
            activate_routes(layer, topk_ids, expert_map, before, workspace, **options)
        routes = (layer, experts, labels, workspace, 1, 0, block)
        grouped_gemm(workspace.middle, *routes, down=True, by_warps=by_warps)
    combine_routes(layer, topk_ids, expert_map, after, workspace, out, by_warps)


def _labels(
    layer: LayerWeights,
    experts: range,
    workspace: PrefillWorkspace,
    *,
    down: bool,
    by_warps: bool,
    beside: bool,
) -> torch.Tensor:
    """Of a share's matrices: the layer's own, or decoded to the scratch."""
    if layer.labels is not None:
        return layer.matrices()[down]
    buffers = (workspace.first_block, workspace.scratch)
    expand(layer, experts, *buffers, down=down, by_warps=by_warps, beside=beside)
    return workspace.scratch


def _shares(layer: LayerWeights, workspace: PrefillWorkspace, *, down: bool) -> list[range]:
    """The experts in runs of about one length, whose matrices the scratch has room for.

    All in one where the layer is expanded.
    """
    experts, held = layer.geometry.experts, 32 * len(layer.slots)
    if layer.labels is not None:
        return [range(experts)]
    most = len(workspace.scratch) // ((1 if down else 2) * held * layer.geometry.hidden)
    each = -(-experts // -(-experts // most))
    return [range(first, min(first + each, experts)) for first in range(0, experts, each)]
