"""Between the products: partial sums of gate and up to the rotated rows that down receives."""

import triton
import triton.language as tl

from qsrt_runtime.ops.kernel import (
    COLUMNS,
    PLACES,
    activate,
    expert_of,
    first_and_last_program,
    in_fragment_order,
    rotate,
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
    programs,
    num_ids,
    num_experts,
    HIDDEN: tl.constexpr,
    BUNDLE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PAIRS: tl.constexpr,
    TOPK: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    WEIGH: tl.constexpr,
    SINGLE: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One pair of one route.

    partial: [parts, PLACES, COLUMNS] float32, gate then up, each low then high record.
    out: [routes, 256 PAIRS], a slot's 32 channels after one another, tiles in fragment order.
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
    channel = tl.arange(0, 256)  # of the pair: low record, then high
    side, slot, inside = channel // 128, channel // 16 % 8, channel % 16
    local = slab + (pair * 8 + slot).to(tl.int64) * SLOT_STRIDE + expert * BUNDLE + 36 * HIDDEN
    local = local.to(tl.pointer_type(tl.float16)) + side * 16 + inside
    gate_scale = tl.load(local).to(tl.float32)
    up_scale = tl.load(local + 32).to(tl.float32)
    down_scale = tl.load(local + 64).to(tl.float32)
    is_situ = tl.load(activations + expert) == 1
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
    gate = tl.reshape(rotate(tl.reshape(gate, (2, 128)), 2), (256,)) * gate_scale
    up = tl.reshape(rotate(tl.reshape(up, (2, 128)), 2), (256,)) * up_scale
    middle = activate(gate, up, is_situ, BETA, LINEAR_BETA) * down_scale
    middle = tl.reshape(rotate(tl.reshape(middle, (2, 128)), 2), (256,))
    target = out + route.to(tl.int64) * (256 * PAIRS) + pair * 256
    order = in_fragment_order(slot * 32 + side * 16 + inside)
    tl.store(target + order, middle.to(out.dtype.element_ty))
