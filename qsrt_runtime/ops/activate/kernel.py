"""Between the products: partial sums of gate and up to the rotated rows that down receives."""

import triton
import triton.language as tl

from qsrt_runtime.ops.kernel import (
    COLUMNS,
    expert_of,
    first_and_last_program,
    middle_scales,
    store_middle,
    wait_for_previous,
)


@triton.jit(
    do_not_specialize=["programs", "num_ids", "num_experts"],
    do_not_specialize_on_alignment=["activations", "weights", "ids", "expert_map"],
)
def activate_kernel(
    partial,
    slab,
    activations,
    weights,
    ids,
    expert_map,
    counts,
    block_experts,
    route_places,
    out,
    exponents,
    programs,
    num_ids,
    num_experts,
    HIDDEN: tl.constexpr,
    BUNDLE: tl.constexpr,
    LOCAL: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PAIRS: tl.constexpr,
    TOPK: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    WEIGH: tl.constexpr,
    PLACES: tl.constexpr,
    SINGLE: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One pair of one route.

    partial: [parts, PLACES, COLUMNS] float32, gate then up, each low then high record.
    out: [routes, 256 PAIRS], a slot's 32 channels after one another, tiles in fragment order.
    exponents: [routes, 8 PAIRS], where QUANTIZED, see store_quantized.
    weights: [routes], of gate and up where WEIGH.   PARTS: added at once.
    """
    route, pair = tl.program_id(0), tl.program_id(1)
    if SINGLE:
        expert, _ = expert_of(ids, expert_map, route, True, num_ids, num_experts, HAS_MAP)
        at = tl.where(expert >= 0, route * PLACES, -1)
        num_blocks = TOPK
    else:
        at = tl.load(route_places + route)
        num_blocks = tl.load(counts)
        expert = tl.load(block_experts + tl.maximum(at, 0) // PLACES, mask=at >= 0, other=0)
    block, place = tl.maximum(at, 0) // PLACES, tl.maximum(at, 0) % PLACES
    expert = tl.maximum(expert, 0).to(tl.int64)
    channel = tl.arange(0, 256)
    gate_scale, up_scale, down_scale, is_situ = middle_scales(
        slab, activations, expert, pair, LOCAL, BUNDLE, SLOT_STRIDE
    )
    if WEIGH:
        weight = tl.load(weights + route).to(tl.float32)
        gate_scale *= weight
        up_scale *= weight
    tile = block * PAIRS + pair
    first, last = first_and_last_program(num_blocks, tile, PAIRS, HIDDEN // 64, programs)
    wait_for_previous(PDL)
    if at < 0:
        return
    gate = tl.zeros((256,), tl.float32)
    up = tl.zeros((256,), tl.float32)
    while first <= last:  # no range: the interpreter cannot take its ends from tensors
        program = first + tl.arange(0, PARTS)
        there = (program <= last)[:, None]
        part = partial + ((program + tile) * PLACES + place).to(tl.int64)[:, None] * COLUMNS
        gate += tl.sum(tl.load(part + channel[None, :], mask=there, other=0), 0)
        up += tl.sum(tl.load(part + 256 + channel[None, :], mask=there, other=0), 0)
        first += PARTS
    first = route.to(tl.int64) * (256 * PAIRS) + pair * 256
    store_middle(
        gate, up, gate_scale, up_scale, down_scale, is_situ, out + first, exponents + first // 32,
        BETA, LINEAR_BETA, False, QUANTIZED,
    )  # fmt: skip
