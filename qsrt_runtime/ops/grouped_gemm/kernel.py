"""Rows, sorted by expert, times matrices of E4M3 labels."""

import triton
import triton.language as tl

from qsrt_runtime.ops.kernel import label_values


@triton.jit(do_not_specialize=["first_expert", "end_expert", "matrix_rows"])
def grouped_gemm_kernel(
    x,
    weights,
    first_block,
    block_experts,
    order,
    out,
    first_expert,
    end_expert,
    matrix_rows,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    DIVISOR: tl.constexpr,
    DOWN: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    CONVERT0: tl.constexpr,
    CONVERT1: tl.constexpr,
    CONVERT2: tl.constexpr,
    CONVERT3: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tiles of BLOCK routes and WIDTH rows of the weights, program by program.

    x: [rows, DEPTH] in word order; route r's row is r // DIVISOR, for up's results matrix_rows
    further.   weights: [end_expert - first_expert, ROWS / 8, DEPTH / 64, 8, 16] int32, four labels
    each, in fragment order.   out: [routes, ROWS].
    CONVERT0 to CONVERT3: see label_values. A byte of all words is what a product of depth 16 takes
    from registers: no label passes through shared memory a second time.
    GROUP: blocks that share a tile of weights, one after another, while it is in the cache.
    """
    tiles: tl.constexpr = (ROWS + WIDTH - 1) // WIDTH
    start = tl.load(first_block + first_expert)
    blocks = tl.load(first_block + end_expert) - start
    number = tl.program_id(0)
    while number < blocks * tiles:
        group = number // (GROUP * tiles)
        size = tl.minimum(blocks - group * GROUP, GROUP)
        block = start + group * GROUP + number % (GROUP * tiles) % size
        tile = number % (GROUP * tiles) // size
        expert = tl.load(block_experts + block) - first_expert
        route = tl.load(order + block * BLOCK + tl.arange(0, BLOCK))
        row = tl.maximum(route, 0) // DIVISOR
        if not DOWN:
            row += matrix_rows * (tile * WIDTH // 256 % 2)
        channel = tile * WIDTH + tl.arange(0, WIDTH)
        depth = tl.arange(0, 64)
        source = x + row.to(tl.int64)[:, None] * DEPTH + depth[None, :]
        weight_row = expert.to(tl.int64) * ROWS + tl.minimum(channel, ROWS - 1)
        weight = weights + (weight_row // 8 * (DEPTH * 2) + weight_row % 8 * 16)[:, None]
        weight += tl.arange(0, 16)[None, :]
        sums = tl.zeros((WIDTH, BLOCK), tl.float32)
        for at in tl.range(0, DEPTH, 64, num_stages=STAGES):
            rows = tl.load(source + at)
            words = tl.load(weight + at * 2)
            l0 = label_values(words, 0, x.dtype.element_ty, CONVERT0)
            l1 = label_values(words, 1, x.dtype.element_ty, CONVERT1)
            l2 = label_values(words, 2, x.dtype.element_ty, CONVERT2)
            l3 = label_values(words, 3, x.dtype.element_ty, CONVERT3)
            labels = tl.join(tl.join(l0, l2), tl.join(l1, l3))
            labels = tl.reshape(tl.permute(labels, (0, 2, 3, 1)), (WIDTH, 64))
            sums = tl.dot(labels, tl.trans(rows), sums)
        target = out + route.to(tl.int64)[:, None] * ROWS + channel[None, :]
        there = (route >= 0)[:, None] & (channel < ROWS)[None, :]
        tl.store(target, tl.trans(sums).to(out.dtype.element_ty), mask=there)
        number += tl.num_programs(0)
