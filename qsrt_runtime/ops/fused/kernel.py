"""Both products and all that stands around them in three launches, for GPUs with 227 KB of shared
memory: down's launch makes its rows of gate's and up's sums, and the last one the output.
"""

import triton
import triton.language as tl

from qsrt_runtime.ops.fused.ends.kernel import block_rows, make_middle, touch_scales
from qsrt_runtime.ops.fused.ends.output.kernel import make_output, output_inputs
from qsrt_runtime.ops.fused.product.kernel import (
    await_labels,
    copy_labels,
    first_step,
    products,
    share,
)
from qsrt_runtime.ops.kernel import COLUMNS, wait_for_previous


@triton.jit(
    do_not_specialize=[
        *("layer", "first_pair", "matrix_rows", "num_tokens", "num_ids", "num_experts"),
    ],
    do_not_specialize_on_alignment=[
        *("codes", "activations", "scales", "weights", "ids", "expert_map", "out"),
    ],
)
def fused_kernel(
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
    BY_ROUTE: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    WEIGH: tl.constexpr,
    UNIFORM: tl.constexpr,
    SINGLE: tl.constexpr,
    HAS_MAP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STEP: tl.constexpr,
    PRODUCTS: tl.constexpr,
    LONG: tl.constexpr,
    STAGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """From prepare's rows and map to the output, a stage to a launch.

    Arguments as those of the launches of the plain way.
    gate_up, down: [parts, PLACES, COLUMNS] float32.   middle: [routes, 256 HELD].
    PAIRS: of the layer, HELD of them here.   WEIGH: "input" or "output", what weights multiply.
    SINGLE: every route is a block of its own, as those of a single token are.
    STEP, PRODUCTS: ptx.step and ptx.products for x's type.
    LONG: as in products.
    STAGE: gate and up (0), down (1) or output (2).
    """
    copy_labels(labels, layer, 0, 8 if STAGE < 2 else 0)
    if STAGE == 0:
        wait_for_previous(PDL)
    num_blocks = TOPK
    if not SINGLE:
        num_blocks = tl.load(counts)
    tiles: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    programs = tl.num_programs(0)  # with a constant, ptxas makes longer loops of the products
    if STAGE == 0:
        total = num_blocks * HELD * (HIDDEN // 64)
        position, end = share(total, programs)
        expert, route, words, there, n1, n2, n3 = first_step(
            slab, ids, expert_map, block_experts, block_routes, position, end, total, num_ids,
            num_experts, HIDDEN, BUNDLE, SLOT_STRIDE, HELD, HIDDEN // 64, False, UNIFORM, SINGLE,
            HAS_MAP,
        )  # fmt: skip
        await_labels()
        products(
            rotated, slab, labels, codes, ids, expert_map, block_experts, block_routes, gate_up,
            layer, first_pair, matrix_rows, num_ids, num_experts, position, end, total, expert,
            route, words, there, n1, n2, n3, 0, HIDDEN, BUNDLE, SLOT_STRIDE, PAIRS, HELD,
            HIDDEN // 64, DIVISOR, False, UNIFORM, SINGLE, HAS_MAP, STEP, PRODUCTS, LONG, False,
        )  # fmt: skip
    elif STAGE == 1:
        total = num_blocks * tiles * (4 * HELD)
        position, end = share(total, programs)
        expert, route, words, there, n1, n2, n3 = first_step(
            slab, ids, expert_map, block_experts, block_routes, position, end, total, num_ids,
            num_experts, HIDDEN, BUNDLE, SLOT_STRIDE, tiles, 4 * HELD, True, UNIFORM, SINGLE,
            HAS_MAP,
        )  # fmt: skip
        touch_scales(slab, expert, position, end, HIDDEN, BUNDLE, SLOT_STRIDE, HELD)
        # What does not depend on the launch before is on its way while it is waited for, as below.
        of_middle, rows, activation = block_rows(
            ids, expert_map, block_experts, block_routes, activations,
            position // (tiles * 4 * HELD), num_blocks, num_ids, num_experts, SINGLE, HAS_MAP,
        )  # fmt: skip
        wait_for_previous(PDL)
        make_middle(
            gate_up, slab, activations, weights, ids, expert_map, block_experts, block_routes,
            middle, position, end, num_blocks, of_middle, rows, activation, num_ids, num_experts,
            HIDDEN, BUNDLE, SLOT_STRIDE, HELD, tiles, BETA, LINEAR_BETA, WEIGH == "input", SINGLE,
            HAS_MAP, PROGRAMS,
        )  # fmt: skip
        tl.debug_barrier()
        await_labels()
        products(
            middle, slab, labels, codes, ids, expert_map, block_experts, block_routes, down,
            layer, first_pair, 0, num_ids, num_experts, position, end, total, expert, route, words,
            there, n1, n2, n3, 0, HIDDEN, BUNDLE, SLOT_STRIDE, PAIRS, tiles, 4 * HELD, 1, True,
            UNIFORM, SINGLE, HAS_MAP, STEP, PRODUCTS, LONG, False,
        )  # fmt: skip
    else:
        at_once: tl.constexpr = 32 // CHOICES if CHOICES > 4 else 8
        svh = scales + 2 * SCALE_ROWS * HIDDEN
        svh_rows: tl.constexpr = SCALE_ROWS if BY_ROUTE else 1
        if tl.program_id(0) < num_tokens * (HIDDEN // 128):
            inputs = output_inputs(
                tl.program_id(0), down, svh, weights, num_tokens, num_blocks, ids, expert_map,
                block_experts, route_places, num_ids, num_experts, HIDDEN, svh_rows, tiles,
                4 * HELD, TOPK, CHOICES, at_once, WEIGH == "output", SINGLE, HAS_MAP, PROGRAMS,
            )  # fmt: skip
            wait_for_previous(PDL)
            make_output(
                down, svh, weights, ids, expert_map, block_experts, route_places, out, inputs,
                num_tokens, num_blocks, num_ids, num_experts, HIDDEN, svh_rows, tiles, 4 * HELD,
                TOPK, CHOICES, at_once, WEIGH == "output", SINGLE, HAS_MAP, PROGRAMS,
            )  # fmt: skip
