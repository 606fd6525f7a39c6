"""activate_routes by warps: a record of 128 channels of a route to a warp."""

import triton
import triton.language as tl
from triton.language.extra import cuda

from qsrt_runtime.ops.kernel import activate, expert_of
from qsrt_runtime.ops.warps import ptx
from qsrt_runtime.ops.warps.kernel import lane_signs, load_four, rotate_lanes, store_four, turn

_IN_PLACE = tl.constexpr(ptx.rotate(ptx.IN_PLACE))
_TURNED_TO_WORDS = tl.constexpr(ptx.rotate(ptx.TURNED_TO_WORDS))


@triton.jit(
    do_not_specialize=["num_ids", "num_experts"],
    do_not_specialize_on_alignment=["activations", "weights", "ids", "expert_map"],
)
def activate_routes_warps_kernel(
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
    WARPS: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """As activate_routes_kernel; WARPS records of one route.

    BESIDE: it runs beside the launch before, whose results it does not need; the last program ends
    after that one, so that the next launch comes after both.
    """
    if BESIDE:
        last = (tl.program_id(0) == tl.num_programs(0) - 1) & (
            tl.program_id(1) == tl.num_programs(1) - 1
        )
        if last:
            cuda.gdc_wait()
    route = tl.program_id(0)
    thread = tl.arange(0, 32 * WARPS)
    record, lane = tl.program_id(1) * WARPS + (thread >> 5), thread & 31
    there = record < 2 * PAIRS
    pair, side = record >> 1, record & 1
    expert, _ = expert_of(ids, expert_map, route, True, num_ids, num_experts, HAS_MAP)
    source = sums + route.to(tl.int64) * (PAIRS * 512) + pair * 512 + side * 128 + lane * 4
    g0, g1, g2, g3 = load_four(source, there)  # on their way while the expert is
    h0, h1, h2, h3 = load_four(source + 256, there)
    if expert < 0:
        return
    turned = turn(lane)  # its four channels, once rotated, are 4 turned on
    local = slab + expert.to(tl.int64) * BUNDLE + LOCAL
    local += (pair * 8 + (turned >> 2)).to(tl.int64) * SLOT_STRIDE
    scales = local.to(tl.pointer_type(tl.float16)) + side * 16 + (turned & 3) * 4
    s0, s1, s2, s3 = load_four(scales, there)
    t0, t1, t2, t3 = load_four(scales + 32, there)
    u0, u1, u2, u3 = load_four(scales + 64, there)
    even, odd = lane_signs(lane, 15, 3)
    if WEIGH:
        weight = tl.load(weights + route).to(tl.float32)
        even *= weight
        odd *= weight
    g0, g1, g2, g3 = rotate_lanes(g0, g1, g2, g3, lane, _IN_PLACE)
    h0, h1, h2, h3 = rotate_lanes(h0, h1, h2, h3, lane, _IN_PLACE)
    g0, g1, g2, g3 = g0 * s0 * even, g1 * s1 * odd, g2 * s2 * even, g3 * s3 * odd
    h0, h1, h2, h3 = h0 * t0 * even, h1 * t1 * odd, h2 * t2 * even, h3 * t3 * odd
    if tl.load(activations + expert) == 1:
        g0 = activate(g0, h0, True, BETA, LINEAR_BETA)
        g1 = activate(g1, h1, True, BETA, LINEAR_BETA)
        g2 = activate(g2, h2, True, BETA, LINEAR_BETA)
        g3 = activate(g3, h3, True, BETA, LINEAR_BETA)
    else:
        g0 = activate(g0, h0, False, BETA, LINEAR_BETA)
        g1 = activate(g1, h1, False, BETA, LINEAR_BETA)
        g2 = activate(g2, h2, False, BETA, LINEAR_BETA)
        g3 = activate(g3, h3, False, BETA, LINEAR_BETA)
    g0, g1, g2, g3 = g0 * u0, g1 * u1, g2 * u2, g3 * u3
    g0, g1, g2, g3 = rotate_lanes(g0, g1, g2, g3, lane, _TURNED_TO_WORDS)
    place = (lane & 1) * 8 + (lane >> 1 & 3) * 64 + (lane >> 3) * 16 + side * 4
    target = out + route.to(tl.int64) * (256 * PAIRS) + pair * 256 + place
    even, odd = lane_signs(lane, 15, 4)
    store_four(target, g0 * even, g2 * even, g1 * odd, g3 * odd, there)
