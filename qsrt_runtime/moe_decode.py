"""moe_decode: the routed experts for a few tokens, in one to five launches on the stored bytes."""

import functools
from contextlib import nullcontext

import torch

from qsrt_runtime.arguments import check_arguments
from qsrt_runtime.ops.activate import activate
from qsrt_runtime.ops.combine import combine
from qsrt_runtime.ops.expert_gemm import expert_gemm
from qsrt_runtime.ops.fused import fused, is_small, makes_rows
from qsrt_runtime.ops.fused.product import product
from qsrt_runtime.ops.kernel import INTERPRETED
from qsrt_runtime.ops.prepare import prepare
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import MAX_TOKENS, Workspace, make_workspace

DTYPES = (torch.float16, torch.bfloat16)


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
    """The routed experts' output for up to 16 tokens, as moe_forward_reference, to out.

    x: [T, H] float16 or bfloat16.   out: [T, H] of x's type.   All contiguous.
    workspace: of this geometry, top-k and type. Nothing is allocated and nothing waited for, so
    that calls can be captured in graphs, after one outside with the same number of tokens, which
    compiles; without it RuntimeError. The same call gives the same bits every time.
    Differs from the reference: an id or map entry that names no expert gives nothing, as -1 does;
    workspace.invalid_routes() counts them. Rows are rounded to x's type before each product.
    Raises ValueError for shapes, devices, strides or a workspace or out that do not fit, TypeError
    for other dtypes, before any launch.
    """
    check_arguments(x, layer, topk_ids, topk_weights, expert_map)
    _check(x, layer, topk_ids, topk_weights, expert_map, workspace, out)
    tokens, topk = topk_ids.shape
    if not tokens or not topk:
        return out.zero_()
    kernels = (layer.geometry, layer.slots, layer.traits, x.dtype, x.device, tokens, topk)
    kernels += (layer.atoms.shape[1], layer.shared_scales.shape[1])
    kernels += (topk_ids.dtype, topk_weights.dtype, weight_on_input)
    kernels += (None if expert_map is None else expert_map.dtype,)
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        _check_compiled(kernels)
        _launch(x, layer, topk_ids, topk_weights, workspace, out, expert_map, weight_on_input)
    _compiled.add(kernels)
    return out


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
    if by_warps and is_small(layer, topk_ids):
        if not makes_rows(layer, tokens):
            prepare(x, layer, topk_ids, expert_map, workspace, pdl)
        fused(x, layer, topk_ids, expert_map, topk_weights, weight_on_input, workspace, out, pdl)
        return
    before, after = (topk_weights, None) if weight_on_input else (None, topk_weights)
    routed = (layer, topk_ids, expert_map)
    by_route = layer.traits.inputs == 0
    divisor = 1 if by_route else topk
    up = 0 if layer.traits.inputs == 1 else tokens * topk // divisor  # rows from gate's to up's
    gemm = product if by_warps else expert_gemm
    prepare(x, *routed, workspace, pdl)
    gemm(workspace.rotated, *routed, workspace, divisor, up, down=False, pdl=pdl)
    activate(*routed, before, workspace, pdl)
    gemm(workspace.middle, *routed, workspace, 1, 0, down=True, pdl=pdl)
    combine(*routed, after, workspace, out, pdl)


_compiled: set[tuple[object, ...]] = set()  # calls whose kernels are there


def _check_compiled(kernels: tuple[object, ...]) -> None:
    """Refuse to compile while a graph is captured, which would spoil it."""
    if kernels in _compiled or not torch.cuda.is_available():
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "this call's kernels are not compiled yet; call it once, with as many tokens, before "
            "the graph is captured"
        )


def moe_forward_kernels(
    x: torch.Tensor,
    layer: LayerWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    expert_map: torch.Tensor | None = None,
    weight_on_input: bool = False,
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """As moe_decode for any number of tokens in any layout.

    workspace: the caller's, for as many tokens of the call as it has room for at a time; without
    it one is made.
    """
    check_arguments(x, layer, topk_ids, topk_weights, expert_map)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, topk = topk_ids.shape
    if not tokens or not topk:
        return out.zero_()
    if workspace is None:
        most = min(tokens, MAX_TOKENS)
        workspace = make_workspace(layer.geometry, topk, most, x.dtype, x.device)
    options = {"expert_map": expert_map, "weight_on_input": weight_on_input}
    if expert_map is not None:
        options["expert_map"] = expert_map.contiguous()
    whole = (x.contiguous(), topk_ids.contiguous(), topk_weights.contiguous(), out)
    for rows, ids, weights, results in zip(
        *(t.split(workspace.tokens) for t in whole), strict=True
    ):
        moe_decode(rows, layer, ids, weights, workspace, results, **options)
    return out


@functools.cache
def ways(device: torch.device) -> tuple[bool, bool]:
    """Which way runs on a device: whether the products go by warps, and dependent launches.

    By warps on sm_90, with inline PTX and labels in 128 KiB of shared memory, and all in one launch
    where fused.is_small; plain Triton on every other GPU, and under the interpreter. Dependent
    launches from sm_90 on.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False, False
    capability = torch.cuda.get_device_capability(device)
    return capability == (9, 0), capability >= (9, 0)


def _check(
    x: torch.Tensor,
    layer: LayerWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
    workspace: Workspace,
    out: torch.Tensor,
) -> None:
    if x.dtype not in DTYPES:
        raise TypeError(f"x is {x.dtype}, expected float16 or bfloat16")
    if x.device.type != "cuda" and not (INTERPRETED and x.device.type == "cpu"):
        raise ValueError(f"x is on {x.device}; the kernels run on CUDA")
    needed = layer.geometry.experts * layer.geometry.bundle_bytes
    if layer.atoms.shape[1] < needed:
        raise ValueError(
            f"the layer's slots have {layer.atoms.shape[1]} bytes, the bundles of all experts "
            f"take {needed}; kernels run no layer with X4T experts"
        )
    if layer.traits.inputs not in (0, 1, 2):
        raise ValueError(f"the layer's traits have {layer.traits.inputs} inputs, expected 0 to 2")
    if out.dtype != x.dtype or out.shape != x.shape or out.device != x.device:
        raise ValueError(
            f"out is {list(out.shape)} {out.dtype} on {out.device}, expected {list(x.shape)} "
            f"{x.dtype} on {x.device}"
        )
    named = {"x": x, "topk_ids": topk_ids, "topk_weights": topk_weights, "out": out}
    for name, value in {**named, "expert_map": expert_map}.items():
        if value is None:
            continue
        if not value.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    if workspace.geometry != layer.geometry or workspace.rotated.dtype != x.dtype:
        raise ValueError(
            f"the workspace is for {workspace.geometry} and {workspace.rotated.dtype}, the call "
            f"for {layer.geometry} and {x.dtype}"
        )
    if workspace.rotated.device != x.device:
        raise ValueError(f"the workspace is on {workspace.rotated.device}, x on {x.device}")
    tokens, topk = topk_ids.shape
    if tokens > workspace.tokens or topk > workspace.topk:
        raise ValueError(
            f"{tokens} tokens of {topk} routes; the workspace is for {workspace.tokens} of "
            f"{workspace.topk}"
        )
