"""A token or two in one launch: both products and all that stands around them.

A program stays on each multiprocessor. What a program makes of a tile others take up as soon as it
is there, see ptx.
"""

import triton
import triton.language as tl

from qsrt_runtime.ops.fused.alone import ptx
from qsrt_runtime.ops.fused.alone.middle.kernel import (
    first_part,
    make_middle,
    spread_middle,
    store_row,
    take_middle,
)
from qsrt_runtime.ops.fused.ends.kernel import rotate
from qsrt_runtime.ops.fused.ends.output.kernel import sum_choices
from qsrt_runtime.ops.fused.product.kernel import (
    await_labels,
    copy_labels,
    first_step,
    products,
)
from qsrt_runtime.ops.kernel import COLUMNS, expert_of, wait_for_previous
from qsrt_runtime.ops.warps.kernel import NORM, copy_more_labels, warp_number

_RESERVE, _COPY = tl.constexpr(ptx.RESERVE), tl.constexpr(ptx.COPY)
_ROWS, _AT_ONCE = tl.constexpr(ptx.ROWS), tl.constexpr(ptx.AT_ONCE)
_FOUR = tl.constexpr(ptx.receive_operands(4))


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
                at = (row + (lane >> 2) * 16) * 2 + _ROWS
                store_row(at, a, b, c, d, lane, there, IS_BFLOAT)


@triton.jit
def _make_output(
    sent, svh, weights, ids, expert_map, out, call, num_ids, num_experts, HIDDEN: tl.constexpr,
    TILES: tl.constexpr, STEPS: tl.constexpr, UNIT: tl.constexpr, TOPK: tl.constexpr,
    CHOICES: tl.constexpr, ITEMS: tl.constexpr, WEIGH: tl.constexpr, HAS_MAP: tl.constexpr,
    RECEIVE: tl.constexpr, ROUNDS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Each token's routes rotated, scaled and summed, to out; see combine_kernel.

    128 channels of a route to a warp; those of a token meet in shared memory, where nobody needs
    rows any more.   ITEMS: all tokens' groups of 128 channels.
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
        first, parts = first_part(route * TILES + group // 4, STEPS, UNIT)
        parts = tl.where(there, parts, 0)
        source = sent + (first.to(tl.int64) * COLUMNS + group % 4 * 128 + lane * 4) * 2
        a, b, c, d = lane * 0.0, lane * 0.0, lane * 0.0, lane * 0.0
        if start + warp_number() // CHOICES * PROGRAMS < ITEMS:
            for turn in tl.static_range(0, ROUNDS):
                at = (source + turn * (_AT_ONCE * COLUMNS * 2)).to(tl.int64)
                a, b, c, d = tl.inline_asm_elementwise(
                    RECEIVE, _FOUR, [at, parts - turn * _AT_ONCE, call, a, b, c, d],
                    dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
                )  # fmt: skip
            a, b, c, d = rotate(a, b, c, d, lane)
            a, b, c, d = a * s0 * factor, b * s1 * factor, c * s2 * factor, d * s3 * factor
        sum_choices(a, b, c, d, out, start, ITEMS, HIDDEN, TOPK, CHOICES, at_once, PROGRAMS)
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
    counts: prepare's, which stands for its map, too, of which nothing is read.
    calls: [PROGRAMS], how many each program has ended.
    gate_up, down: [parts, COLUMNS, 2] int32, sums and the call that they are of, see ptx.
    middle: [routes, 128 HELD, 2] int32, two numbers of a row and the call, where SPREAD.
    PAIRS: of the layer, HELD of them here.   WEIGH: "input" or "output", what weights multiply.
    TILES: of gate and up that make_middle and spread_middle take at once.
    SPREAD: rows of down are made once, for all programs; else each makes those that it needs.
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
    call = tl.load(calls + program, cache_modifier=".cg") + 1  # beside others', of other SMs
    if program == PROGRAMS - 1:  # which has the least to do
        _count_invalid(ids, expert_map, counts, num_ids, num_experts, TOKENS * TOPK, HAS_MAP)
    total: tl.constexpr = TOKENS * TOPK * HELD * (HIDDEN // 64)
    position = program * UP_UNIT
    end = tl.minimum(position + UP_UNIT, total)
    expert, route, words, there, n1, n2, n3 = first_step(
        slab, ids, expert_map, counts, counts, position, end, total, num_ids, num_experts, HIDDEN,
        BUNDLE, SLOT_STRIDE, HELD, HIDDEN // 64, False, UNIFORM, True, HAS_MAP,
    )  # fmt: skip
    copy_more_labels(labels, 4, 8, _COPY)
    _make_rows(x, scales, inputs, HIDDEN, SCALE_ROWS, INPUTS, TOKENS, is_bfloat)
    await_labels()
    rows_between: tl.constexpr = TOKENS if INPUTS == 2 else 0
    products(
        _ROWS, slab, labels, codes, ids, expert_map, counts, counts, gate_up, layer, first_pair,
        rows_between, num_ids, num_experts, position, end, total, expert, route, words, there, n1,
        n2, n3, call, HIDDEN, BUNDLE, SLOT_STRIDE, PAIRS, HELD, HIDDEN // 64, TOPK, False, UNIFORM,
        True, HAS_MAP, STEP, PRODUCTS, False, True,
    )  # fmt: skip
    tiles: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    down_total: tl.constexpr = TOKENS * TOPK * tiles * (4 * HELD)
    position = program * DOWN_UNIT
    end = tl.minimum(position + DOWN_UNIT, down_total)
    expert, route, words, there, n1, n2, n3 = first_step(
        slab, ids, expert_map, counts, counts, position, end, down_total, num_ids, num_experts,
        HIDDEN, BUNDLE, SLOT_STRIDE, tiles, 4 * HELD, True, UNIFORM, True, HAS_MAP,
    )  # fmt: skip
    rows: tl.constexpr = _ROWS + 2 * INPUTS * TOKENS * HIDDEN
    if SPREAD:
        spread_middle(
            gate_up, slab, activations, weights, ids, expert_map, middle, call, num_ids,
            num_experts, HIDDEN, BUNDLE, SLOT_STRIDE, HELD, BETA, LINEAR_BETA, WEIGH == "input",
            HAS_MAP, UP_UNIT, TILES, UP_RECEIVE, UP_ROUNDS, TOKENS * TOPK, PROGRAMS, is_bfloat,
        )  # fmt: skip
        take_middle(
            middle, ids, expert_map, call, position, end, num_ids, num_experts, HELD, tiles,
            HAS_MAP, rows, DOWN_UNIT,
        )  # fmt: skip
    else:
        make_middle(
            gate_up, slab, activations, weights, ids, expert_map, call, position, end, num_ids,
            num_experts, HIDDEN, BUNDLE, SLOT_STRIDE, HELD, tiles, BETA, LINEAR_BETA,
            WEIGH == "input", HAS_MAP, rows, UP_UNIT, TILES, UP_RECEIVE, UP_ROUNDS, is_bfloat,
        )  # fmt: skip
    tl.debug_barrier()
    products(
        position // 4 * -512 + rows, slab, labels, codes, ids, expert_map, counts, counts, down,
        layer, first_pair, 0, num_ids, num_experts, position, end, down_total, expert, route, words,
        there, n1, n2, n3, call, HIDDEN, BUNDLE, SLOT_STRIDE, PAIRS, tiles, 4 * HELD, 1, True,
        UNIFORM, True, HAS_MAP, STEP, PRODUCTS, False, True,
    )  # fmt: skip
    tl.debug_barrier()
    _make_output(
        down, scales + 2 * SCALE_ROWS * HIDDEN, weights, ids, expert_map, out, call, num_ids,
        num_experts, HIDDEN, tiles, 4 * HELD, DOWN_UNIT, TOPK, CHOICES,
        TOKENS * (HIDDEN // 128), WEIGH == "output", HAS_MAP, DOWN_RECEIVE, DOWN_ROUNDS, PROGRAMS,
    )  # fmt: skip
    tl.store(calls + program, call)
