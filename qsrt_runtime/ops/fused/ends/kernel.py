"""What stands around the products, a record of 128 channels of a route to a warp.

A lane has four channels after one another, so that a Hadamard matrix is two steps inside the lane
and five between lanes.
"""

import triton
import triton.language as tl

from qsrt_runtime.ops.fused.ends import ptx
from qsrt_runtime.ops.kernel import COLUMNS, PLACES, activate, expert_of

_SUMS, _HALVES, _OTHER = tl.constexpr(ptx.SUMS), tl.constexpr(ptx.HALVES), tl.constexpr(ptx.OTHER)
_PUT, _GET, _MEET = tl.constexpr(ptx.PUT), tl.constexpr(ptx.GET), tl.constexpr(ptx.MEET)
_FOUR = tl.constexpr("=f,=f,=f,=f,l,r")


@triton.jit
def meet(arrivals):
    """Wait until all programs are here; what any of them wrote before can be read after."""
    thread = tl.arange(0, 1024)
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        _MEET,
        "=r,l,r,r",
        [arrivals, thread, tl.num_programs(0)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()


@triton.jit
def _four(pointer, there, PTX: tl.constexpr):
    return tl.inline_asm_elementwise(
        PTX,
        _FOUR,
        [pointer, there.to(tl.int32)],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def _other(value, lane, BIT: tl.constexpr):
    """Sum and difference with the lane that differs in a bit, each where it belongs."""
    other = tl.inline_asm_elementwise(
        _OTHER, "=f,f,r", [value, lane * 0 + BIT], dtype=tl.float32, is_pure=False, pack=1
    )
    return other + tl.where(lane & BIT == 0, value, -value)


@triton.jit
def _rotate(a, b, c, d, lane):
    """A warp's 128 channels times the normalized Hadamard matrix."""
    a, b, c, d = a + b, a - b, c + d, c - d
    a, b, c, d = a + c, b + d, a - c, b - d
    for bit in tl.static_range(0, 5):
        a = _other(a, lane, 1 << bit)
        b = _other(b, lane, 1 << bit)
        c = _other(c, lane, 1 << bit)
        d = _other(d, lane, 1 << bit)
    scale: tl.constexpr = 0.08838834764831845  # 1 / sqrt(128)
    return a * scale, b * scale, c * scale, d * scale


@triton.jit
def _sums(
    partial, tile, place, column, there, num_tiles, STEPS: tl.constexpr, COPIES: tl.constexpr
):
    """A lane's four channels of a tile at a place, of COPIES matrices 256 columns apart.

    The parts of first_and_last_program, added in their order; num_tiles: of all blocks.
    """
    unit = tl.maximum(tl.cdiv(num_tiles * STEPS, tl.num_programs(0)), 1)
    first, last = tile * STEPS // unit, (tile * STEPS + STEPS - 1) // unit
    most = (STEPS + unit - 2) // unit + 1
    a, b, c, d = column * 0.0, column * 0.0, column * 0.0, column * 0.0
    e, f, g, h = column * 0.0, column * 0.0, column * 0.0, column * 0.0
    number = 0
    while number < most:
        for more in tl.static_range(0, 4):
            program = first + number + more
            part = ((program + tile) * PLACES + place).to(tl.int64) * COLUMNS + column
            held = there & (program <= last)
            a1, b1, c1, d1 = _four(partial + part, held, _SUMS)
            a += a1
            b += b1
            c += c1
            d += d1
            if COPIES == 2:
                a1, b1, c1, d1 = _four(partial + part + 256, held, _SUMS)
                e += a1
                f += b1
                g += c1
                h += d1
        number += 4
    return a, b, c, d, e, f, g, h


@triton.jit
def make_middle(
    partial, slab, activations, weights, ids, expert_map, block_experts, block_routes, middle,
    position, end, num_blocks, num_ids, num_experts,
    HIDDEN: tl.constexpr, BUNDLE: tl.constexpr, SLOT_STRIDE: tl.constexpr, PAIRS: tl.constexpr,
    TILES: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, WEIGH: tl.constexpr,
    SINGLE: tl.constexpr, HAS_MAP: tl.constexpr,
):  # fmt: skip
    """The rows of down that its steps position to end take, to middle; see activate_kernel.

    Programs whose steps share rows make them each for itself, which is quicker than waiting.
    PAIRS: held.   TILES: of down, of a block.
    """
    thread = tl.arange(0, 1024)
    warp, lane = thread >> 5, thread & 31
    steps: tl.constexpr = 4 * PAIRS
    block = position // (TILES * steps)
    while block * (TILES * steps) < end:
        if SINGLE:
            expert, _ = expert_of(ids, expert_map, block, True, num_ids, num_experts, HAS_MAP)
            rows = (expert >= 0).to(tl.int32)
            expert = tl.maximum(expert, 0)
        else:
            expert = tl.load(block_experts + block)
            rows = 1
            for other in tl.static_range(1, PLACES):
                rows += (tl.load(block_routes + block * PLACES + other) >= 0).to(tl.int32)
        is_situ = tl.load(activations + expert) == 1
        bundle = slab.to(tl.pointer_type(tl.uint8)) + expert.to(tl.int64) * BUNDLE + 36 * HIDDEN
        # Steps of the block that are this program's, and the pairs in them.
        start = tl.maximum(position - block * (TILES * steps), 0)
        count = tl.minimum(end - block * (TILES * steps), TILES * steps) - start
        start %= steps
        pairs = tl.minimum((start % 4 + count + 3) // 4, PAIRS)
        done = 0
        while done < pairs * rows * 2:
            item = done + warp
            there = item < pairs * rows * 2
            side, number = item & 1, item >> 1
            place, number = number % rows, number // rows
            pair = (start // 4 + number) % PAIRS
            route = block + place
            if not SINGLE:
                route = tl.load(block_routes + block * PLACES + place, mask=there, other=0)
            local = bundle + (pair * 8 + (lane >> 2)).to(tl.int64) * SLOT_STRIDE
            local += side * 32 + (lane & 3) * 8
            s0, s1, s2, s3 = _four(local, there, _HALVES)
            t0, t1, t2, t3 = _four(local + 64, there, _HALVES)
            u0, u1, u2, u3 = _four(local + 128, there, _HALVES)
            g0, g1, g2, g3, h0, h1, h2, h3 = _sums(
                partial, block * PAIRS + pair, place, side * 128 + lane * 4, there,
                num_blocks * PAIRS, HIDDEN // 64, 2,
            )  # fmt: skip
            g0, g1, g2, g3 = _rotate(g0, g1, g2, g3, lane)
            h0, h1, h2, h3 = _rotate(h0, h1, h2, h3, lane)
            if WEIGH:
                weight = tl.load(weights + route, mask=there, other=0).to(tl.float32)
                s0, s1, s2, s3 = s0 * weight, s1 * weight, s2 * weight, s3 * weight
                t0, t1, t2, t3 = t0 * weight, t1 * weight, t2 * weight, t3 * weight
            g0 = activate(g0 * s0, h0 * t0, is_situ, BETA, LINEAR_BETA) * u0
            g1 = activate(g1 * s1, h1 * t1, is_situ, BETA, LINEAR_BETA) * u1
            g2 = activate(g2 * s2, h2 * t2, is_situ, BETA, LINEAR_BETA) * u2
            g3 = activate(g3 * s3, h3 * t3, is_situ, BETA, LINEAR_BETA) * u3
            g0, g1, g2, g3 = _rotate(g0, g1, g2, g3, lane)
            # The four channels in fragment order, of the slot's 32.
            target = middle + route.to(tl.int64) * (256 * PAIRS) + pair * 256 + (lane >> 2) * 32
            target += side * 16 + 8 * (lane & 1) + (lane & 2)
            kind = middle.dtype.element_ty
            tl.store(target, g0.to(kind), mask=there)
            tl.store(target + 1, g1.to(kind), mask=there)
            tl.store(target + 4, g2.to(kind), mask=there)
            tl.store(target + 5, g3.to(kind), mask=there)
            done += 32
        block += 1
    tl.debug_barrier()


@triton.jit
def make_output(
    partial, scales, weights, ids, expert_map, block_experts, route_places, out,
    num_tokens, num_blocks, num_ids, num_experts,
    HIDDEN: tl.constexpr, SCALE_ROWS: tl.constexpr, TILES: tl.constexpr, STEPS: tl.constexpr,
    TOPK: tl.constexpr, CHOICES: tl.constexpr, WEIGH: tl.constexpr, SINGLE: tl.constexpr,
    HAS_MAP: tl.constexpr,
):  # fmt: skip
    """Each token's routes rotated, scaled and summed, to out; see combine_kernel.

    128 channels of a route to a warp; those of a token meet in shared memory, where nobody needs
    the labels any more.   CHOICES: TOPK rounded up to a power of two, at most 32.
    """
    thread = tl.arange(0, 1024)
    warp, lane = thread >> 5, thread & 31
    at_once: tl.constexpr = 32 // CHOICES if CHOICES > 4 else 8
    groups: tl.constexpr = HIDDEN // 128
    number, choice = warp // CHOICES, warp % CHOICES
    round_start = tl.program_id(0)
    while round_start < num_tokens * groups:
        item = round_start + number * tl.num_programs(0)
        there = (number < at_once) & (choice < TOPK) & (item < num_tokens * groups)
        group = item % groups
        route = item // groups * TOPK + choice
        if SINGLE:
            expert, _ = expert_of(ids, expert_map, route, there, num_ids, num_experts, HAS_MAP)
            there &= expert >= 0
            block, place = choice, choice * 0
        else:
            at = tl.load(route_places + route, mask=there, other=-1)
            there &= at >= 0
            block, place = tl.maximum(at, 0) // PLACES, tl.maximum(at, 0) % PLACES
            expert = tl.load(block_experts + block, mask=there, other=0)
        a, b, c, d, _, _, _, _ = _sums(
            partial, block * TILES + group // 4, place, group % 4 * 128 + lane * 4, there,
            num_blocks * TILES, STEPS, 1,
        )  # fmt: skip
        a, b, c, d = _rotate(a, b, c, d, lane)
        svh = scales + group * 128 + lane * 4
        if SCALE_ROWS > 1:
            svh += tl.maximum(expert, 0).to(tl.int64) * HIDDEN
        weight = tl.where(there, 1.0, 0.0)
        if WEIGH:
            weight = tl.load(weights + route, mask=there, other=0).to(tl.float32)
        a *= weight * tl.load(svh, mask=there, other=0).to(tl.float32)
        b *= weight * tl.load(svh + 1, mask=there, other=0).to(tl.float32)
        c *= weight * tl.load(svh + 2, mask=there, other=0).to(tl.float32)
        d *= weight * tl.load(svh + 3, mask=there, other=0).to(tl.float32)
        tl.inline_asm_elementwise(
            _PUT, "=r,r,f,f,f,f", [thread * 16, a, b, c, d], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()
        item = round_start + (thread >> 7) * tl.num_programs(0)
        there = (thread < at_once * 128) & (item < num_tokens * groups)
        source = (thread >> 7) * (CHOICES * 512) + (thread & 127) * 4
        total = tl.zeros((1024,), tl.float32)
        for other in tl.static_range(0, TOPK):
            total += tl.inline_asm_elementwise(
                _GET, "=f,r", [source + other * 512], dtype=tl.float32, is_pure=False, pack=1
            )
        target = out + (item // groups).to(tl.int64) * HIDDEN + item % groups * 128 + (thread & 127)
        tl.store(target, total.to(out.dtype.element_ty), mask=there)
        tl.debug_barrier()
        round_start += at_once * tl.num_programs(0)
