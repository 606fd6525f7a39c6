"""The products by warps for up to 32 routes of an expert, which share each decoded weight.

As product_kernel otherwise; all pairs are of 3 bits.
"""

import triton
import triton.language as tl

from qsrt_runtime.ops.fused.product import ptx
from qsrt_runtime.ops.kernel import COLUMNS, wait_for_previous
from qsrt_runtime.ops.warps.kernel import (
    await_labels,
    copy_labels,
    exchange,
    from_lane,
    load_words,
    place_of,
    share,
)

_WORDS2, _WORDS4 = tl.constexpr(ptx.wide_operands(2)), tl.constexpr(ptx.wide_operands(4))


@triton.jit
def _words_of(
    slab, block_experts, position, last, strip, lane, HIDDEN: tl.constexpr, BUNDLE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr, TILES: tl.constexpr, STEPS: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """Where a lane's word at a position is (see exchange), and whether there is any."""
    position = tl.minimum(position, last)
    part, step = position // STEPS % TILES, position % STEPS
    expert = tl.load(block_experts + position // (STEPS * TILES))
    words = slab + expert.to(tl.int64) * (BUNDLE // 4)
    if DOWN:
        hidden_tile = part * 32 + strip
        words += 6 * HIDDEN + 2 * step.to(tl.int64) * (SLOT_STRIDE // 4)
        words += hidden_tile * 24 + place_of(lane, HIDDEN, SLOT_STRIDE, DOWN)
        return words, hidden_tile < HIDDEN // 16
    else:
        slot = part * 8 + (strip & 7)
        words += (strip >> 4) * (3 * HIDDEN) + slot.to(tl.int64) * (SLOT_STRIDE // 4)
        words += ((strip >> 3) & 1) * (HIDDEN // 16 * 24) + step * 96 + lane
        return words, strip >= 0


@triton.jit
def _row(
    block_routes, block, place, strip, quarter, matrix_rows, PLACES: tl.constexpr,
    STEPS: tl.constexpr, DIVISOR: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """Where a lane's row of a place begins, in words; some row's where the place is empty."""
    route = tl.load(block_routes + block * PLACES + place)
    row = tl.maximum(route, 0) // DIVISOR
    if not DOWN:
        row += matrix_rows * (strip >> 4)
    return row * (STEPS * 32) + quarter * 8


@triton.jit
def _store(sums, block_routes, block, first, quarter, there, c0, c1, c2, c3, PLACES: tl.constexpr):
    """A lane's sums of the places first + 2 quarter and the next."""
    place = first + 2 * quarter
    left = tl.load(block_routes + block * PLACES + place) >= 0
    right = tl.load(block_routes + block * PLACES + place + 1) >= 0
    target = sums + place * COLUMNS
    tl.store(target, c0, mask=there & left)
    tl.store(target + 8, c2, mask=there & left)
    tl.store(target + COLUMNS, c1, mask=there & right)
    tl.store(target + COLUMNS + 8, c3, mask=there & right)


@triton.jit(
    do_not_specialize=["layer", "matrix_rows"],
)
def wide_kernel(
    x,
    slab,
    labels,
    counts,
    block_experts,
    block_routes,
    out,
    layer,
    matrix_rows,
    HIDDEN: tl.constexpr,
    BUNDLE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    TILES: tl.constexpr,
    STEPS: tl.constexpr,
    DIVISOR: tl.constexpr,
    DOWN: tl.constexpr,
    PLACES: tl.constexpr,
    STEP2: tl.constexpr,
    STEP4: tl.constexpr,
    PDL: tl.constexpr,
):
    """Partial sums [parts, PLACES, COLUMNS]; PLACES is 32.   STEP2, STEP4: ptx.wide_step."""
    copy_labels(labels, layer)
    wait_for_previous(PDL)
    thread = tl.arange(0, 1024)
    strip, lane = thread >> 5, thread & 31
    group, quarter = lane >> 2, lane & 3
    before = (lane - 4) & 31
    advance: tl.constexpr = (2 * SLOT_STRIDE // 4) if DOWN else 96
    x = x.to(tl.pointer_type(tl.int32))
    total = tl.load(counts) * TILES * STEPS
    position, end = share(total, tl.num_programs(0))
    words, there = _words_of(
        slab, block_experts, position, tl.maximum(total, 1) - 1, strip, lane, HIDDEN, BUNDLE,
        SLOT_STRIDE, TILES, STEPS, DOWN,
    )  # fmt: skip
    n1, n2, n3 = load_words(words, there & (position < end), HIDDEN, SLOT_STRIDE, DOWN)
    await_labels()
    while position < end:
        tile = position // STEPS
        first = position % STEPS
        last = tl.minimum(STEPS, first + end - position)
        block = tile // TILES
        r0 = _row(
            block_routes, block, group, strip, quarter, matrix_rows, PLACES, STEPS, DIVISOR, DOWN
        )
        r1 = _row(
            block_routes,
            block,
            group + 8,
            strip,
            quarter,
            matrix_rows,
            PLACES,
            STEPS,
            DIVISOR,
            DOWN,
        )
        r2 = _row(
            block_routes,
            block,
            group + 16,
            strip,
            quarter,
            matrix_rows,
            PLACES,
            STEPS,
            DIVISOR,
            DOWN,
        )
        r3 = _row(
            block_routes,
            block,
            group + 24,
            strip,
            quarter,
            matrix_rows,
            PLACES,
            STEPS,
            DIVISOR,
            DOWN,
        )
        is_full = tl.load(block_routes + block * PLACES + 16) >= 0
        next_position = position + last - first
        next_words, next_there = _words_of(
            slab, block_experts, next_position, total - 1, strip, lane, HIDDEN, BUNDLE,
            SLOT_STRIDE, TILES, STEPS, DOWN,
        )  # fmt: skip
        next_there &= next_position < end
        c0 = tl.zeros((1024,), tl.float32)
        c1, c2, c3, c4, c5, c6, c7 = c0, c0, c0, c0, c0, c0, c0
        c8, c9, c10, c11, c12, c13, c14, c15 = c0, c0, c0, c0, c0, c0, c0, c0
        for step in range(first, last):
            w1 = exchange(n1, n2, n3, lane, 0)
            w2 = exchange(n1, n2, n3, lane, 1)
            w3 = exchange(n1, n2, n3, lane, 2)
            w0 = from_lane(w3, before)
            words += advance
            is_last = step + 1 == last
            at = tl.where(is_last, next_words, words)
            more = tl.where(is_last, next_there, there)
            n1, n2, n3 = load_words(at, more, HIDDEN, SLOT_STRIDE, DOWN)
            source = (x + step * 32).to(tl.int64) + lane * 0
            if is_full:
                c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, c12, c13, c14, c15 = (
                    tl.inline_asm_elementwise(
                        STEP4,
                        _WORDS4,
                        [w0, w1, w2, w3, source, r0, r1, r2, r3, c0, c1, c2, c3, c4, c5, c6, c7,
                         c8, c9, c10, c11, c12, c13, c14, c15],
                        dtype=(tl.float32, tl.float32, tl.float32, tl.float32,
                               tl.float32, tl.float32, tl.float32, tl.float32,
                               tl.float32, tl.float32, tl.float32, tl.float32,
                               tl.float32, tl.float32, tl.float32, tl.float32),
                        is_pure=True,
                        pack=1,
                    )
                )  # fmt: skip
            else:
                c0, c1, c2, c3, c4, c5, c6, c7 = tl.inline_asm_elementwise(
                    STEP2,
                    _WORDS2,
                    [w0, w1, w2, w3, source, r0, r1, c0, c1, c2, c3, c4, c5, c6, c7],
                    dtype=(tl.float32, tl.float32, tl.float32, tl.float32,
                           tl.float32, tl.float32, tl.float32, tl.float32),
                    is_pure=True,
                    pack=1,
                )  # fmt: skip
        sums = out + (tl.program_id(0) + tile).to(tl.int64) * (PLACES * COLUMNS)
        sums += strip * 16 + group
        _store(sums, block_routes, block, 0, quarter, there, c0, c1, c2, c3, PLACES)
        _store(sums, block_routes, block, 8, quarter, there, c4, c5, c6, c7, PLACES)
        if is_full:
            _store(sums, block_routes, block, 16, quarter, there, c8, c9, c10, c11, PLACES)
            _store(sums, block_routes, block, 24, quarter, there, c12, c13, c14, c15, PLACES)
        position = next_position
        words = next_words
        there = next_there
