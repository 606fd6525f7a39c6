"""The products of expert_gemm a strip to a warp: the labels of 3 bits lie in shared memory, and a
warp decodes a strip straight into the A fragments of the tensor cores, mostly in PTX (ptx.py).
Steps, tiles and parts are as in expert_gemm.
"""

import triton
import triton.language as tl

from qsrt_runtime.ops.fused.product import ptx
from qsrt_runtime.ops.kernel import (
    COLUMNS,
    PLACES,
    STATES,
    block_of,
    low_bits,
    wait_for_previous,
)
from qsrt_runtime.ops.warps.kernel import (
    await_labels,
    copy_labels,
    exchange,
    from_lane,
    load_words,
    place_of,
    share,
)

_ROW, _SHARED_ROW = tl.constexpr(ptx.ROW), tl.constexpr(ptx.SHARED_ROW)
_SEND = tl.constexpr(ptx.SEND)
_STEP_WORDS = tl.constexpr(ptx.operands(12))
_PRODUCT_WORDS = tl.constexpr(ptx.operands(24))


@triton.jit
def _pair_of_labels(labels, bits, w0, w1, w2, w3, w4, NUMBER: tl.constexpr):
    """Weights 2 NUMBER and 2 NUMBER + 1 of a lane's group of 2 or 4 bits, packed."""
    packed = w0 * 0
    for i in tl.static_range(0, 2):
        end = 32 + bits * (2 * NUMBER + i + 1)
        word = (end - 1) >> 5
        new = tl.where(word == 1, w1, tl.where(word == 2, w2, tl.where(word == 3, w3, w4)))
        old = tl.where(word == 1, w0, tl.where(word == 2, w1, tl.where(word == 3, w2, w3)))
        new = new.to(tl.uint32, bitcast=True).to(tl.uint64)
        both = (old.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | new
        state = ((both >> (32 * (word + 1) - end).to(tl.uint64)) & 0xFFFF).to(tl.int32)
        halves = labels.to(tl.pointer_type(tl.int16))
        label = tl.load(halves + (bits - 2) * STATES + state).to(tl.int32) & 0xFFFF
        packed |= label << (16 * i)
    return packed


@triton.jit
def _other_step(
    labels, bits, w0, w1, w2, w3, w4, x0, x1, x2, x3, x4, x5, x6, x7, c0, c1, c2, c3,
    PRODUCTS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """A step at 2 or 4 bits, whose labels come from global memory: such pairs are rare."""
    a0 = _pair_of_labels(labels, bits, w0, w1, w2, w3, w4, 0)
    a1 = _pair_of_labels(labels, bits, w0, w1, w2, w3, w4, 1)
    a2 = _pair_of_labels(labels, bits, w0, w1, w2, w3, w4, 2)
    a3 = _pair_of_labels(labels, bits, w0, w1, w2, w3, w4, 3)
    a4 = _pair_of_labels(labels, bits, w0, w1, w2, w3, w4, 4)
    a5 = _pair_of_labels(labels, bits, w0, w1, w2, w3, w4, 5)
    a6 = _pair_of_labels(labels, bits, w0, w1, w2, w3, w4, 6)
    a7 = _pair_of_labels(labels, bits, w0, w1, w2, w3, w4, 7)
    a8 = _pair_of_labels(labels, bits, w0, w1, w2, w3, w4, 8)
    a9 = _pair_of_labels(labels, bits, w0, w1, w2, w3, w4, 9)
    a10 = _pair_of_labels(labels, bits, w0, w1, w2, w3, w4, 10)
    a11 = _pair_of_labels(labels, bits, w0, w1, w2, w3, w4, 11)
    a12 = _pair_of_labels(labels, bits, w0, w1, w2, w3, w4, 12)
    a13 = _pair_of_labels(labels, bits, w0, w1, w2, w3, w4, 13)
    a14 = _pair_of_labels(labels, bits, w0, w1, w2, w3, w4, 14)
    a15 = _pair_of_labels(labels, bits, w0, w1, w2, w3, w4, 15)
    return tl.inline_asm_elementwise(
        PRODUCTS,
        WORDS,
        [a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15,
         x0, x1, x2, x3, x4, x5, x6, x7, c0, c1, c2, c3],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.jit
def _step(
    w0, w1, w2, w3, x0, x1, x2, x3, x4, x5, x6, x7, c0, c1, c2, c3, STEP: tl.constexpr
):  # fmt: skip
    """A step at 3 bits."""
    return tl.inline_asm_elementwise(
        STEP,
        _STEP_WORDS,
        [w0, w1, w2, w3, x0, x1, x2, x3, x4, x5, x6, x7, c0, c1, c2, c3],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def first_words(
    slab, strip, group, quarter, expert, position, HIDDEN: tl.constexpr, BUNDLE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr, TILES: tl.constexpr, STEPS: tl.constexpr, DOWN: tl.constexpr,
    UNIFORM: tl.constexpr,
):  # fmt: skip
    """Where a lane's first word of a position's step is, and whether there is any.

    Where all pairs are of 3 bits, the word that the lane reads (see exchange); else the strip,
    without what depends on a pair's bits.
    """
    part, step = position // STEPS % TILES, position % STEPS
    words = slab + expert.to(tl.int64) * (BUNDLE // 4)
    if DOWN:
        hidden_tile = part * 32 + strip
        there = hidden_tile < HIDDEN // 16
        words += 6 * HIDDEN + 2 * step.to(tl.int64) * (SLOT_STRIDE // 4)
        if UNIFORM:
            words += hidden_tile * 24 + place_of(group * 4 + quarter, HIDDEN, SLOT_STRIDE, DOWN)
        else:
            words += (quarter >> 1) * (SLOT_STRIDE // 4)
    else:
        there = strip >= 0
        slot = part * 8 + (strip & 7)
        words += (strip >> 4) * (3 * HIDDEN) + slot.to(tl.int64) * (SLOT_STRIDE // 4)
        if UNIFORM:
            words += ((strip >> 3) & 1) * (HIDDEN // 16 * 24) + step * 96 + group * 4 + quarter
    return words, there


@triton.jit
def load_row(source, held, SHARED: tl.constexpr = False):
    """Four words of a tile's rows, zeros where the place is empty."""
    x0, x1, x2, x3 = tl.inline_asm_elementwise(
        _SHARED_ROW if SHARED else _ROW,
        "=r,=r,=r,=r,r,r" if SHARED else "=r,=r,=r,=r,l,r",
        [source, held],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )
    return x0, x1, x2, x3


@triton.jit
def _send(target, value, call, there):
    """A sum, and beside it the call that it is of, for programs that wait for it."""
    tl.inline_asm_elementwise(
        _SEND, "=r,l,f,r,r", [target.to(tl.int64), value, call, there.to(tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _first_of(
    slab, ids, expert_map, block_experts, block_routes, position, total, num_ids, num_experts,
    HIDDEN: tl.constexpr, BUNDLE: tl.constexpr, SLOT_STRIDE: tl.constexpr, TILES: tl.constexpr,
    STEPS: tl.constexpr, DOWN: tl.constexpr, UNIFORM: tl.constexpr, SINGLE: tl.constexpr,
    HAS_MAP: tl.constexpr,
):  # fmt: skip
    """A position's expert, its routes, and first_words; past the last one's those of the last."""
    thread = tl.arange(0, 1024)
    strip, lane = thread >> 5, thread & 31
    group, quarter = lane >> 2, lane & 3
    expert, route = block_of(
        ids, expert_map, block_experts, block_routes,
        tl.minimum(position, total - 1) // (STEPS * TILES), group, num_ids, num_experts,
        PLACES, SINGLE, HAS_MAP,
    )  # fmt: skip
    words, there = first_words(
        slab, strip, group, quarter, expert, position, HIDDEN, BUNDLE, SLOT_STRIDE,
        TILES, STEPS, DOWN, UNIFORM,
    )  # fmt: skip
    return expert, route, words, there


@triton.jit
def first_step(
    slab, ids, expert_map, block_experts, block_routes, position, end, total, num_ids, num_experts,
    HIDDEN: tl.constexpr, BUNDLE: tl.constexpr, SLOT_STRIDE: tl.constexpr, TILES: tl.constexpr,
    STEPS: tl.constexpr, DOWN: tl.constexpr, UNIFORM: tl.constexpr, SINGLE: tl.constexpr,
    HAS_MAP: tl.constexpr,
):  # fmt: skip
    """What products needs of the first position before there are rows: its expert, routes and
    words, which are on their way from then on.
    """
    expert, route, words, there = _first_of(
        slab, ids, expert_map, block_experts, block_routes, position, total, num_ids, num_experts,
        HIDDEN, BUNDLE, SLOT_STRIDE, TILES, STEPS, DOWN, UNIFORM, SINGLE, HAS_MAP,
    )  # fmt: skip
    lane = tl.arange(0, 1024) & 31
    n1, n2, n3 = lane, lane, lane
    if UNIFORM:
        n1, n2, n3 = load_words(words, there & (position < end), HIDDEN, SLOT_STRIDE, DOWN)
    return expert, route, words, there, n1, n2, n3


@triton.jit
def products(
    x, slab, labels, codes, ids, expert_map, block_experts, block_routes, out, layer, first_pair,
    matrix_rows, num_ids, num_experts, position, end, total,
    expert, route, words, there, n1, n2, n3, call,
    HIDDEN: tl.constexpr, BUNDLE: tl.constexpr, SLOT_STRIDE: tl.constexpr, PAIRS: tl.constexpr,
    TILES: tl.constexpr, STEPS: tl.constexpr, DIVISOR: tl.constexpr, DOWN: tl.constexpr,
    UNIFORM: tl.constexpr, SINGLE: tl.constexpr, HAS_MAP: tl.constexpr, STEP: tl.constexpr,
    PRODUCTS: tl.constexpr, LONG: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """The steps position to end of all tiles' `total`: a part of each tile to out.

    As plain_kernel, a strip to each of 32 warps.   expert to n3: of first_step.
    LONG: whether what the next tile needs is found after the last tile too, for which ptxas makes
    shorter loops of the steps.
    STEP, PRODUCTS: ptx.step and ptx.products for x's type.
    """
    thread = tl.arange(0, 1024)
    strip, lane = thread >> 5, thread & 31
    group, quarter = lane >> 2, lane & 3
    if not ALONE:
        x = x.to(tl.pointer_type(tl.int32))
    before = (lane - 4) & 31
    advance: tl.constexpr = (2 * SLOT_STRIDE // 4) if DOWN else (96 if UNIFORM else 0)
    while position < end:
        tile = position // STEPS
        first = position % STEPS
        last = tl.minimum(STEPS, first + end - position)
        part = tile % TILES
        held = (route >= 0).to(tl.int32)
        row = tl.maximum(route, 0) // DIVISOR
        if not DOWN:
            row += matrix_rows * (strip >> 4)
        if ALONE:
            steps = position if DOWN else row * STEPS + first
            source = x + (steps * 4 + quarter) * 32
        else:
            source = x + row.to(tl.int64) * (STEPS * 32) + (first * 4 + quarter) * 8
        # What the next tile needs, on its way while this one is at work.
        next_position = position + last - first
        if LONG:
            next_expert, next_route, next_words, next_there = _first_of(
                slab, ids, expert_map, block_experts, block_routes, next_position, total, num_ids,
                num_experts, HIDDEN, BUNDLE, SLOT_STRIDE, TILES, STEPS, DOWN, UNIFORM, SINGLE,
                HAS_MAP,
            )  # fmt: skip
            next_there &= next_position < end
        else:
            next_expert, next_route, next_words, next_there = expert, route, words, there & False
            if next_position < end:
                next_expert, next_route, next_words, next_there = _first_of(
                    slab, ids, expert_map, block_experts, block_routes, next_position, total,
                    num_ids, num_experts, HIDDEN, BUNDLE, SLOT_STRIDE, TILES, STEPS, DOWN, UNIFORM,
                    SINGLE, HAS_MAP,
                )  # fmt: skip
        c0 = tl.zeros((1024,), tl.float32)
        c1, c2, c3 = c0, c0, c0
        for step in range(first, last):
            if UNIFORM:
                w1 = exchange(n1, n2, n3, lane, 0)
                w2 = exchange(n1, n2, n3, lane, 1)
                w3 = exchange(n1, n2, n3, lane, 2)
                words += advance
                is_last = step + 1 == last
                at = tl.where(is_last, next_words, words)
                more = tl.where(is_last, next_there, there)
                n1, n2, n3 = load_words(at, more, HIDDEN, SLOT_STRIDE, DOWN)
                newest = w3
            else:
                pair = first_pair + (step // 4 if DOWN else part)
                side = (quarter & 1) if DOWN else ((strip >> 3) & 1)
                low = low_bits(codes, expert, pair, layer, PAIRS, DOWN)
                bits = tl.where(side == 1, 6 - low, low)
                hidden_tile = part * 32 + strip if DOWN else step * 4 + quarter
                at = words + side * (HIDDEN // 16 * 8 * low) + hidden_tile * 8 * bits + group * bits
                w1 = tl.load(at, mask=there, other=0)
                w2 = tl.load(at + 1, mask=there, other=0)
                w3 = tl.load(at + 2, mask=there & (bits > 2), other=0)
                w4 = tl.load(at + 3, mask=there & (bits > 3), other=0)
                newest = tl.where(bits == 2, w2, tl.where(bits == 3, w3, w4))
                words += advance
            w0 = from_lane(newest, before)
            x0, x1, x2, x3 = load_row(source, held, ALONE)
            x4, x5, x6, x7 = load_row(source + (16 if ALONE else 4), held, ALONE)
            source += 128 if ALONE else 32
            if UNIFORM or low == 3:
                c0, c1, c2, c3 = _step(
                    w0, w1, w2, w3, x0, x1, x2, x3, x4, x5, x6, x7, c0, c1, c2, c3, STEP
                )
            else:
                c0, c1, c2, c3 = _other_step(
                    labels, bits, w0, w1, w2, w3, w4, x0, x1, x2, x3, x4, x5, x6, x7,
                    c0, c1, c2, c3, PRODUCTS, _PRODUCT_WORDS,
                )  # fmt: skip
        if ALONE:
            has = there & (quarter == 0) & (from_lane(route, lane * 0) >= 0)
            at = (tl.program_id(0) + tile).to(tl.int64) * COLUMNS + strip * 16 + group
            _send(out + 2 * at, c0, call, has)
            _send(out + 2 * at + 16, c2, call, has)
        else:
            # A lane has the sums of the places 2 quarter and 2 quarter + 1.
            left = from_lane(route, (quarter * 8) & 31) >= 0
            right = from_lane(route, (quarter * 8 + 4) & 31) >= 0
            at = (tl.program_id(0) + tile).to(tl.int64) * PLACES + 2 * quarter
            sums = out + at * COLUMNS + strip * 16 + group
            tl.store(sums, c0, mask=there & left)
            tl.store(sums + 8, c2, mask=there & left)
            tl.store(sums + COLUMNS, c1, mask=there & right)
            tl.store(sums + COLUMNS + 8, c3, mask=there & right)
        position, expert, route = next_position, next_expert, next_route
        words, there = next_words, next_there


@triton.jit(
    do_not_specialize=["layer", "first_pair", "matrix_rows", "num_ids", "num_experts"],
    do_not_specialize_on_alignment=["codes", "ids", "expert_map"],
)
def product_kernel(
    x,
    slab,
    labels,
    codes,
    ids,
    expert_map,
    counts,
    block_experts,
    block_routes,
    out,
    layer,
    first_pair,
    matrix_rows,
    num_ids,
    num_experts,
    HIDDEN: tl.constexpr,
    BUNDLE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PAIRS: tl.constexpr,
    TILES: tl.constexpr,
    STEPS: tl.constexpr,
    DIVISOR: tl.constexpr,
    TOPK: tl.constexpr,
    DOWN: tl.constexpr,
    UNIFORM: tl.constexpr,
    SINGLE: tl.constexpr,
    HAS_MAP: tl.constexpr,
    STEP: tl.constexpr,
    PRODUCTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """As plain_kernel; one program on each multiprocessor."""
    copy_labels(labels, layer)
    # Of gate and up of several tokens the launch before makes the map; else it is there.
    if not (SINGLE or DOWN):
        wait_for_previous(PDL)
    total = TOPK * TILES * STEPS
    if not SINGLE:
        total = tl.load(counts) * TILES * STEPS
    position, end = share(total, tl.num_programs(0))
    expert, route, words, there, n1, n2, n3 = first_step(
        slab, ids, expert_map, block_experts, block_routes, position, end, total, num_ids,
        num_experts, HIDDEN, BUNDLE, SLOT_STRIDE, TILES, STEPS, DOWN, UNIFORM, SINGLE, HAS_MAP,
    )  # fmt: skip
    if SINGLE or DOWN:
        wait_for_previous(PDL)
    await_labels()
    products(
        x, slab, labels, codes, ids, expert_map, block_experts, block_routes, out, layer,
        first_pair, matrix_rows, num_ids, num_experts, position, end, total, expert, route, words,
        there, n1, n2, n3, 0, HIDDEN, BUNDLE, SLOT_STRIDE, PAIRS, TILES, STEPS, DIVISOR, DOWN,
        UNIFORM, SINGLE, HAS_MAP, STEP, PRODUCTS, True, False,
    )  # fmt: skip
