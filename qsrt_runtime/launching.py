"""What calls of the kernels have in common: their checks, and which way they go."""

import functools

import torch

from qsrt_runtime.arguments import check_types
from qsrt_runtime.ops.kernel import INTERPRETED
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import PrefillWorkspace, Workspace

DTYPES = (torch.float16, torch.bfloat16)
compiled: set[tuple[object, ...]] = set()  # calls whose kernels are there


def check_compiled(kernels: tuple[object, ...]) -> None:
    """Refuse to compile while a graph is captured, which would spoil it."""
    if kernels in compiled or not torch.cuda.is_available():
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "this call's kernels are not compiled yet; call it once, with as many tokens, before "
            "the graph is captured"
        )


@functools.cache
def ways(device: torch.device) -> tuple[bool, bool]:
    """Which way runs on a device: whether the products go by warps, and dependent launches.

    By warps on sm_90, with inline PTX and labels in 128 KiB of shared memory, and in one or three
    launches where ops.fused.alone or ops.fused takes a call; plain Triton under the interpreter and
    on every other GPU, but for the products of expanded layers (label_gemm) and of quantized rows
    on sm_89 (moe_decode.a8_product). Dependent launches from sm_90 on.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False, False
    capability = torch.cuda.get_device_capability(device)
    return capability == (9, 0), capability >= (9, 0)


def check_call(
    x: torch.Tensor,
    layer: LayerWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
    workspace: Workspace | PrefillWorkspace,
    out: torch.Tensor,
    kind: type,
) -> None:
    """What arguments.check_arguments does not look at; errors as moe_decode. kind: of workspace."""
    check_types(out=out)
    if not isinstance(workspace, kind):
        raise TypeError(f"workspace is a {type(workspace).__name__}, expected a {kind.__name__}")
    if x.dtype not in DTYPES:
        raise TypeError(f"x is {x.dtype}, expected float16 or bfloat16")
    if x.device.type != "cuda" and not (INTERPRETED and x.device.type == "cpu"):
        raise ValueError(f"x is on {x.device}; the kernels run on CUDA")
    needed = layer.geometry.experts * layer.bundle_bytes
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
