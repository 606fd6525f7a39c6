"""The kernels of a bfloat16 layer for many tokens."""

import triton
import triton.language as tl

from qsrt_runtime.ops.group.kernel import sort_routes


@triton.jit
def product_kernel(
    x, weights, first_block, block_experts, order, route_weights, out,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, DIVISOR: tl.constexpr, GATED: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, EXPERTS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """out [R, ROWS]: SiLU(x W1) * (x W3) where GATED, weights [E, 2 ROWS, DEPTH], else x W2."""
    tiles: tl.constexpr = ROWS // WIDTH
    blocks = tl.load(first_block + EXPERTS)
    matrix: tl.constexpr = 2 * ROWS if GATED else ROWS
    for number in tl.range(tl.program_id(0), blocks * tiles, tl.num_programs(0)):
        group = number // (GROUP * tiles)
        size = tl.minimum(blocks - group * GROUP, GROUP)
        block = group * GROUP + number % (GROUP * tiles) % size
        tile = number % (GROUP * tiles) // size
        expert = tl.load(block_experts + block).to(tl.int64)
        route = tl.load(order + block * BLOCK + tl.arange(0, BLOCK))
        row = tl.maximum(route, 0) // DIVISOR
        channel = tile * WIDTH + tl.arange(0, WIDTH)
        depth = tl.arange(0, STEP)
        source = x + row.to(tl.int64)[:, None] * DEPTH + depth[None, :]
        weight = weights + (expert * matrix + channel)[None, :] * DEPTH + depth[:, None]
        sums = tl.zeros((BLOCK, WIDTH), tl.float32)
        ups = tl.zeros((BLOCK, WIDTH), tl.float32)
        for at in tl.range(0, DEPTH, STEP):
            rows = tl.load(source + at)
            sums = tl.dot(rows, tl.load(weight + at), sums)
            if GATED:
                ups = tl.dot(rows, tl.load(weight + ROWS * DEPTH + at), ups)
        if GATED:
            sums = sums * tl.sigmoid(sums) * ups
        else:
            sums *= tl.load(route_weights + tl.maximum(route, 0))[:, None]
        target = out + route.to(tl.int64)[:, None] * ROWS + channel[None, :]
        tl.store(target, sums.to(tl.bfloat16), mask=(route >= 0)[:, None])


@triton.jit
def sum_kernel(parts, out, HIDDEN: tl.constexpr, TOPK: tl.constexpr, WIDTH: tl.constexpr):
    token, channel = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    for choice in tl.static_range(0, TOPK):
        row = (token * TOPK + choice).to(tl.int64) * HIDDEN
        total += tl.load(parts + row + channel).to(tl.float32)
    tl.store(out + token.to(tl.int64) * HIDDEN + channel, total.to(tl.bfloat16))


@triton.jit(do_not_specialize=["num_routes", "num_experts"])
def sort_kernel(
    ids, counts, first_block, cursors, block_experts, order, num_routes, num_experts,
    EXPERTS: tl.constexpr, ROUTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The blocks of each expert's routes, as group_kernel's first program makes them."""
    sort_routes(
        ids, ids, counts, first_block, cursors, block_experts, order, order, num_routes,
        num_experts, num_experts, EXPERTS, ROUTES, BLOCK, False, False,
    )  # fmt: skip
