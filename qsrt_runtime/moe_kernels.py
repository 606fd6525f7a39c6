"""moe_forward by the kernels: which of them, and in how many calls."""

import torch

from qsrt_runtime.arguments import check_arguments
from qsrt_runtime.moe_decode import moe_decode
from qsrt_runtime.moe_prefill import moe_prefill
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import (
    FEW_TOKENS,
    MAX_PREFILL_TOKENS,
    MAX_TOKENS,
    Workspace,
    make_prefill_workspace,
    make_workspace,
)

FEW_ROWS = 20  # of an expert on average, up to which decoding without a pass to memory is quicker


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
    """As moe_forward_reference, of tokens in any number and layout, float16 or bfloat16.

    By moe_decode up to FEW_TOKENS, or to FEW_ROWS rows of an expert on average; else by
    moe_prefill.   workspace: the caller's; then by moe_decode, for as many tokens at a time as it
    has room for.
    """
    check_arguments(x, layer, topk_ids, topk_weights, expert_map)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, topk = topk_ids.shape
    if not tokens or not topk:
        return out.zero_()
    decodes = tokens <= FEW_TOKENS or tokens * topk <= FEW_ROWS * layer.geometry.experts
    forward, most = (moe_decode, MAX_TOKENS) if decodes else (moe_prefill, MAX_PREFILL_TOKENS)
    if workspace is not None:
        forward = moe_decode
    elif decodes:
        sizes = (layer.geometry, topk, min(tokens, most))
        workspace = make_workspace(*sizes, x.dtype, x.device)
    else:
        sizes = (layer.geometry, topk, min(tokens, most), layer.traits.inputs)
        workspace = make_prefill_workspace(*sizes, x.dtype, x.device)
    options = {"expert_map": expert_map, "weight_on_input": weight_on_input}
    if expert_map is not None:
        options["expert_map"] = expert_map.contiguous()
    whole = (x.contiguous(), topk_ids.contiguous(), topk_weights.contiguous(), out)
    for rows, ids, weights, results in zip(
        *(t.split(workspace.tokens) for t in whole), strict=True
    ):
        forward(rows, layer, ids, weights, workspace, results, **options)
    return out
