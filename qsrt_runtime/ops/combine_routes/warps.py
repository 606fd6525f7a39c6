"""combine_routes by warps: 128 channels of a token to a warp."""

import triton
import triton.language as tl

from qsrt_runtime.ops.kernel import expert_of
from qsrt_runtime.ops.warps import ptx
from qsrt_runtime.ops.warps.kernel import lane_signs, load_four, rotate_lanes, turn

_IN_PLACE = tl.constexpr(ptx.rotate(ptx.IN_PLACE))


@triton.jit
def _scales(svh, even, odd, there):
    s0 = tl.load(svh, mask=there, other=0).to(tl.float32) * even
    s1 = tl.load(svh + 1, mask=there, other=0).to(tl.float32) * odd
    s2 = tl.load(svh + 2, mask=there, other=0).to(tl.float32) * even
    s3 = tl.load(svh + 3, mask=there, other=0).to(tl.float32) * odd
    return s0, s1, s2, s3


@triton.jit(
    do_not_specialize=["num_tokens", "num_ids", "num_experts"],
    do_not_specialize_on_alignment=["scales", "weights", "ids", "expert_map", "out"],
)
def combine_routes_warps_kernel(
    sums,
    scales,
    weights,
    ids,
    expert_map,
    out,
    num_tokens,
    num_ids,
    num_experts,
    HIDDEN: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    TOPK: tl.constexpr,
    BY_ROUTE: tl.constexpr,
    WEIGH: tl.constexpr,
    HAS_MAP: tl.constexpr,
    WARPS: tl.constexpr,
):
    """As combine_routes_kernel; WARPS blocks of 128 channels, one token after another."""
    thread = tl.arange(0, 32 * WARPS)
    item, lane = tl.program_id(0) * WARPS + (thread >> 5), thread & 31
    token, part = item // (HIDDEN // 128), item % (HIDDEN // 128)
    is_token = token < num_tokens
    turned = turn(lane)  # its four channels, once rotated, are 4 turned on
    even, odd = lane_signs(lane, 15, 3)
    svh = scales + part * 128 + turned * 4
    r0, r1, r2, r3 = lane * 0.0, lane * 0.0, lane * 0.0, lane * 0.0
    for choice in tl.range(0, TOPK, loop_unroll_factor=4):
        route = token * TOPK + choice
        expert, _ = expert_of(ids, expert_map, route, is_token, num_ids, num_experts, HAS_MAP)
        there = expert >= 0
        source = sums + route.to(tl.int64) * HIDDEN + part * 128 + lane * 4
        a, b, c, d = load_four(source, there)
        weight = 1.0
        if WEIGH:
            weight = tl.load(weights + route, mask=there, other=0).to(tl.float32)
        if BY_ROUTE:
            row = tl.maximum(expert, 0).to(tl.int64) * (HIDDEN if SCALE_ROWS > 1 else 0)
            s0, s1, s2, s3 = _scales(svh + row, even, odd, there)
            a, b, c, d = rotate_lanes(a, b, c, d, lane, _IN_PLACE)
            a, b, c, d = a * s0, b * s1, c * s2, d * s3
        r0 += a * weight
        r1 += b * weight
        r2 += c * weight
        r3 += d * weight
    if not BY_ROUTE:
        r0, r1, r2, r3 = rotate_lanes(r0, r1, r2, r3, lane, _IN_PLACE)
        s0, s1, s2, s3 = _scales(svh, even, odd, is_token)
        r0, r1, r2, r3 = r0 * s0, r1 * s1, r2 * s2, r3 * s3
    target = out + token.to(tl.int64) * HIDDEN + part * 128 + turned * 4
    kind = out.dtype.element_ty
    tl.store(target, r0.to(kind), mask=is_token)
    tl.store(target + 1, r1.to(kind), mask=is_token)
    tl.store(target + 2, r2.to(kind), mask=is_token)
    tl.store(target + 3, r3.to(kind), mask=is_token)
