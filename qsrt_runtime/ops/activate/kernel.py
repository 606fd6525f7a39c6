"""Between the products: partial sums of gate and up to the rotated rows that down receives."""

import triton
import triton.language as tl

from qsrt_runtime.ops.kernel import (
    COLUMNS,
    PLACES,
    first_and_last_program,
    in_fragment_order,
    rotate,
    wait_for_previous,
)


@triton.jit
def _tanh(x):
    """tanh, to float32's precision for small arguments and large ones of either sign."""
    small = tl.exp(-2 * tl.abs(x))
    size = (1 - small) / (1 + small)
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    return tl.where(tl.abs(x) < 0.125, series, tl.where(x < 0, -size, size))


@triton.jit
def _sigmoid(x):
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0, small, 1.0) / (1 + small)


@triton.jit
def activate(gate, up, is_situ, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):
    """SiLU: g sigmoid(g) u; SiTU: beta tanh(g / beta) sigmoid(g) * lin tanh(u / lin)."""
    kept = tl.where(is_situ, BETA * _tanh(gate / BETA), gate)
    linear = tl.where(is_situ, LINEAR_BETA * _tanh(up / LINEAR_BETA), up)
    return kept * _sigmoid(gate) * linear


@triton.jit(do_not_specialize=["programs"], do_not_specialize_on_alignment=["weights"])
def activate_kernel(
    partial,
    slab,
    activations,
    weights,
    num_blocks,
    block_experts,
    route_places,
    out,
    programs,
    HIDDEN: tl.constexpr,
    BUNDLE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PAIRS: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    WEIGH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One pair of one route.

    partial: [parts, PLACES, COLUMNS] float32, gate then up, each low then high record.
    out: [routes, 256 PAIRS], a slot's 32 channels after one another, tiles in fragment order.
    weights: [routes], of gate and up where WEIGH.
    """
    wait_for_previous(PDL)
    route, pair = tl.program_id(0), tl.program_id(1)
    at = tl.load(route_places + route)
    if at < 0:
        return
    block, place = at // PLACES, at % PLACES
    expert = tl.load(block_experts + block).to(tl.int64)
    tile = block * PAIRS + pair
    first, last = first_and_last_program(tl.load(num_blocks), tile, PAIRS, HIDDEN // 64, programs)
    channel = tl.arange(0, 256)  # of the pair: low record, then high
    gate = tl.zeros((256,), tl.float32)
    up = tl.zeros((256,), tl.float32)
    program = first
    while program <= last:  # no range: the interpreter cannot take its ends from tensors
        part = partial + ((program + tile) * PLACES + place).to(tl.int64) * COLUMNS
        gate += tl.load(part + channel)
        up += tl.load(part + 256 + channel)
        program += 1
    side, slot, inside = channel // 128, channel // 16 % 8, channel % 16
    local = slab + (pair * 8 + slot).to(tl.int64) * SLOT_STRIDE + expert * BUNDLE + 36 * HIDDEN
    local = local.to(tl.pointer_type(tl.float16)) + side * 16 + inside
    gate = tl.reshape(rotate(tl.reshape(gate, (2, 128)), 2), (256,))
    up = tl.reshape(rotate(tl.reshape(up, (2, 128)), 2), (256,))
    gate *= tl.load(local).to(tl.float32)
    up *= tl.load(local + 32).to(tl.float32)
    if WEIGH:
        weight = tl.load(weights + route).to(tl.float32)
        gate *= weight
        up *= weight
    is_situ = tl.load(activations + expert) == 1
    middle = activate(gate, up, is_situ, BETA, LINEAR_BETA) * tl.load(local + 64).to(tl.float32)
    middle = tl.reshape(rotate(tl.reshape(middle, (2, 128)), 2), (256,))
    target = out + route.to(tl.int64) * (256 * PAIRS) + pair * 256
    order = in_fragment_order(slot * 32 + side * 16 + inside)
    tl.store(target + order, middle.to(out.dtype.element_ty))
