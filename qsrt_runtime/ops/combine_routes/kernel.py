"""The last launch for many rows: the sums of down to the output, over each token's routes."""

import triton
import triton.language as tl

from qsrt_runtime.ops.kernel import expert_of, rotate


@triton.jit(
    do_not_specialize=["num_ids", "num_experts"],
    do_not_specialize_on_alignment=["scales", "weights", "ids", "expert_map", "out"],
)
def combine_routes_kernel(
    sums,
    scales,
    weights,
    ids,
    expert_map,
    out,
    num_ids,
    num_experts,
    HIDDEN: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    TOPK: tl.constexpr,
    BY_ROUTE: tl.constexpr,
    WEIGH: tl.constexpr,
    HAS_MAP: tl.constexpr,
):
    """256 channels of one token, its routes in their order.

    sums: [T TOPK, HIDDEN].   scales: [SCALE_ROWS, HIDDEN], of all experts alike unless BY_ROUTE.
    weights: [T, TOPK].   out: [T, HIDDEN].
    """
    token = tl.program_id(0)
    channel = tl.program_id(1) * 256 + tl.arange(0, 256)
    is_channel = channel < HIDDEN
    result = tl.zeros((256,), tl.float32)
    for choice in tl.range(0, TOPK):
        route = token * TOPK + choice
        expert, _ = expert_of(ids, expert_map, route, True, num_ids, num_experts, HAS_MAP)
        mask = is_channel & (channel * 0 + expert >= 0)
        part = tl.load(sums + route.to(tl.int64) * HIDDEN + channel, mask=mask, other=0)
        part = part.to(tl.float32)
        if BY_ROUTE:
            row = tl.maximum(expert, 0).to(tl.int64) * (HIDDEN if SCALE_ROWS > 1 else 0)
            svh = tl.load(scales + row + channel, mask=is_channel, other=0).to(tl.float32)
            part = tl.reshape(rotate(tl.reshape(part, (2, 128)), 2), (256,)) * svh
        if WEIGH:
            part *= tl.load(weights + route, mask=expert >= 0, other=0).to(tl.float32)
        result += part
    if not BY_ROUTE:
        svh = tl.load(scales + channel, mask=is_channel, other=0).to(tl.float32)
        result = tl.reshape(rotate(tl.reshape(result, (2, 128)), 2), (256,)) * svh
    target = out + token.to(tl.int64) * HIDDEN + channel
    tl.store(target, result.to(out.dtype.element_ty), mask=is_channel)
