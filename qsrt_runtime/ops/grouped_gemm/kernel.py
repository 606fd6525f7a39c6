"""Rows, sorted by expert, times matrices of E4M3 labels."""

import triton
import triton.language as tl

from qsrt_runtime.ops.kernel import label_values, wait_for_previous


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
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tiles of BLOCK routes and WIDTH rows of the weights, program by program.

    x: [rows, DEPTH]; route r's row is r // DIVISOR, for up's results matrix_rows further.
    weights: [end_expert - first_expert, ROWS, DEPTH] uint8.   out: [routes, ROWS].
    GROUP: blocks that share a tile of weights, one after another, while it is in the cache.
    """
    wait_for_previous(PDL)
    tiles: tl.constexpr = ROWS // WIDTH
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
        depth = tl.arange(0, STEP)
        source = x + row.to(tl.int64)[:, None] * DEPTH + depth[None, :]
        weight = weights + (expert.to(tl.int64) * ROWS + channel)[:, None] * DEPTH + depth[None, :]
        sums = tl.zeros((WIDTH, BLOCK), tl.float32)
        for at in tl.range(0, DEPTH, STEP, num_stages=STAGES):
            rows = tl.load(source + at)
            labels = tl.load(weight + at)
            sums = tl.dot(label_values(labels, x.dtype.element_ty), tl.trans(rows), sums)
        target = out + route.to(tl.int64)[:, None] * ROWS + channel[None, :]
        there = (route >= 0)[:, None] & (channel < ROWS)[None, :]
        tl.store(target, tl.trans(sums).to(out.dtype.element_ty), mask=there)
        number += tl.num_programs(0)
