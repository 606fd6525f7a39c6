"""Rows times the stored trellis of gate and up, or of down, decoded in place.

The columns of a block of routes are cut into tiles of 512, 32 strips of a trellis tile's width: of
gate and up together those of one physical pair of slots (low then high record of either), of down
512 hidden channels. A step is 64 rows of all strips of a tile. All steps of all tiles stand in one
line, of which every program takes an equal run, so that all multiprocessors are busy at one token
too; what a program makes of a tile is a part of its sum, and the next launch adds the parts.

This is the plain way, for any GPU and the interpreter; fused has the other.
"""

import triton
import triton.language as tl

from qsrt_runtime.ops.kernel import (
    COLUMNS,
    block_of,
    decode,
    e4m3_numbers,
    in_fragment_order,
    power_of_two,
    wait_for_previous,
)


@triton.jit
def _numbers(labels, DTYPE: tl.constexpr):
    """E4M3 bytes as what tensor cores take of them; in float32 where that is DTYPE."""
    if DTYPE.is_fp32():
        return e4m3_numbers(labels)
    else:
        return labels.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _quantized_product(
    sums, rows, weights, exponents, row, there, step, STEPS: tl.constexpr, DOWN: tl.constexpr
):
    """A step of quantized rows: each block's product times its power of two.

    rows: [n, 64] bytes.   exponents: [rows, 2 STEPS].   A step's tiles of gate and up are of the
    first block, the first, the second, the second; of down every other one is, see store_middle.
    """
    depth = tl.arange(0, 64)
    block = (depth >> 4) & 1 if DOWN else depth >> 5
    if weights.dtype != tl.float32:
        weights = _numbers(weights, weights.dtype)
    for number in tl.static_range(0, 2):
        own = _numbers(tl.where((block == number)[None, :], rows, 0), weights.dtype)
        source = exponents + row.to(tl.int64) * (2 * STEPS) + step * 2 + number
        exponent = tl.load(source, mask=there, other=0)
        product = tl.dot(own, weights, input_precision="ieee")
        sums += product * power_of_two(exponent)[:, None]
    return sums


@triton.jit(
    do_not_specialize=["layer", "first_pair", "matrix_rows", "num_ids", "num_experts"],
    do_not_specialize_on_alignment=["codes", "ids", "expert_map"],
)
def plain_kernel(
    x,
    exponents,
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
    PLACES: tl.constexpr,
    SINGLE: tl.constexpr,
    HAS_MAP: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Partial sums [parts, PLACES, COLUMNS] float32; program (p, c) makes WIDTH columns of them.

    x: [rows, 64 STEPS], tiles in fragment order; route r's row is r // DIVISOR, for up's columns
    matrix_rows more; of bytes where they are quantized, with exponents [rows, 2 STEPS].
    labels: [3, 65536] of x's type; for bytes the labels', or float32 where products of E4M3 are not
    to be had.   TILES: of a block; PAIRS: of the layer.
    """
    wait_for_previous(PDL)
    program = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    size: tl.constexpr = PLACES if PLACES > 16 else 16  # what tl.dot takes at least
    place = tl.arange(0, size)
    total = TOPK * TILES * STEPS
    if not SINGLE:
        total = tl.load(counts) * TILES * STEPS
    unit = tl.cdiv(total, tl.num_programs(0))
    position, end = program * unit, tl.minimum(program * unit + unit, total)
    while position < end:
        tile = position // STEPS
        first = position % STEPS
        last = tl.minimum(STEPS, first + end - position)
        block, part = tile // TILES, tile % TILES
        expert, route = block_of(
            ids,
            expert_map,
            block_experts,
            block_routes,
            block,
            place,
            num_ids,
            num_experts,
            PLACES,
            SINGLE,
            HAS_MAP,
        )
        row = tl.maximum(route, 0) // DIVISOR
        if not DOWN:
            row += matrix_rows * (tl.program_id(1) * WIDTH // 256)
        sums = tl.zeros((size, WIDTH), tl.float32)
        step = first
        while step < last:
            depth = step * 64 + tl.arange(0, 64)
            source = (
                x + row.to(tl.int64)[:, None] * (STEPS * 64) + in_fragment_order(depth)[None, :]
            )
            rows = tl.load(source, mask=(route >= 0)[:, None], other=0)
            weights = decode(
                slab,
                labels,
                codes,
                expert,
                layer,
                first_pair,
                part,
                step,
                column,
                HIDDEN,
                BUNDLE,
                SLOT_STRIDE,
                PAIRS,
                DOWN,
                UNIFORM,
            )
            if x.dtype.element_ty == tl.uint8:
                sums = _quantized_product(
                    sums, rows, weights, exponents, row, route >= 0, step, STEPS, DOWN
                )
            else:
                sums = tl.dot(rows, weights, sums)
            step += 1
        number = ((program + tile) * PLACES + place).to(tl.int64) * COLUMNS
        there = (route >= 0)[:, None]
        tl.store(out + number[:, None] + column[None, :], sums, mask=there)
        position += last - first
