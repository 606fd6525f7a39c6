"""expand by warps: a warp decodes a strip, 64 bytes along each of 16 rows at a time."""

import triton
import triton.language as tl
from triton.language.extra import cuda

from qsrt_runtime.ops.expand.warps import ptx
from qsrt_runtime.ops.kernel import STATES, low_bits
from qsrt_runtime.ops.warps.kernel import (
    await_labels,
    copy_labels,
    exchange,
    from_lane,
    load_words,
    place_of,
    share,
)

_OPERANDS, _STORE = tl.constexpr(ptx.OPERANDS), tl.constexpr(ptx.STORE)


@triton.jit
def _next_with_routes(first_block, position, end, first_expert, EACH: tl.constexpr):
    """The first position from this one on whose expert has routes, at most the end."""
    searching = position < end
    while searching:
        expert = first_expert + position // EACH
        if tl.load(first_block + expert) == tl.load(first_block + expert + 1):
            position = tl.minimum(position // EACH * EACH + EACH, end)
            searching = position < end
        else:
            searching = False
    return position


@triton.jit
def _words_of(
    slab, codes, layer, first_pair, first_expert, position, thread,
    HIDDEN: tl.constexpr, BUNDLE: tl.constexpr, SLOT_STRIDE: tl.constexpr, PAIRS: tl.constexpr,
    TILES: tl.constexpr, STEPS: tl.constexpr, DOWN: tl.constexpr, UNIFORM: tl.constexpr,
):  # fmt: skip
    """Where a lane reads at a position, whether there is anything, its tile's bits, the pair's low.

    Where all pairs are of 3 bits, the word that the lane reads (see exchange), else the first of
    its own group.
    """
    strip, lane = thread >> 5, thread & 31
    group, quarter = lane >> 2, lane & 3
    expert = first_expert + position // (TILES * STEPS)
    part, step = position // STEPS % TILES, position % STEPS
    words = slab + expert.to(tl.int64) * (BUNDLE // 4)
    there = strip >= 0
    if DOWN:
        hidden_tile = part * 32 + strip
        there = hidden_tile < HIDDEN // 16
        slot = 2 * step + strip * 0
        words += 6 * HIDDEN
        pair, side, tile_slot = step // 4, quarter & 1, quarter >> 1
    else:
        hidden_tile = step * 4 + quarter
        slot = part * 8 + (strip & 7)
        words += (strip >> 4) * (3 * HIDDEN)
        pair, side, tile_slot = part, (strip >> 3) & 1, 0
    words += slot.to(tl.int64) * (SLOT_STRIDE // 4)
    bits, low = lane * 0 + 3, 3
    if UNIFORM:
        if DOWN:
            words += hidden_tile * 24 + place_of(lane, HIDDEN, SLOT_STRIDE, DOWN)
        else:
            words += side * (HIDDEN // 16 * 24) + step * 96 + lane
    else:
        low = low_bits(codes, expert, first_pair + pair, layer, PAIRS, DOWN)
        bits = tl.where(side == 1, 6 - low, low)
        words += tile_slot * (SLOT_STRIDE // 4) + side * (HIDDEN // 16 * 8 * low)
        words += hidden_tile * 8 * bits + group * bits
    return words, there, bits, low


@triton.jit
def _label(labels, bits, w0, w1, w2, w3, w4, NUMBER: tl.constexpr):
    """The label of weight NUMBER of a lane's group of 2 or 4 bits, from global memory."""
    end = 32 + bits * (NUMBER + 1)
    word = (end - 1) >> 5
    new = tl.where(word == 1, w1, tl.where(word == 2, w2, tl.where(word == 3, w3, w4)))
    old = tl.where(word == 1, w0, tl.where(word == 2, w1, tl.where(word == 3, w2, w3)))
    new = new.to(tl.uint32, bitcast=True).to(tl.uint64)
    both = (old.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | new
    state = ((both >> (32 * (word + 1) - end).to(tl.uint64)) & 0xFFFF).to(tl.int32)
    return tl.load(labels + (bits - 2) * STATES + state).to(tl.int32)


@triton.jit
def _word(labels, bits, w0, w1, w2, w3, w4, NUMBER: tl.constexpr):
    word = w0 * 0
    for i in tl.static_range(0, 4):
        word |= _label(labels, bits, w0, w1, w2, w3, w4, NUMBER + i) << (8 * i)
    return word


@triton.jit
def _store(target, a, b, c, d, there):
    tl.inline_asm_elementwise(
        _STORE, "=r,l,r,r,r,r,r", [target, a, b, c, d, there.to(tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["layer", "first_pair", "first_expert", "num_experts"],
    do_not_specialize_on_alignment=["codes"],
)
def expand_warps_kernel(
    slab,
    labels,
    codes,
    first_block,
    out,
    layer,
    first_pair,
    first_expert,
    num_experts,
    HIDDEN: tl.constexpr,
    BUNDLE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    STEPS: tl.constexpr,
    DOWN: tl.constexpr,
    UNIFORM: tl.constexpr,
    GROUP: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """As expand_kernel, of num_experts experts; one program on each multiprocessor.

    An expert's rows are TILES tiles of 512, 32 strips; a step is 64 columns. All steps of all
    tiles stand in one line, of which each program takes an equal run.   BESIDE: the next launch may
    run beside this one.   GROUP: ptx.group.
    """
    if BESIDE:
        cuda.gdc_launch_dependents()
    copy_labels(labels, layer)
    thread = tl.arange(0, 1024)
    strip, lane = thread >> 5, thread & 31
    group, quarter = lane >> 2, lane & 3
    each: tl.constexpr = TILES * STEPS
    position, end = share(num_experts * each, tl.num_programs(0))
    position = _next_with_routes(first_block, position, end, first_expert, each)
    words, there, bits, low = _words_of(
        slab, codes, layer, first_pair, first_expert, tl.minimum(position, num_experts * each - 1),
        thread, HIDDEN, BUNDLE, SLOT_STRIDE, PAIRS, TILES, STEPS, DOWN, UNIFORM,
    )  # fmt: skip
    there &= position < end
    n1, n2, n3 = lane, lane, lane
    if UNIFORM:
        n1, n2, n3 = load_words(words, there, HIDDEN, SLOT_STRIDE, DOWN)
    await_labels()
    while position < end:
        following = _next_with_routes(first_block, position + 1, end, first_expert, each)
        w4 = lane * 0
        if UNIFORM:
            w1 = exchange(n1, n2, n3, lane, 0)
            w2 = exchange(n1, n2, n3, lane, 1)
            w3 = exchange(n1, n2, n3, lane, 2)
            newest = w3
        else:
            w1 = tl.load(words, mask=there, other=0)
            w2 = tl.load(words + 1, mask=there, other=0)
            w3 = tl.load(words + 2, mask=there & (bits > 2), other=0)
            w4 = tl.load(words + 3, mask=there & (bits > 3), other=0)
            newest = tl.where(bits == 2, w2, tl.where(bits == 3, w3, w4))
        w0 = from_lane(newest, (lane - 4) & 31)
        next_words, next_there, next_bits, next_low = _words_of(
            slab, codes, layer, first_pair, first_expert, tl.minimum(following, end - 1), thread,
            HIDDEN, BUNDLE, SLOT_STRIDE, PAIRS, TILES, STEPS, DOWN, UNIFORM,
        )  # fmt: skip
        next_there &= following < end
        if UNIFORM:
            n1, n2, n3 = load_words(next_words, next_there, HIDDEN, SLOT_STRIDE, DOWN)
        r0, r1, r2, r3, r4, r5, r6, r7 = tl.inline_asm_elementwise(
            GROUP,
            _OPERANDS,
            [w0, w1, w2, w3],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        if not (UNIFORM or low == 3):  # such pairs are rare
            r0 = _word(labels, bits, w0, w1, w2, w3, w4, 0)
            r4 = _word(labels, bits, w0, w1, w2, w3, w4, 4)
            r1 = _word(labels, bits, w0, w1, w2, w3, w4, 8)
            r5 = _word(labels, bits, w0, w1, w2, w3, w4, 12)
            r2 = _word(labels, bits, w0, w1, w2, w3, w4, 16)
            r6 = _word(labels, bits, w0, w1, w2, w3, w4, 20)
            r3 = _word(labels, bits, w0, w1, w2, w3, w4, 24)
            r7 = _word(labels, bits, w0, w1, w2, w3, w4, 28)
        local, part = position // each, position // STEPS % TILES
        row = local.to(tl.int64) * ROWS + part * 512 + strip * 16
        target = out + (row * STEPS + position % STEPS * 8 + group) * 64 + quarter * 16
        _store(target, r0, r1, r2, r3, there)
        _store(target + 8 * 64 * STEPS, r4, r5, r6, r7, there)
        position = following
        words = next_words
        there = next_there
        bits = next_bits
        low = next_low
