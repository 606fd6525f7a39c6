"""A token or two in one launch: both products and all that stands around them.

A program stays on each multiprocessor. What a program makes of a tile others take up as soon as it
is there, see ptx.
"""

import triton
import triton.language as tl

from qsrt_runtime.ops.fused.alone import ptx
from qsrt_runtime.ops.fused.ends.kernel import halves, floats, rotate, scaled
from qsrt_runtime.ops.fused.product.kernel import (
    await_labels,
    copy_labels,
    copy_more_labels,
    first_step,
    products,
)
from qsrt_runtime.ops.kernel import COLUMNS, activate, expert_of, wait_for_previous
from qsrt_runtime.ops.warps.kernel import NORM, warp_number

_RESERVE, _COPY = tl.constexpr(ptx.RESERVE), tl.constexpr(ptx.COPY)
_PUT_TWO, _GET_FOUR = tl.constexpr(ptx.PUT_TWO), tl.constexpr(ptx.GET_FOUR)
_STORE_HALVES, _STORE_BFLOATS = tl.constexpr(ptx.STORE_ROW[0]), tl.constexpr(ptx.STORE_ROW[1])
_SEND_HALVES, _SEND_BFLOATS = tl.constexpr(ptx.SEND_ROW[0]), tl.constexpr(ptx.SEND_ROW[1])
_RECEIVE_WORDS, _PUT_WORDS = tl.constexpr(ptx.RECEIVE_WORDS), tl.constexpr(ptx.PUT_WORDS)
_ROWS, _AT_ONCE, _PART_BYTES = (
    tl.constexpr(ptx.ROWS), tl.constexpr(ptx.AT_ONCE), tl.constexpr(ptx.PART_BYTES)
)
_TWO, _FOUR = tl.constexpr(ptx.receive_operands(2)), tl.constexpr(ptx.receive_operands(4))
_PUT, _GET = tl.constexpr(ptx.PUT), tl.constexpr(ptx.GET)


@triton.jit
def _store_row(at, a, b, c, d, lane, there, IS_BFLOAT: tl.constexpr):
    """A lane's four channels to their places in their tile's fragment order, in shared memory."""
    tl.inline_asm_elementwise(
        _STORE_BFLOATS if IS_BFLOAT else _STORE_HALVES, "=r,r,f,f,f,f,r",
        [at + 16 * (lane & 1) + 2 * (lane & 2), a, b, c, d, there.to(tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _load_four(source, there):
    a = tl.load(source, mask=there, other=0)
    b = tl.load(source + 1, mask=there, other=0)
    c = tl.load(source + 2, mask=there, other=0)
    d = tl.load(source + 3, mask=there, other=0)
    return a, b, c, d


@triton.jit
def _load_inputs(x, scales, start, HIDDEN: tl.constexpr, TOKENS: tl.constexpr):
    """A lane's four channels of all tokens' from `start` on, and the scales of gate."""
    channel = start + tl.arange(0, 1024) * 4
    there = channel < TOKENS * HIDDEN
    x0, x1, x2, x3 = _load_four(x + channel, there)
    s0, s1, s2, s3 = _load_four(scales + channel % HIDDEN, there)
    return x0, x1, x2, x3, s0, s1, s2, s3


@triton.jit
def _make_rows(
    x, scales, inputs, HIDDEN: tl.constexpr, SCALE_ROWS: tl.constexpr, INPUTS: tl.constexpr,
    TOKENS: tl.constexpr, IS_BFLOAT: tl.constexpr,
):  # fmt: skip
    """Tokens rotated by the scales of gate and, where INPUTS is 2, of up; see prepare_kernel.

    Every program makes all of them for itself.   inputs: _load_inputs from 0 on.
    """
    thread = tl.arange(0, 1024)
    lane = thread & 31
    x0, x1, x2, x3, s0, s1, s2, s3 = inputs
    for start in tl.static_range(0, TOKENS * HIDDEN, 4096):
        if start > 0:
            x0, x1, x2, x3, s0, s1, s2, s3 = _load_inputs(x, scales, start, HIDDEN, TOKENS)
        there = start + thread * 4 < TOKENS * HIDDEN
        if start + warp_number() * 128 < TOKENS * HIDDEN:
            for matrix in tl.static_range(0, INPUTS):
                if matrix == 1:
                    suh = scales + SCALE_ROWS * HIDDEN + (start + thread * 4) % HIDDEN
                    s0, s1, s2, s3 = _load_four(suh, there)
                a = x0.to(tl.float32) * s0.to(tl.float32) * NORM
                b = x1.to(tl.float32) * s1.to(tl.float32) * NORM
                c = x2.to(tl.float32) * s2.to(tl.float32) * NORM
                d = x3.to(tl.float32) * s3.to(tl.float32) * NORM
                a, b, c, d = rotate(a, b, c, d, lane)
                row = matrix * TOKENS * HIDDEN + start + (thread >> 5) * 128
                at = _ROWS + 2 * (row + (lane >> 2) * 16)
                _store_row(at, a, b, c, d, lane, there, IS_BFLOAT)


@triton.jit
def _first_part(tile, STEPS: tl.constexpr, UNIT: tl.constexpr):
    """A tile's first part, and how many it has."""
    first = tile * STEPS // UNIT
    return first + tile, (tile * STEPS + STEPS - 1) // UNIT - first + 1


@triton.jit
def _gather(
    sent, call, block, first_pair, done, count, PAIRS: tl.constexpr, STEPS: tl.constexpr,
    UNIT: tl.constexpr, TILES: tl.constexpr, RECEIVE: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Sums of TILES tiles of gate and up from pair `done` of a block's `count` on, to shared memory.

    Two columns to a thread. Of fewer than four tiles, 4 // TILES threads share a tile's parts.
    """
    shares: tl.constexpr = 4 // TILES
    thread = tl.arange(0, 1024)
    column, number, share = thread & 255, (thread >> 8) & (TILES - 1), (thread >> 8) // TILES
    first, parts = _first_part(block * PAIRS + (first_pair + done + number) % PAIRS, STEPS, UNIT)
    parts = tl.where(done + number < count, (parts - share + shares - 1) // shares, 0)
    source = sent + ((first + share).to(tl.int64) * COLUMNS + 2 * column) * 2
    a, b = thread * 0.0, thread * 0.0
    for turn in tl.static_range(0, ROUNDS):
        a, b = tl.inline_asm_elementwise(
            RECEIVE, _TWO,
            [(source + turn * (_AT_ONCE * shares * COLUMNS * 2)).to(tl.int64), parts - turn * _AT_ONCE, call, a, b],
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
    sent, slab, weights, middle, call, block, expert, activation, first, done, count, at,
    HIDDEN: tl.constexpr, BUNDLE: tl.constexpr, SLOT_STRIDE: tl.constexpr, PAIRS: tl.constexpr,
    BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, WEIGH: tl.constexpr, UNIT: tl.constexpr,
    TILES: tl.constexpr, RECEIVE: tl.constexpr, ROUNDS: tl.constexpr, SPREAD: tl.constexpr,
    IS_BFLOAT: tl.constexpr,
):  # fmt: skip
    """Down's rows of a block's pairs first + done to first + count, at most TILES; see
    activate_kernel.   128 channels to a warp.

    To shared memory `at`, or where SPREAD is to middle, for all programs.
    """
    shares: tl.constexpr = 4 // TILES
    thread = tl.arange(0, 1024)
    number, side, lane = thread >> 6, (thread >> 5) & 1, thread & 31
    there = (number < TILES) & (done + number < count)
    pair = (first + done + number) % PAIRS
    local = slab.to(tl.pointer_type(tl.uint8)) + expert.to(tl.int64) * BUNDLE + 36 * HIDDEN
    local += (pair * 8 + (lane >> 2)).to(tl.int64) * SLOT_STRIDE + side * 32 + (lane & 3) * 8
    gate, more_gate = halves(local, there)
    up, more_up = halves(local + 64, there)
    down, more_down = halves(local + 128, there)
    factor = NORM
    if WEIGH:
        factor *= tl.load(weights + block).to(tl.float32)
    _gather(
        sent, call, block, first, done, count, PAIRS, HIDDEN // 64, UNIT, TILES, RECEIVE, ROUNDS
    )
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
        g0, g1, g2, g3 = rotate(g0, g1, g2, g3, lane)
        h0, h1, h2, h3 = rotate(h0, h1, h2, h3, lane)
        s0, s1, s2, s3 = floats(gate, more_gate)
        g0, g1, g2, g3 = g0 * s0 * factor, g1 * s1 * factor, g2 * s2 * factor, g3 * s3 * factor
        s0, s1, s2, s3 = floats(up, more_up)
        h0, h1, h2, h3 = h0 * s0 * factor, h1 * s1 * factor, h2 * s2 * factor, h3 * s3 * factor
        if activation == 1:
            g0 = activate(g0, h0, True, BETA, LINEAR_BETA)
            g1 = activate(g1, h1, True, BETA, LINEAR_BETA)
            g2 = activate(g2, h2, True, BETA, LINEAR_BETA)
            g3 = activate(g3, h3, True, BETA, LINEAR_BETA)
        else:
            g0 = activate(g0, h0, False, BETA, LINEAR_BETA)
            g1 = activate(g1, h1, False, BETA, LINEAR_BETA)
            g2 = activate(g2, h2, False, BETA, LINEAR_BETA)
            g3 = activate(g3, h3, False, BETA, LINEAR_BETA)
        s0, s1, s2, s3 = floats(down, more_down)
        g0, g1, g2, g3 = g0 * s0 * NORM, g1 * s1 * NORM, g2 * s2 * NORM, g3 * s3 * NORM
        g0, g1, g2, g3 = rotate(g0, g1, g2, g3, lane)
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
            _store_row(at + number * 512 + byte, g0, g1, g2, g3, lane, there, IS_BFLOAT)


@triton.jit
def _make_middle(
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
                sent, slab, weights, sent, call, block, expert, activation, start, done, count,
                MIDDLE + (start + done - first) * 512, HIDDEN, BUNDLE, SLOT_STRIDE, PAIRS, BETA,
                LINEAR_BETA, WEIGH, UNIT, TILES, RECEIVE, ROUNDS, False, IS_BFLOAT,
            )  # fmt: skip
            done += TILES
            if done < count:
                tl.debug_barrier()
        block += 1
        if block * block_pairs < last:
            tl.debug_barrier()


@triton.jit
def _spread_middle(
    sent, slab, activations, weights, ids, expert_map, middle, call, num_ids, num_experts,
    HIDDEN: tl.constexpr, BUNDLE: tl.constexpr, SLOT_STRIDE: tl.constexpr, PAIRS: tl.constexpr,
    BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, WEIGH: tl.constexpr, HAS_MAP: tl.constexpr,
    UNIT: tl.constexpr, RECEIVE: tl.constexpr, ROUNDS: tl.constexpr, RECORDS: tl.constexpr,
    PROGRAMS: tl.constexpr, IS_BFLOAT: tl.constexpr,
):  # fmt: skip
    """This program's share of all of down's rows, a pair at a time, to middle."""
    tile = tl.program_id(0)
    while tile < RECORDS:
        block = tile // PAIRS
        expert, _ = expert_of(ids, expert_map, block, True, num_ids, num_experts, HAS_MAP)
        if expert >= 0:
            activation = tl.load(activations + expert)
            _make_records(
                sent, slab, weights, middle, call, block, expert, activation, tile % PAIRS, 0, 1,
                0, HIDDEN, BUNDLE, SLOT_STRIDE, PAIRS, BETA, LINEAR_BETA, WEIGH, UNIT, 1, RECEIVE,
                ROUNDS, True, IS_BFLOAT,
            )  # fmt: skip
        tile += PROGRAMS
        if tile < RECORDS:
            tl.debug_barrier()


@triton.jit
def _take_middle(
    middle, ids, expert_map, call, position, end, num_ids, num_experts, PAIRS: tl.constexpr,
    DOWN_TILES: tl.constexpr, HAS_MAP: tl.constexpr, MIDDLE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """The rows of down's steps position to end from middle to shared memory, as _make_middle."""
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
            _PUT_WORDS, "=r,r,r,r", [MIDDLE + word * 4, a, b], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _make_output(
    sent, svh, weights, ids, expert_map, out, call, num_ids, num_experts, HIDDEN: tl.constexpr,
    TILES: tl.constexpr, STEPS: tl.constexpr, UNIT: tl.constexpr,
    TOPK: tl.constexpr, CHOICES: tl.constexpr, ITEMS: tl.constexpr, WEIGH: tl.constexpr,
    HAS_MAP: tl.constexpr, RECEIVE: tl.constexpr, ROUNDS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Each token's routes rotated, scaled and summed, to out; see combine_kernel.

    128 channels of a route to a warp; those of a token meet in shared memory, where nobody needs
    the labels any more.   ITEMS: all tokens' groups of 128 channels.
    CHOICES: TOPK rounded up to a power of two, at most 32.
    """
    at_once: tl.constexpr = 32 // CHOICES if CHOICES > 4 else 8
    groups: tl.constexpr = HIDDEN // 128
    thread = tl.arange(0, 1024)
    lane, number, choice = thread & 31, (thread >> 5) // CHOICES, (thread >> 5) % CHOICES
    start = tl.program_id(0)
    while start < ITEMS:
        item = start + number * PROGRAMS
        there = (number < at_once) & (choice < TOPK) & (item < ITEMS)
        group, route = item % groups, item // groups * TOPK + choice
        expert, _ = expert_of(ids, expert_map, route, there, num_ids, num_experts, HAS_MAP)
        there &= expert >= 0
        scales = svh + group * 128 + lane * 4
        s0 = tl.load(scales, mask=there, other=0).to(tl.float32)
        s1 = tl.load(scales + 1, mask=there, other=0).to(tl.float32)
        s2 = tl.load(scales + 2, mask=there, other=0).to(tl.float32)
        s3 = tl.load(scales + 3, mask=there, other=0).to(tl.float32)
        factor = tl.where(there, NORM, 0.0)
        if WEIGH:
            factor *= tl.load(weights + route, mask=there, other=0).to(tl.float32)
        first, parts = _first_part(route * TILES + group // 4, STEPS, UNIT)
        parts = tl.where(there, parts, 0)
        source = sent + (first.to(tl.int64) * COLUMNS + group % 4 * 128 + lane * 4) * 2
        a, b, c, d = lane * 0.0, lane * 0.0, lane * 0.0, lane * 0.0
        if start + warp_number() // CHOICES * PROGRAMS < ITEMS:
            for turn in tl.static_range(0, ROUNDS):
                a, b, c, d = tl.inline_asm_elementwise(
                    RECEIVE, _FOUR,
                    [(source + turn * (_AT_ONCE * COLUMNS * 2)).to(tl.int64), parts - turn * _AT_ONCE, call, a, b, c, d],
                    dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
                )  # fmt: skip
            a, b, c, d = rotate(a, b, c, d, lane)
            a, b, c, d = a * s0 * factor, b * s1 * factor, c * s2 * factor, d * s3 * factor
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            _PUT, "=r,r,f,f,f,f", [thread * 16, a, b, c, d], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()
        item = start + (thread >> 7) * PROGRAMS
        there = (thread < at_once * 128) & (item < ITEMS)
        at = (thread >> 7) * (CHOICES * 512) + (thread & 127) * 4
        total = tl.zeros((1024,), tl.float32)
        for other in tl.static_range(0, TOPK):
            total += tl.inline_asm_elementwise(
                _GET, "=f,r", [at + other * 512], dtype=tl.float32, is_pure=False, pack=1
            )
        target = out + item // groups * HIDDEN + item % groups * 128 + (thread & 127)
        tl.store(target, total.to(out.dtype.element_ty), mask=there)
        start += at_once * PROGRAMS


@triton.jit
def _count_invalid(
    ids, expert_map, counts, num_ids, num_experts, ROUTES: tl.constexpr, HAS_MAP: tl.constexpr
):  # fmt: skip
    count = 0
    for route in tl.static_range(0, ROUTES):
        _, wrong = expert_of(ids, expert_map, route, True, num_ids, num_experts, HAS_MAP)
        count += wrong.to(tl.int32)
    tl.store(counts + 1, count)


@triton.jit(
    do_not_specialize=["layer", "first_pair", "num_ids", "num_experts"],
    do_not_specialize_on_alignment=[
        *("x", "codes", "activations", "scales", "weights", "ids", "expert_map", "out"),
    ],
)
def alone_kernel(
    x,
    slab,
    labels,
    codes,
    activations,
    scales,
    weights,
    ids,
    expert_map,
    counts,
    calls,
    gate_up,
    middle,
    down,
    out,
    layer,
    first_pair,
    num_ids,
    num_experts,
    HIDDEN: tl.constexpr,
    BUNDLE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PAIRS: tl.constexpr,
    HELD: tl.constexpr,
    TOPK: tl.constexpr,
    TOKENS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    WEIGH: tl.constexpr,
    UNIFORM: tl.constexpr,
    HAS_MAP: tl.constexpr,
    CHOICES: tl.constexpr,
    TILES: tl.constexpr,
    SPREAD: tl.constexpr,
    UP_UNIT: tl.constexpr,
    DOWN_UNIT: tl.constexpr,
    UP_RECEIVE: tl.constexpr,
    UP_ROUNDS: tl.constexpr,
    DOWN_RECEIVE: tl.constexpr,
    DOWN_ROUNDS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STEP: tl.constexpr,
    PRODUCTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """From the hidden states of a token or two to the output; every route is a block of its own.

    Arguments as those of the launches of the plain way.
    calls: [PROGRAMS], how many each program has ended.
    gate_up, down: [parts, COLUMNS, 2] int32, sums and the call that they are of, see ptx.
    PAIRS: of the layer, HELD of them here.   WEIGH: "input" or "output", what weights multiply.
    TILES: of gate and up that _make_middle takes at once.
    UP_UNIT, DOWN_UNIT: steps of a program.   UP_RECEIVE to DOWN_ROUNDS: ptx.receive, and how many.
    STEP, PRODUCTS: product.ptx.step and products for x's type.
    """
    thread = tl.arange(0, 1024)
    is_bfloat: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    program = tl.program_id(0)
    tl.inline_asm_elementwise(_RESERVE, "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1)
    copy_labels(labels, layer, 0, 4, _COPY)
    wait_for_previous(PDL)
    inputs = _load_inputs(x, scales, 0, HIDDEN, TOKENS)
    call = tl.load(calls + program) + 1
    if program == PROGRAMS - 1:  # which has the least to do
        _count_invalid(ids, expert_map, counts, num_ids, num_experts, TOKENS * TOPK, HAS_MAP)
    total: tl.constexpr = TOKENS * TOPK * HELD * (HIDDEN // 64)
    position = program * UP_UNIT
    end = tl.minimum(position + UP_UNIT, total)
    expert, route, words, there, n1, n2, n3 = first_step(
        slab, ids, expert_map, ids, ids, position, end, total, num_ids, num_experts, HIDDEN, BUNDLE,
        SLOT_STRIDE, HELD, HIDDEN // 64, False, UNIFORM, True, HAS_MAP,
    )  # fmt: skip
    copy_more_labels(labels, 4, 8, _COPY)
    _make_rows(x, scales, inputs, HIDDEN, SCALE_ROWS, INPUTS, TOKENS, is_bfloat)
    await_labels()
    rows_between: tl.constexpr = TOKENS if INPUTS == 2 else 0
    products(
        _ROWS, slab, labels, codes, ids, expert_map, ids, ids, gate_up, layer, first_pair,
        rows_between, num_ids, num_experts, position, end, total, expert, route, words, there, n1,
        n2, n3, call, HIDDEN, BUNDLE, SLOT_STRIDE, PAIRS, HELD, HIDDEN // 64, TOPK, False, UNIFORM,
        True, HAS_MAP, STEP, PRODUCTS, False, True,
    )  # fmt: skip
    tiles: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    down_total: tl.constexpr = TOKENS * TOPK * tiles * (4 * HELD)
    position = program * DOWN_UNIT
    end = tl.minimum(position + DOWN_UNIT, down_total)
    expert, route, words, there, n1, n2, n3 = first_step(
        slab, ids, expert_map, ids, ids, position, end, down_total, num_ids, num_experts, HIDDEN,
        BUNDLE, SLOT_STRIDE, tiles, 4 * HELD, True, UNIFORM, True, HAS_MAP,
    )  # fmt: skip
    rows: tl.constexpr = _ROWS + 2 * INPUTS * TOKENS * HIDDEN
    if SPREAD:
        _spread_middle(
            gate_up, slab, activations, weights, ids, expert_map, middle, call, num_ids,
            num_experts, HIDDEN, BUNDLE, SLOT_STRIDE, HELD, BETA, LINEAR_BETA, WEIGH == "input",
            HAS_MAP, UP_UNIT, UP_RECEIVE, UP_ROUNDS, TOKENS * TOPK * HELD, PROGRAMS, is_bfloat,
        )  # fmt: skip
        _take_middle(
            middle, ids, expert_map, call, position, end, num_ids, num_experts, HELD, tiles,
            HAS_MAP, rows, DOWN_UNIT,
        )  # fmt: skip
    else:
        _make_middle(
            gate_up, slab, activations, weights, ids, expert_map, call, position, end, num_ids,
            num_experts, HIDDEN, BUNDLE, SLOT_STRIDE, HELD, tiles, BETA, LINEAR_BETA,
            WEIGH == "input", HAS_MAP, rows, UP_UNIT, TILES, UP_RECEIVE, UP_ROUNDS, is_bfloat,
        )  # fmt: skip
    tl.debug_barrier()
    products(
        rows - position // 4 * 512, slab, labels, codes, ids, expert_map, ids, ids, down, layer,
        first_pair, 0, num_ids, num_experts, position, end, down_total, expert, route, words, there,
        n1, n2, n3, call, HIDDEN, BUNDLE, SLOT_STRIDE, PAIRS, tiles, 4 * HELD, 1, True, UNIFORM,
        True, HAS_MAP, STEP, PRODUCTS, False, True,
    )  # fmt: skip
    _make_output(
        down, scales + 2 * SCALE_ROWS * HIDDEN, weights, ids, expert_map, out, call, num_ids,
        num_experts, HIDDEN, tiles, 4 * HELD, DOWN_UNIT, TOPK, CHOICES,
        TOKENS * (HIDDEN // 128), WEIGH == "output", HAS_MAP, DOWN_RECEIVE, DOWN_ROUNDS, PROGRAMS,
    )  # fmt: skip
    tl.store(calls + program, call)
