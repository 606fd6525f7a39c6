"""Rows of a few routes times matrices of labels, which are read once, as fast as memory gives them.

Tiles, steps, places and parts are as in expert_gemm, a strip to each of 32 warps.
"""

import triton
import triton.language as tl

from qsrt_runtime.ops.kernel import COLUMNS, PLACES, block_of, wait_for_previous
from qsrt_runtime.ops.label_gemm import ptx
from qsrt_runtime.ops.warps.kernel import from_lane, share

_LOAD_OPERANDS, _STEP_OPERANDS = tl.constexpr(ptx.LOAD_OPERANDS), tl.constexpr(ptx.STEP_OPERANDS)


@triton.jit
def _words_of(
    weights, expert, tile, step, thread, num_experts, ROWS: tl.constexpr, TILES: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Where a lane's words of a step of a tile are; of a strip beyond the rows, the last one's."""
    strip, lane = thread >> 5, thread & 31
    row = tl.minimum(tile % TILES * 512 + strip * 16, ROWS - 16)
    expert = tl.minimum(tl.maximum(expert, 0), num_experts - 1)  # where there is no block at all
    words = (expert.to(tl.int64) * ROWS + row) // 8 * (STEPS * 128)
    return weights + words + step * 128 + lane * 4


@triton.jit
def _load(words, LOAD: tl.constexpr):
    a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
        LOAD,
        _LOAD_OPERANDS,
        [words],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )
    return a, b, c, d, e, f, g, h


@triton.jit(
    do_not_specialize=["matrix_rows", "num_ids", "num_experts"],
    do_not_specialize_on_alignment=["ids", "expert_map"],
)
def label_gemm_kernel(
    x,
    weights,
    ids,
    expert_map,
    counts,
    block_experts,
    block_routes,
    out,
    matrix_rows,
    num_ids,
    num_experts,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    STEPS: tl.constexpr,
    DIVISOR: tl.constexpr,
    TOPK: tl.constexpr,
    DOWN: tl.constexpr,
    SINGLE: tl.constexpr,
    HAS_MAP: tl.constexpr,
    LOAD: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Partial sums [parts, PLACES, COLUMNS]; one program on each multiprocessor.

    x: [rows, 64 STEPS], tiles in fragment order; route r's row is r // DIVISOR, for up's columns
    matrix_rows more.   weights: [experts, ROWS / 8, STEPS, 8, 16] int32, four labels each.
    LOAD, STEP: ptx.load and ptx.step.   Words are on their way two steps ahead.
    """
    thread = tl.arange(0, 1024)
    strip, lane = thread >> 5, thread & 31
    group, quarter = lane >> 2, lane & 3
    x = x.to(tl.pointer_type(tl.int32))
    # Of gate and up of several tokens the launch before makes the map; else it is there.
    if not (SINGLE or DOWN):
        wait_for_previous(PDL)
    total = TOPK * TILES * STEPS
    if not SINGLE:
        total = tl.load(counts) * TILES * STEPS
    position, end = share(total, tl.num_programs(0))
    last_tile = tl.maximum(total // STEPS - 1, 0)
    tile = tl.minimum((position + 1) // STEPS, last_tile)  # of the second step
    expert, _ = block_of(
        ids, expert_map, block_experts, block_routes, tile // TILES, group, num_ids, num_experts,
        PLACES, SINGLE, HAS_MAP,
    )  # fmt: skip
    step = (position + 1) % STEPS
    words = _words_of(weights, expert, tile, step, thread, num_experts, ROWS, TILES, STEPS)
    m0, m1, m2, m3, m4, m5, m6, m7 = _load(words, LOAD)
    tile = tl.minimum(position // STEPS, last_tile)
    expert, route = block_of(
        ids, expert_map, block_experts, block_routes, tile // TILES, group, num_ids, num_experts,
        PLACES, SINGLE, HAS_MAP,
    )  # fmt: skip
    step = position % STEPS
    words = _words_of(weights, expert, tile, step, thread, num_experts, ROWS, TILES, STEPS)
    n0, n1, n2, n3, n4, n5, n6, n7 = _load(words, LOAD)
    if SINGLE or DOWN:
        wait_for_previous(PDL)
    while position < end:
        tile = position // STEPS
        first = position % STEPS
        last = tl.minimum(STEPS, first + end - position)
        held = (route >= 0).to(tl.int32)
        row = tl.maximum(route, 0) // DIVISOR
        if not DOWN:
            row += matrix_rows * (strip >> 4)
        source = x + row.to(tl.int64) * (STEPS * 32) + (first * 4 + quarter) * 8
        next_tile = tl.minimum(tile + 1, last_tile)
        next_expert, next_route = block_of(
            ids, expert_map, block_experts, block_routes, next_tile // TILES, group, num_ids,
            num_experts, PLACES, SINGLE, HAS_MAP,
        )  # fmt: skip
        next_words = _words_of(
            weights, next_expert, next_tile, 0, thread, num_experts, ROWS, TILES, STEPS
        )
        c0 = tl.zeros((1024,), tl.float32)
        c1, c2, c3 = c0, c0, c0
        for at_step in range(first, last):
            w0, w1, w2, w3, w4, w5, w6, w7 = n0, n1, n2, n3, n4, n5, n6, n7
            n0, n1, n2, n3, n4, n5, n6, n7 = m0, m1, m2, m3, m4, m5, m6, m7
            ahead = at_step + 2
            at = words + (ahead - first) * 128
            if ahead >= STEPS:
                at = next_words + (ahead - STEPS) * 128
            m0, m1, m2, m3, m4, m5, m6, m7 = _load(at, LOAD)
            c0, c1, c2, c3 = tl.inline_asm_elementwise(
                STEP,
                _STEP_OPERANDS,
                [w0, w1, w2, w3, w4, w5, w6, w7, source.to(tl.int64), held, c0, c1, c2, c3],
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
                is_pure=False,
                pack=1,
            )
            source += 32
        # A lane has the sums of the places 2 quarter and 2 quarter + 1.
        there = tile % TILES * 512 + strip * 16 < ROWS
        left = there & (from_lane(route, (quarter * 8) & 31) >= 0)
        right = there & (from_lane(route, (quarter * 8 + 4) & 31) >= 0)
        sums = out + (tl.program_id(0) + tile).to(tl.int64) * (PLACES * COLUMNS)
        sums += 2 * quarter * COLUMNS + strip * 16 + group
        tl.store(sums, c0, mask=left)
        tl.store(sums + 8, c2, mask=left)
        tl.store(sums + COLUMNS, c1, mask=right)
        tl.store(sums + COLUMNS + 8, c3, mask=right)
        position += last - first
        route = next_route
        words = next_words
