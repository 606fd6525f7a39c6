"""The products by warps with quantized rows: labels go to the tensor cores as they are.

As product_kernel otherwise; all pairs are of 3 bits.
"""

import triton
import triton.language as tl

from qsrt_runtime.ops.fused.product.kernel import first_step, first_words, load_row
from qsrt_runtime.ops.fused.product.quantized import ptx
from qsrt_runtime.ops.kernel import COLUMNS, PLACES, block_of, wait_for_previous
from qsrt_runtime.ops.warps.kernel import (
    await_labels,
    copy_labels,
    exchange,
    from_lane,
    load_words,
    share,
)

_OPERANDS = tl.constexpr(ptx.OPERANDS)


@triton.jit
def _products(
    x, exponents, slab, ids, expert_map, block_experts, block_routes, out, matrix_rows, num_ids,
    num_experts, position, end, total, route, words, there, n1, n2, n3,
    HIDDEN: tl.constexpr, BUNDLE: tl.constexpr, SLOT_STRIDE: tl.constexpr, TILES: tl.constexpr,
    STEPS: tl.constexpr, DIVISOR: tl.constexpr, DOWN: tl.constexpr, SINGLE: tl.constexpr,
    HAS_MAP: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The steps position to end of all tiles' `total`: a part of each tile to out.

    x: [rows, 64 STEPS] bytes in fragment order.   exponents: [rows, 2 STEPS].   route to n3: of
    first_step.
    """
    thread = tl.arange(0, 1024)
    strip, lane = thread >> 5, thread & 31
    group, quarter = lane >> 2, lane & 3
    # Of gate and up a step's tiles are of the first block, the first, the second, the second; of
    # down every other one is, see store_middle.
    is_first = (quarter & 1) == 0 if DOWN else quarter < 2
    first_block = tl.where(is_first, -1, 0)
    x = x.to(tl.pointer_type(tl.int32))
    exponents = exponents.to(tl.pointer_type(tl.int16))
    before = (lane - 4) & 31
    advance: tl.constexpr = (2 * SLOT_STRIDE // 4) if DOWN else 96
    while position < end:
        tile = position // STEPS
        first = position % STEPS
        last = tl.minimum(STEPS, first + end - position)
        held = route >= 0
        row = tl.maximum(route, 0) // DIVISOR
        if not DOWN:
            row += matrix_rows * (strip >> 4)
        row_step = row * STEPS + first  # of few tokens, so that 32 bits hold it
        # What the next tile needs, on its way while this one is at work.
        next_position = position + last - first
        next_expert, next_route = block_of(
            ids, expert_map, block_experts, block_routes,
            tl.minimum(next_position, total - 1) // (STEPS * TILES), group, num_ids, num_experts,
            PLACES, SINGLE, HAS_MAP,
        )  # fmt: skip
        next_words, next_there = first_words(
            slab, strip, group, quarter, next_expert, next_position, HIDDEN, BUNDLE, SLOT_STRIDE,
            TILES, STEPS, DOWN, True,
        )  # fmt: skip
        next_there &= next_position < end
        c0 = tl.zeros((1024,), tl.float32)
        c1 = c0
        c2 = c0
        c3 = c0
        for step in range(first, last):
            w1 = exchange(n1, n2, n3, lane, 0)
            w2 = exchange(n1, n2, n3, lane, 1)
            w3 = exchange(n1, n2, n3, lane, 2)
            words += advance
            is_last = step + 1 == last
            at = tl.where(is_last, next_words, words)
            more = tl.where(is_last, next_there, there)
            n1, n2, n3 = load_words(at, more, HIDDEN, SLOT_STRIDE, DOWN)
            w0 = from_lane(w3, before)
            x0, x1, x2, x3 = load_row(x + row_step * 16 + quarter * 4, held.to(tl.int32))
            both = tl.load(exponents + row_step, mask=held, other=0).to(tl.int32) & 0xFFFF
            # A lane has the sums of the places 2 quarter and 2 quarter + 1.
            both = from_lane(both, quarter * 8) | (from_lane(both, quarter * 8 + 4) << 16)
            row_step += 1
            c0, c1, c2, c3 = tl.inline_asm_elementwise(
                STEP,
                _OPERANDS,
                [w0, w1, w2, w3, x0, x1, x2, x3, first_block, both, c0, c1, c2, c3],
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
                is_pure=True,
                pack=1,
            )
        left = from_lane(route, (quarter * 8) & 31) >= 0
        right = from_lane(route, (quarter * 8 + 4) & 31) >= 0
        sums = (
            out + (tl.program_id(0) + tile).to(tl.int64) * (PLACES * COLUMNS) + strip * 16 + group
        )
        sums += 2 * quarter * COLUMNS
        tl.store(sums, c0, mask=there & left)
        tl.store(sums + 8, c2, mask=there & left)
        tl.store(sums + COLUMNS, c1, mask=there & right)
        tl.store(sums + COLUMNS + 8, c3, mask=there & right)
        position = next_position
        route = next_route
        words = next_words
        there = next_there


@triton.jit(
    do_not_specialize=["layer", "matrix_rows", "num_ids", "num_experts"],
    do_not_specialize_on_alignment=["ids", "expert_map"],
)
def quantized_kernel(
    x,
    exponents,
    slab,
    labels,
    ids,
    expert_map,
    counts,
    block_experts,
    block_routes,
    out,
    layer,
    matrix_rows,
    num_ids,
    num_experts,
    HIDDEN: tl.constexpr,
    BUNDLE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    TILES: tl.constexpr,
    STEPS: tl.constexpr,
    DIVISOR: tl.constexpr,
    TOPK: tl.constexpr,
    DOWN: tl.constexpr,
    SINGLE: tl.constexpr,
    HAS_MAP: tl.constexpr,
    COPY: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """As product_kernel; x and exponents as plain_kernel's.   COPY, STEP: ptx.copy, ptx.step."""
    copy_labels(labels, layer, COPY=COPY)
    # Of gate and up of several tokens the launch before makes the map; else it is there.
    if not (SINGLE or DOWN):
        wait_for_previous(PDL)
    total = TOPK * TILES * STEPS
    if not SINGLE:
        total = tl.load(counts) * TILES * STEPS
    position, end = share(total, tl.num_programs(0))
    _, route, words, there, n1, n2, n3 = first_step(
        slab, ids, expert_map, block_experts, block_routes, position, end, total, num_ids,
        num_experts, HIDDEN, BUNDLE, SLOT_STRIDE, TILES, STEPS, DOWN, True, SINGLE, HAS_MAP,
    )  # fmt: skip
    if SINGLE or DOWN:
        wait_for_previous(PDL)
    await_labels()
    _products(
        x, exponents, slab, ids, expert_map, block_experts, block_routes, out, matrix_rows,
        num_ids, num_experts, position, end, total, route, words, there, n1, n2, n3,
        HIDDEN, BUNDLE, SLOT_STRIDE, TILES, STEPS, DIVISOR, DOWN, SINGLE, HAS_MAP, STEP,
    )  # fmt: skip
