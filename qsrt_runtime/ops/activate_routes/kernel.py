"""Between the products of many rows: sums of gate and up to the rows that down receives."""

import triton
import triton.language as tl

from qsrt_runtime.ops.kernel import expert_of, middle_scales, store_middle


@triton.jit(
    do_not_specialize=["num_ids", "num_experts"],
    do_not_specialize_on_alignment=["activations", "weights", "ids", "expert_map"],
)
def activate_routes_kernel(
    sums,
    slab,
    activations,
    weights,
    ids,
    expert_map,
    out,
    num_ids,
    num_experts,
    BUNDLE: tl.constexpr,
    LOCAL: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PAIRS: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    WEIGH: tl.constexpr,
    HAS_MAP: tl.constexpr,
):
    """One pair of one route; routes without an expert are left as they are.

    sums: [routes, PAIRS, 512], gate then up, each low then high record.
    out: [routes, 256 PAIRS], a slot's 32 channels after one another, in word order.
    """
    route, pair = tl.program_id(0), tl.program_id(1)
    expert, _ = expert_of(ids, expert_map, route, True, num_ids, num_experts, HAS_MAP)
    if expert < 0:
        return
    gate_scale, up_scale, down_scale, is_situ = middle_scales(
        slab, activations, expert.to(tl.int64), pair, LOCAL, BUNDLE, SLOT_STRIDE
    )
    if WEIGH:
        weight = tl.load(weights + route).to(tl.float32)
        gate_scale *= weight
        up_scale *= weight
    channel = tl.arange(0, 256)
    source = sums + (route.to(tl.int64) * PAIRS + pair) * 512 + channel
    gate, up = tl.load(source).to(tl.float32), tl.load(source + 256).to(tl.float32)
    target = out + route.to(tl.int64) * (256 * PAIRS) + pair * 256
    store_middle(
        gate, up, gate_scale, up_scale, down_scale, is_situ, target, target, BETA, LINEAR_BETA,
        True, False,
    )  # fmt: skip
