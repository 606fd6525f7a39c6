"""The output: what down gave each route, rotated and summed by token."""

import triton
import triton.language as tl

from qsrt_runtime.ops.fused.ends import ptx
from qsrt_runtime.ops.fused.ends.kernel import parts_of, rotate
from qsrt_runtime.ops.kernel import COLUMNS, PLACES, expert_of
from qsrt_runtime.ops.warps.kernel import NORM, warp_number

_DOWN, _DOWN_WORDS = tl.constexpr(ptx.sums(1)), tl.constexpr(ptx.sums_operands(1))
_DOWN_PARTS = tl.constexpr(ptx.PARTS[1])
_PUT, _GET = tl.constexpr(ptx.PUT), tl.constexpr(ptx.GET)


@triton.jit
def _output_of(
    start, num_tokens, HIDDEN: tl.constexpr, TOPK: tl.constexpr, CHOICES: tl.constexpr,
    AT_ONCE: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """What each thread's warp does of the items from start on, AT_ONCE in all: the group of 128
    channels and the route, and whether there is any.
    """
    warp = tl.arange(0, 1024) >> 5
    number, choice = warp // CHOICES, warp % CHOICES
    item = start + number * PROGRAMS
    there = (number < AT_ONCE) & (choice < TOPK) & (item < num_tokens * (HIDDEN // 128))
    return item % (HIDDEN // 128), item // (HIDDEN // 128) * TOPK + choice, there


@triton.jit
def output_inputs(
    start, partial, scales, weights, num_tokens, num_blocks, ids, expert_map, block_experts,
    route_places, num_ids, num_experts, HIDDEN: tl.constexpr, SCALE_ROWS: tl.constexpr,
    TILES: tl.constexpr, STEPS: tl.constexpr, TOPK: tl.constexpr, CHOICES: tl.constexpr,
    AT_ONCE: tl.constexpr, WEIGH: tl.constexpr, SINGLE: tl.constexpr,
    HAS_MAP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """What make_output needs of _output_of that no other program makes: parts_of each route, and
    what its lane's four sums are times.
    """
    lane = tl.arange(0, 1024) & 31
    group, route, there = _output_of(start, num_tokens, HIDDEN, TOPK, CHOICES, AT_ONCE, PROGRAMS)
    svh = scales + group * 128 + lane * 4
    if SINGLE:
        expert, _ = expert_of(ids, expert_map, route, there, num_ids, num_experts, HAS_MAP)
        at = tl.where(there & (expert >= 0), route * PLACES, -1)
    else:
        at = tl.load(route_places + route, mask=there, other=-1)
    if SCALE_ROWS > 1:
        if not SINGLE:
            expert = tl.load(block_experts + at // PLACES, mask=at >= 0, other=0)
        svh += tl.maximum(expert, 0).to(tl.int64) * HIDDEN
    there = at >= 0
    s0 = tl.load(svh, mask=there, other=0).to(tl.float32)
    s1 = tl.load(svh + 1, mask=there, other=0).to(tl.float32)
    s2 = tl.load(svh + 2, mask=there, other=0).to(tl.float32)
    s3 = tl.load(svh + 3, mask=there, other=0).to(tl.float32)
    factor = tl.where(there, NORM, 0.0)
    if WEIGH:
        factor *= tl.load(weights + route, mask=there, other=0).to(tl.float32)
    block, place = tl.maximum(at, 0) // PLACES, tl.maximum(at, 0) % PLACES
    source, parts, most = parts_of(
        partial, block * TILES + group // 4, place, group % 4 * 128 + lane * 4, there,
        num_blocks * TILES, STEPS, PROGRAMS,
    )  # fmt: skip
    return source, parts, most, s0 * factor, s1 * factor, s2 * factor, s3 * factor


@triton.jit
def sum_choices(
    a, b, c, d, out, start, num_items, HIDDEN: tl.constexpr, TOPK: tl.constexpr,
    CHOICES: tl.constexpr, AT_ONCE: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """The sum of what CHOICES warps have of each item, 128 channels of a token, to out.

    They meet in shared memory where labels may have been, which nobody may need any more.
    """
    thread = tl.arange(0, 1024)
    groups: tl.constexpr = HIDDEN // 128
    tl.inline_asm_elementwise(
        _PUT, "=r,r,f,f,f,f", [thread * 16, a, b, c, d], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()
    item = start + (thread >> 7) * PROGRAMS
    there = (thread < AT_ONCE * 128) & (item < num_items)
    first = (thread >> 7) * (CHOICES * 512) + (thread & 127) * 4
    total = tl.zeros((1024,), tl.float32)
    for other in tl.static_range(0, TOPK):
        total += tl.inline_asm_elementwise(
            _GET, "=f,r", [first + other * 512], dtype=tl.float32, is_pure=False, pack=1
        )
    target = out + (item // groups).to(tl.int64) * HIDDEN + item % groups * 128 + (thread & 127)
    tl.store(target, total.to(out.dtype.element_ty), mask=there)
    tl.debug_barrier()


@triton.jit
def make_output(
    partial, scales, weights, ids, expert_map, block_experts, route_places, out, inputs, num_tokens,
    num_blocks, num_ids, num_experts,
    HIDDEN: tl.constexpr, SCALE_ROWS: tl.constexpr, TILES: tl.constexpr, STEPS: tl.constexpr,
    TOPK: tl.constexpr, CHOICES: tl.constexpr, AT_ONCE: tl.constexpr, WEIGH: tl.constexpr,
    SINGLE: tl.constexpr, HAS_MAP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Each token's routes rotated, scaled and summed, to out; see combine_kernel.

    128 channels of a route to a warp; those of a token meet in shared memory, where nobody needs
    the labels any more.   inputs: output_inputs from the program on.
    CHOICES: TOPK rounded up to a power of two, at most 32.   AT_ONCE: 32 // CHOICES, at most 8.
    """
    lane = tl.arange(0, 1024) & 31
    groups: tl.constexpr = HIDDEN // 128
    start = tl.program_id(0)
    source, parts, most, s0, s1, s2, s3 = inputs
    while start < num_tokens * groups:
        a, b, c, d = lane * 0.0, lane * 0.0, lane * 0.0, lane * 0.0
        if start + warp_number() // CHOICES * PROGRAMS < num_tokens * groups:
            done = 0
            while done < most:
                a, b, c, d = tl.inline_asm_elementwise(
                    _DOWN,
                    _DOWN_WORDS,
                    [source.to(tl.int64), parts - done, a, b, c, d],
                    dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
                    is_pure=False,
                    pack=1,
                )
                source += _DOWN_PARTS * PLACES * COLUMNS
                done += _DOWN_PARTS
            a, b, c, d = rotate(a, b, c, d, lane)
            a, b, c, d = a * s0, b * s1, c * s2, d * s3
        sum_choices(
            a, b, c, d, out, start, num_tokens * groups, HIDDEN, TOPK, CHOICES, AT_ONCE, PROGRAMS
        )
        start += AT_ONCE * PROGRAMS
        if start < num_tokens * groups:
            source, parts, most, s0, s1, s2, s3 = output_inputs(
                start, partial, scales, weights, num_tokens, num_blocks, ids, expert_map,
                block_experts, route_places, num_ids, num_experts, HIDDEN, SCALE_ROWS, TILES,
                STEPS, TOPK, CHOICES, AT_ONCE, WEIGH, SINGLE, HAS_MAP, PROGRAMS,
            )  # fmt: skip
