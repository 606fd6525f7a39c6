"""moe_forward by the kernels: which of them, and in how many calls."""

from collections.abc import Callable

import torch

from qsrt_runtime.arguments import check_arguments
from qsrt_runtime.arithmetic import arithmetic_of
from qsrt_runtime.moe_decode import MANY_ROWS, moe_decode, takes_labels
from qsrt_runtime.moe_prefill import moe_prefill
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import (
    FEW_TOKENS,
    MAX_PREFILL_TOKENS,
    MAX_TOKENS,
    PrefillWorkspace,
    Workspace,
    make_prefill_workspace,
    make_workspace,
)

# Rows of an expert on average, up to which decoding without a pass to memory is quicker on an H200,
# see tests/bench/results/prefill_h200.txt.
FEW_ROWS = 20


def moe_forward_kernels(
    x: torch.Tensor,
    layer: LayerWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    expert_map: torch.Tensor | None = None,
    weight_on_input: bool = False,
    activation: str = "a16",
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """As moe_forward_reference, of tokens in any number and layout, float16 or bfloat16.

    By moe_decode up to FEW_TOKENS, and of a layer as stored up to FEW_ROWS rows of an expert on
    average; else by moe_prefill, which has no "a8".   workspace: the caller's; calls that it has
    room for go by moe_decode, others have one of their own.
    """
    check_arguments(x, layer, topk_ids, topk_weights, expert_map)
    arithmetic = arithmetic_of(activation, x, layer)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, topk = topk_ids.shape
    if not tokens or not topk:
        return out.zero_()
    forward = moe_decode
    if workspace is None or tokens > workspace.tokens or topk > workspace.topk:
        forward, workspace = _forward_of(layer, tokens, topk, x)
    options = {"expert_map": expert_map, "weight_on_input": weight_on_input}
    if forward is moe_decode:
        options["activation"] = arithmetic
    if expert_map is not None:
        options["expert_map"] = expert_map.contiguous()
    whole = (x.contiguous(), topk_ids.contiguous(), topk_weights.contiguous(), out)
    for rows, ids, weights, results in zip(
        *(t.split(workspace.tokens) for t in whole), strict=True
    ):
        forward(rows, layer, ids, weights, workspace, results, **options)
    return out


def decodes(layer: LayerWeights, tokens: int, topk: int) -> bool:
    """Whether a call goes by moe_decode."""
    if layer.labels is not None:
        return tokens <= FEW_TOKENS and takes_labels(layer.labels.device)
    rows = FEW_ROWS if layer.traits.uniform else MANY_ROWS  # others have no blocks of 32 places
    few = tokens * topk <= rows * layer.geometry.experts and tokens <= MAX_TOKENS
    return tokens <= FEW_TOKENS or few


def _forward_of(
    layer: LayerWeights, tokens: int, topk: int, x: torch.Tensor
) -> tuple[Callable[..., torch.Tensor], Workspace | PrefillWorkspace]:
    if decodes(layer, tokens, topk):
        return moe_decode, make_workspace(layer.geometry, topk, tokens, x.dtype, x.device)
    sizes = (layer.geometry, topk, min(tokens, MAX_PREFILL_TOKENS), layer.traits.inputs)
    options = {} if layer.labels is None else {"scratch_bytes": 0}
    return moe_prefill, make_prefill_workspace(*sizes, x.dtype, x.device, **options)
