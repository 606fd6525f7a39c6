"""Both products and all that stands around them, for GPUs with 227 KB of shared memory.

In one launch, where a program stays on each multiprocessor and all of them meet after either
product, whose parts others take up; or in three.
"""

import triton
import triton.language as tl

from qsrt_runtime.ops.fused.ends.kernel import (
    arrive,
    await_others,
    block_rows,
    busy_warps,
    make_middle,
    make_rows,
    touch_scales,
)
from qsrt_runtime.ops.fused.ends.output.kernel import make_output, output_inputs
from qsrt_runtime.ops.fused.product.kernel import (
    await_labels,
    copy_labels,
    first_step,
    products,
    share,
)
from qsrt_runtime.ops.kernel import COLUMNS, expert_of, wait_for_previous
from qsrt_runtime.ops.warps.kernel import warp_number


@triton.jit
def _count_invalid(
    ids, expert_map, counts, num_ids, num_experts, ROUTES: tl.constexpr, HAS_MAP: tl.constexpr
):  # fmt: skip
    count = 0
    for route in tl.static_range(0, ROUTES):
        _, wrong = expert_of(ids, expert_map, route, True, num_ids, num_experts, HAS_MAP)
        count += wrong.to(tl.int32)
    tl.store(counts + 1, count)


@triton.jit(
    do_not_specialize=[
        *("layer", "first_pair", "matrix_rows", "num_tokens", "num_ids", "num_experts"),
    ],
    do_not_specialize_on_alignment=[
        *("x", "codes", "activations", "scales", "weights", "ids", "expert_map", "out"),
    ],
)
def fused_kernel(
    x,
    rotated,
    slab,
    labels,
    codes,
    activations,
    scales,
    weights,
    ids,
    expert_map,
    counts,
    arrivals,
    block_experts,
    block_routes,
    route_places,
    gate_up,
    middle,
    down,
    out,
    layer,
    first_pair,
    matrix_rows,
    num_tokens,
    num_ids,
    num_experts,
    HIDDEN: tl.constexpr,
    BUNDLE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PAIRS: tl.constexpr,
    HELD: tl.constexpr,
    DIVISOR: tl.constexpr,
    TOPK: tl.constexpr,
    CHOICES: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    BY_ROUTE: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    WEIGH: tl.constexpr,
    UNIFORM: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STEP: tl.constexpr,
    PRODUCTS: tl.constexpr,
    LONG: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """From the hidden states of a token or two, or from prepare's rows and map, to the output.

    Arguments as those of the launches of the plain way.
    gate_up, down: [parts, PLACES, COLUMNS] float32.   middle: [routes, 256 HELD].
    arrivals: [2], the first of them 0 before and after.   PAIRS: of the layer, HELD of them here.
    WEIGH: "input" or "output", what weights multiply.
    INPUTS: rows that are made here of a token, 0 where prepare has made them.
    TOKENS: the call's, where every route is a block of its own; 0 where prepare has put those of
    an expert together.
    STEP, PRODUCTS: ptx.step and ptx.products for x's type.
    LONG: as in products.
    FIRST, LAST: of gate and up (0), down (1) and output (2) what this launch does.
    """
    copy_labels(labels, layer, 0, 8 if FIRST < 2 else 0)
    if FIRST == 0:
        wait_for_previous(PDL)
    if tl.program_id(0) == PROGRAMS - 1:  # which has the least to do
        if FIRST < LAST:
            tl.store(arrivals + 1, 0)
        if (FIRST == 0) & (INPUTS > 0):
            _count_invalid(ids, expert_map, counts, num_ids, num_experts, TOKENS * TOPK, HAS_MAP)
    SINGLE: tl.constexpr = TOKENS > 0
    num_blocks = TOKENS * TOPK
    if not SINGLE:
        num_blocks = tl.load(counts)
    tiles: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    AT_ONCE: tl.constexpr = 32 // CHOICES if CHOICES > 4 else 8
    programs = PROGRAMS
    if FIRST == LAST:  # with a constant, ptxas makes longer loops of the products
        programs = tl.num_programs(0)
    if FIRST == 0:
        total = num_blocks * HELD * (HIDDEN // 64)
        position, end = share(total, programs)
        expert, route, words, there, n1, n2, n3 = first_step(
            slab, ids, expert_map, block_experts, block_routes, position, end, total, num_ids,
            num_experts, HIDDEN, BUNDLE, SLOT_STRIDE, HELD, HIDDEN // 64, False, UNIFORM, SINGLE,
            HAS_MAP,
        )  # fmt: skip
        if INPUTS > 0:
            make_rows(x, scales, rotated, HIDDEN, SCALE_ROWS, INPUTS, TOKENS)
        await_labels()
        products(
            rotated, slab, labels, codes, ids, expert_map, block_experts, block_routes, gate_up,
            layer, first_pair, matrix_rows, num_ids, num_experts, position, end, total, expert,
            route, words, there, n1, n2, n3, 0, HIDDEN, BUNDLE, SLOT_STRIDE, PAIRS, HELD,
            HIDDEN // 64, DIVISOR, False, UNIFORM, SINGLE, HAS_MAP, STEP, PRODUCTS, LONG, False,
        )  # fmt: skip
        if LAST > 0:
            arrive(arrivals)
    if (FIRST <= 1) & (LAST >= 1):
        total = num_blocks * tiles * (4 * HELD)
        position, end = share(total, programs)
        expert, route, words, there, n1, n2, n3 = first_step(
            slab, ids, expert_map, block_experts, block_routes, position, end, total, num_ids,
            num_experts, HIDDEN, BUNDLE, SLOT_STRIDE, tiles, 4 * HELD, True, UNIFORM, SINGLE,
            HAS_MAP,
        )  # fmt: skip
        touch_scales(slab, expert, position, end, HIDDEN, BUNDLE, SLOT_STRIDE, HELD)
        # What does not depend on others is on its way while they are waited for, here and below.
        of_middle, rows, activation = block_rows(
            ids, expert_map, block_experts, block_routes, activations,
            position // (tiles * 4 * HELD), num_blocks, num_ids, num_experts, SINGLE, HAS_MAP,
        )  # fmt: skip
        if FIRST == 1:
            wait_for_previous(PDL)
        if warp_number() < busy_warps(position, end, rows, tiles, HELD):
            if FIRST == 0:
                await_others(arrivals, PROGRAMS)
            make_middle(
                gate_up, slab, activations, weights, ids, expert_map, block_experts, block_routes,
                middle, position, end, num_blocks, of_middle, rows, activation, num_ids,
                num_experts, HIDDEN, BUNDLE, SLOT_STRIDE, HELD, tiles, BETA, LINEAR_BETA,
                WEIGH == "input", SINGLE, HAS_MAP, PROGRAMS,
            )  # fmt: skip
        tl.debug_barrier()
        if FIRST == 1:
            await_labels()
        products(
            middle, slab, labels, codes, ids, expert_map, block_experts, block_routes, down,
            layer, first_pair, 0, num_ids, num_experts, position, end, total, expert, route, words,
            there, n1, n2, n3, 0, HIDDEN, BUNDLE, SLOT_STRIDE, PAIRS, tiles, 4 * HELD, 1, True,
            UNIFORM, SINGLE, HAS_MAP, STEP, PRODUCTS, LONG, False,
        )  # fmt: skip
        if LAST == 2:
            arrive(arrivals + 1)
    if LAST == 2:
        svh = scales + 2 * SCALE_ROWS * HIDDEN
        svh_rows: tl.constexpr = SCALE_ROWS if BY_ROUTE else 1
        if tl.program_id(0) < num_tokens * (HIDDEN // 128):
            inputs = output_inputs(
                tl.program_id(0), down, svh, weights, num_tokens, num_blocks, ids, expert_map,
                block_experts, route_places, num_ids, num_experts, HIDDEN, svh_rows, tiles,
                4 * HELD, TOPK, CHOICES, AT_ONCE, WEIGH == "output", SINGLE, HAS_MAP, PROGRAMS,
            )  # fmt: skip
            if FIRST < 2:
                await_others(arrivals + 1, PROGRAMS)
                if tl.program_id(0) == 0:
                    tl.store(arrivals, 0)
            else:
                wait_for_previous(PDL)
            make_output(
                down, svh, weights, ids, expert_map, block_experts, route_places, out, inputs,
                num_tokens, num_blocks, num_ids, num_experts, HIDDEN, svh_rows, tiles, 4 * HELD,
                TOPK, CHOICES, AT_ONCE, WEIGH == "output", SINGLE, HAS_MAP, PROGRAMS,
            )  # fmt: skip
