"""The rows of down in one launch: made of gate's and up's sums as these come in, and kept in shared
memory.
"""

import triton
import triton.language as tl

from qsrt_runtime.ops.fused.alone import ptx
from qsrt_runtime.ops.fused.ends.kernel import activated, halves
from qsrt_runtime.ops.kernel import COLUMNS, expert_of
from qsrt_runtime.ops.warps.kernel import NORM, warp_number

_PUT_TWO, _GET_FOUR = tl.constexpr(ptx.PUT_TWO), tl.constexpr(ptx.GET_FOUR)
_STORE_HALVES, _STORE_BFLOATS = tl.constexpr(ptx.STORE_HALVES), tl.constexpr(ptx.STORE_BFLOATS)
_SEND_HALVES, _SEND_BFLOATS = tl.constexpr(ptx.SEND_HALVES), tl.constexpr(ptx.SEND_BFLOATS)
_RECEIVE_WORDS, _PUT_WORDS = tl.constexpr(ptx.RECEIVE_WORDS), tl.constexpr(ptx.PUT_WORDS)
_AT_ONCE = tl.constexpr(ptx.AT_ONCE)
_TWO = tl.constexpr(ptx.receive_operands(2))


@triton.jit
def store_row(at, a, b, c, d, lane, there, IS_BFLOAT: tl.constexpr):
    """A lane's four channels to their places in their tile's fragment order, in shared memory."""
    tl.inline_asm_elementwise(
        _STORE_BFLOATS if IS_BFLOAT else _STORE_HALVES, "=r,r,f,f,f,f,r",
        [at + 16 * (lane & 1) + 2 * (lane & 2), a, b, c, d, there.to(tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def first_part(tile, STEPS: tl.constexpr, UNIT: tl.constexpr):
    """A tile's first part, and how many it has."""
    first = tile * STEPS // UNIT
    return first + tile, (tile * STEPS + STEPS - 1) // UNIT - first + 1


@triton.jit
def _gather(
    sent, call, block, first_pair, count, PAIRS: tl.constexpr, STEPS: tl.constexpr,
    UNIT: tl.constexpr, TILES: tl.constexpr, RECEIVE: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Sums of gate and up of TILES of a block's pairs from first_pair on, to shared memory.

    Two columns to a thread. Of fewer than four tiles, 4 // TILES threads share a tile's parts.
    """
    shares: tl.constexpr = 4 // TILES
    thread = tl.arange(0, 1024)
    column, number, share = thread & 255, (thread >> 8) & (TILES - 1), (thread >> 8) // TILES
    first, parts = first_part(block * PAIRS + (first_pair + number) % PAIRS, STEPS, UNIT)
    parts = tl.where(number < count, (parts - share + shares - 1) // shares, 0)
    source = sent + ((first + share).to(tl.int64) * COLUMNS + 2 * column) * 2
    a, b = thread * 0.0, thread * 0.0
    for turn in tl.static_range(0, ROUNDS):
        at = (source + turn * (_AT_ONCE * shares * COLUMNS * 2)).to(tl.int64)
        a, b = tl.inline_asm_elementwise(
            RECEIVE, _TWO, [at, parts - turn * _AT_ONCE, call, a, b],
            dtype=(tl.float32, tl.float32), is_pure=False, pack=1,
        )  # fmt: skip
    tl.inline_asm_elementwise(
        _PUT_TWO, "=r,r,f,f", [thread * 8, a, b], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _get_four(at):
    a, b, c, d = tl.inline_asm_elementwise(
        _GET_FOUR, "=f,=f,=f,=f,r", [at],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
    )  # fmt: skip
    return a, b, c, d


@triton.jit
def _make_records(
    sent, slab, weights, middle, call, block, expert, activation, first, count, at,
    HIDDEN: tl.constexpr, BUNDLE: tl.constexpr, SLOT_STRIDE: tl.constexpr, PAIRS: tl.constexpr,
    BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, WEIGH: tl.constexpr, UNIT: tl.constexpr,
    TILES: tl.constexpr, RECEIVE: tl.constexpr, ROUNDS: tl.constexpr, SPREAD: tl.constexpr,
    IS_BFLOAT: tl.constexpr,
):  # fmt: skip
    """Down's rows of `count` of a block's pairs from first on, at most TILES; see activate_kernel.

    128 channels to a warp. To shared memory `at`, or where SPREAD is to middle, for all programs.
    """
    shares: tl.constexpr = 4 // TILES
    thread = tl.arange(0, 1024)
    number, side, lane = thread >> 6, (thread >> 5) & 1, thread & 31
    there = number < tl.minimum(count, TILES)
    pair = (first + number) % PAIRS
    local = slab.to(tl.pointer_type(tl.uint8)) + expert.to(tl.int64) * BUNDLE + 36 * HIDDEN
    local += (pair * 8 + (lane >> 2)).to(tl.int64) * SLOT_STRIDE + side * 32 + (lane & 3) * 8
    gate, up, down = halves(local, there), halves(local + 64, there), halves(local + 128, there)
    factor = NORM
    if WEIGH:
        factor *= tl.load(weights + block).to(tl.float32)
    _gather(sent, call, block, first, count, PAIRS, HIDDEN // 64, UNIT, TILES, RECEIVE, ROUNDS)
    tl.debug_barrier()
    if warp_number() < 2 * TILES:
        g0, g1, g2, g3 = thread * 0.0, thread * 0.0, thread * 0.0, thread * 0.0
        h0, h1, h2, h3 = g0, g1, g2, g3
        source = (number % TILES * COLUMNS + side * 128 + lane * 4) * 4
        for share in tl.static_range(0, shares):
            a, b, c, d = _get_four(source + share * (TILES * COLUMNS * 4))
            g0, g1, g2, g3 = g0 + a, g1 + b, g2 + c, g3 + d
            a, b, c, d = _get_four(source + share * (TILES * COLUMNS * 4) + 1024)
            h0, h1, h2, h3 = h0 + a, h1 + b, h2 + c, h3 + d
        g0, g1, g2, g3 = activated(
            g0, g1, g2, g3, h0, h1, h2, h3, gate, up, down, factor, activation, lane, BETA,
            LINEAR_BETA,
        )  # fmt: skip
        byte = (lane >> 2) * 64 + side * 32
        if SPREAD:
            target = middle + ((block * PAIRS + pair).to(tl.int64) * 512 + byte) // 2
            target += 8 * (lane & 1) + (lane & 2)
            tl.inline_asm_elementwise(
                _SEND_BFLOATS if IS_BFLOAT else _SEND_HALVES, "=r,l,f,f,f,f,r,r",
                [target.to(tl.int64), g0, g1, g2, g3, call, there.to(tl.int32)],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        else:
            store_row(at + number * 512 + byte, g0, g1, g2, g3, lane, there, IS_BFLOAT)


@triton.jit
def make_middle(
    sent, slab, activations, weights, ids, expert_map, call, position, end, num_ids, num_experts,
    HIDDEN: tl.constexpr, BUNDLE: tl.constexpr, SLOT_STRIDE: tl.constexpr, PAIRS: tl.constexpr,
    DOWN_TILES: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, WEIGH: tl.constexpr,
    HAS_MAP: tl.constexpr, MIDDLE: tl.constexpr, UNIT: tl.constexpr, TILES: tl.constexpr,
    RECEIVE: tl.constexpr, ROUNDS: tl.constexpr, IS_BFLOAT: tl.constexpr,
):  # fmt: skip
    """The rows of down's steps position to end, to shared memory MIDDLE, in the steps' order.

    Programs whose steps share rows make them each for itself.
    """
    block_pairs: tl.constexpr = DOWN_TILES * PAIRS
    first, last = position // 4, (end + 3) // 4
    block = first // block_pairs
    while block * block_pairs < last:
        expert, _ = expert_of(ids, expert_map, block, True, num_ids, num_experts, HAS_MAP)
        start = tl.maximum(first, block * block_pairs)
        count = tl.minimum(last, (block + 1) * block_pairs) - start
        count = tl.where(expert >= 0, count, 0)
        expert = tl.maximum(expert, 0)
        activation = tl.load(activations + expert)
        done = 0
        while done < count:
            _make_records(
                sent, slab, weights, sent, call, block, expert, activation, start + done,
                count - done, (start + done - first) * 512 + MIDDLE, HIDDEN, BUNDLE, SLOT_STRIDE,
                PAIRS, BETA, LINEAR_BETA, WEIGH, UNIT, TILES, RECEIVE, ROUNDS, False, IS_BFLOAT,
            )  # fmt: skip
            done += TILES
            if done < count:
                tl.debug_barrier()
        block += 1
        if block * block_pairs < last:
            tl.debug_barrier()


@triton.jit
def spread_middle(
    sent, slab, activations, weights, ids, expert_map, middle, call, num_ids, num_experts,
    HIDDEN: tl.constexpr, BUNDLE: tl.constexpr, SLOT_STRIDE: tl.constexpr, PAIRS: tl.constexpr,
    BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, WEIGH: tl.constexpr, HAS_MAP: tl.constexpr,
    UNIT: tl.constexpr, TILES: tl.constexpr, RECEIVE: tl.constexpr, ROUNDS: tl.constexpr,
    ROUTES: tl.constexpr, PROGRAMS: tl.constexpr, IS_BFLOAT: tl.constexpr,
):  # fmt: skip
    """This program's share of all of down's rows, TILES pairs of a route at a time, to middle."""
    each: tl.constexpr = (PAIRS + TILES - 1) // TILES
    item = tl.program_id(0)
    while item < ROUTES * each:
        block, first = item // each, item % each * TILES
        expert, _ = expert_of(ids, expert_map, block, True, num_ids, num_experts, HAS_MAP)
        if expert >= 0:
            activation = tl.load(activations + expert)
            _make_records(
                sent, slab, weights, middle, call, block, expert, activation, first,
                PAIRS - first, 0, HIDDEN, BUNDLE, SLOT_STRIDE, PAIRS, BETA, LINEAR_BETA, WEIGH,
                UNIT, TILES, RECEIVE, ROUNDS, True, IS_BFLOAT,
            )  # fmt: skip
        item += PROGRAMS
        if item < ROUTES * each:
            tl.debug_barrier()


@triton.jit
def take_middle(
    middle, ids, expert_map, call, position, end, num_ids, num_experts, PAIRS: tl.constexpr,
    DOWN_TILES: tl.constexpr, HAS_MAP: tl.constexpr, MIDDLE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """The rows of down's steps position to end from middle to shared memory, as make_middle."""
    thread = tl.arange(0, 1024)
    first, last = position // 4, (end + 3) // 4
    for start in tl.static_range(0, (UNIT + 6) // 4 * 128, 2048):
        word = start + thread * 2
        number = first + (word >> 7)
        there = number < last
        block = number // (DOWN_TILES * PAIRS)
        expert, _ = expert_of(ids, expert_map, block, there, num_ids, num_experts, HAS_MAP)
        source = middle + ((block * PAIRS + number % PAIRS).to(tl.int64) * 128 + (word & 127)) * 2
        a, b = tl.inline_asm_elementwise(
            _RECEIVE_WORDS, "=&r,=&r,l,r,r",
            [source.to(tl.int64), call, (there & (expert >= 0)).to(tl.int32)],
            dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
        tl.inline_asm_elementwise(
            _PUT_WORDS, "=r,r,r,r,r", [word * 4 + MIDDLE, a, b, there.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
