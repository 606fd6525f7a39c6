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
    PLACES,
    STATES,
    block_of,
    in_fragment_order,
    low_bits,
    wait_for_previous,
)


@triton.jit
def _decode(
    slab,
    labels,
    codes,
    expert,
    layer,
    first_pair,
    part,
    step,
    column,
    HIDDEN: tl.constexpr,
    BUNDLE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PAIRS: tl.constexpr,
    DOWN: tl.constexpr,
    UNIFORM: tl.constexpr,
):
    """Weights [64, n] of a step at some columns of a tile, in the type of the labels.

    slab: words, int32.   part: of the tile, a held pair or 512 hidden channels.   column: [n].
    """
    depth = tl.arange(0, 64)
    strip, width = column >> 4, column & 15
    block, height = depth >> 4, depth & 15
    row = height[:, None]
    col = width[None, :]
    if DOWN:
        tile_row = step * 4 + block  # slot and side
        slot, side = (tile_row >> 1)[:, None] + strip[None, :] * 0, (tile_row & 1)[:, None]
        hidden_tile = part * 32 + strip[None, :]
        matrix: tl.constexpr = 24 * HIDDEN // 4
        offset = matrix
    else:
        slot = part * 8 + (strip & 7)[None, :] + block[:, None] * 0
        side = ((strip >> 3) & 1)[None, :]
        hidden_tile = (step * 4 + block)[:, None]
        offset = ((strip >> 4) * (12 * HIDDEN // 4))[None, :]
    low = 3
    if not UNIFORM:
        low = low_bits(codes, expert, first_pair + slot // 8, layer, PAIRS, DOWN)
    bits = tl.where(side == 1, 6 - low, low)
    tiles = hidden_tile + slot * 0
    base = slot.to(tl.int64) * (SLOT_STRIDE // 4) + expert.to(tl.int64) * (BUNDLE // 4)
    base += offset + side * (HIDDEN // 16) * 8 * low + tiles * 8 * bits
    # Where a weight stands in its tile's path, and the last bit of its state.
    place = 8 * (4 * (col & 7) + ((row & 7) >> 1)) + (row & 1) + 2 * (row >> 3) + 4 * (col >> 3)
    end = bits * (place + 1)
    word = (end - 1) >> 5
    there = tiles < HIDDEN // 16
    new = tl.load(slab + base + word, mask=there, other=0).to(tl.uint32, bitcast=True)
    before = tl.where(word == 0, 8 * bits, word) - 1
    old = tl.load(slab + base + before, mask=there, other=0).to(tl.uint32, bitcast=True)
    both = (old.to(tl.uint64) << 32) | new.to(tl.uint64)
    state = ((both >> (32 * (word + 1) - end).to(tl.uint64)) & 0xFFFF).to(tl.int32)
    return tl.load(labels + (bits - 2) * STATES + state)


@triton.jit(
    do_not_specialize=["layer", "first_pair", "matrix_rows", "num_ids", "num_experts"],
    do_not_specialize_on_alignment=["codes", "ids", "expert_map"],
)
def plain_kernel(
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
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Partial sums [parts, PLACES, COLUMNS] float32; program (p, c) makes WIDTH columns of them.

    x: [rows, 64 STEPS], tiles in fragment order; route r's row is r // DIVISOR, for up's columns
    matrix_rows more.   labels: [3, 65536] of x's type.   TILES: of a block; PAIRS: of the layer.
    """
    wait_for_previous(PDL)
    program = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    place = tl.arange(0, 16)  # twice PLACES: what tl.dot takes at least
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
            SINGLE,
            HAS_MAP,
        )
        row = tl.maximum(route, 0) // DIVISOR
        if not DOWN:
            row += matrix_rows * (tl.program_id(1) * WIDTH // 256)
        sums = tl.zeros((16, WIDTH), tl.float32)
        step = first
        while step < last:
            depth = step * 64 + tl.arange(0, 64)
            source = (
                x + row.to(tl.int64)[:, None] * (STEPS * 64) + in_fragment_order(depth)[None, :]
            )
            rows = tl.load(source, mask=(route >= 0)[:, None], other=0)
            weights = _decode(
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
            sums = tl.dot(rows, weights, sums)
            step += 1
        number = ((program + tile) * PLACES + place).to(tl.int64) * COLUMNS
        there = (route >= 0)[:, None]
        tl.store(out + number[:, None] + column[None, :], sums, mask=there)
        position += last - first
