"""The last launch: the partial sums of down to the output, over each token's routes."""

import triton
import triton.language as tl

from qsrt_runtime.ops.kernel import (
    COLUMNS,
    PLACES,
    first_and_last_program,
    rotate,
    wait_for_previous,
)


@triton.jit(do_not_specialize=["programs"], do_not_specialize_on_alignment=["weights", "out"])
def combine_kernel(
    partial,
    scales,
    weights,
    num_blocks,
    block_experts,
    route_places,
    out,
    programs,
    HIDDEN: tl.constexpr,
    TILES: tl.constexpr,
    STEPS: tl.constexpr,
    TOPK: tl.constexpr,
    CHOICES: tl.constexpr,
    BY_ROUTE: tl.constexpr,
    WEIGH: tl.constexpr,
    PDL: tl.constexpr,
):
    """128 channels of one token.

    partial: [parts, PLACES, COLUMNS] float32.   scales: [1 or E, HIDDEN], of all experts alike
    unless BY_ROUTE.   weights: [T, TOPK].   out: [T, HIDDEN].
    CHOICES: TOPK rounded up to a power of two.
    """
    wait_for_previous(PDL)
    token, group = tl.program_id(0), tl.program_id(1)
    choice = tl.arange(0, CHOICES)
    route = token * TOPK + choice
    mask = choice < TOPK
    at = tl.load(route_places + route, mask=mask, other=-1)
    mask &= at >= 0
    block, place = tl.where(mask, at // PLACES, 0), tl.where(mask, at % PLACES, 0)
    weight = tl.full((CHOICES,), 1.0, tl.float32)
    if WEIGH:
        weight = tl.load(weights + route, mask=mask, other=0).to(tl.float32)
    inside = tl.arange(0, 128)
    tile = block * TILES + group // (COLUMNS // 128)
    first, last = first_and_last_program(tl.load(num_blocks), tile, TILES, STEPS, programs)
    column = group % (COLUMNS // 128) * 128 + inside
    total = tl.zeros((CHOICES, 128), tl.float32)
    number, most = 0, tl.max(last - first, 0)
    while number <= most:
        part = ((first + number + tile) * PLACES + place).to(tl.int64) * COLUMNS
        there = mask & (first + number <= last)
        total += tl.load(partial + part[:, None] + column[None, :], mask=there[:, None], other=0)
        number += 1
    channel = group * 128 + inside
    if BY_ROUTE:
        expert = tl.load(block_experts + block, mask=mask, other=0).to(tl.int64)
        svh = tl.load(scales + expert[:, None] * HIDDEN + channel[None, :]).to(tl.float32)
        result = tl.sum(rotate(total, CHOICES) * svh * weight[:, None], 0)
    else:
        mixed = tl.sum(total * weight[:, None], 0)
        svh = tl.load(scales + channel).to(tl.float32)
        result = tl.reshape(rotate(tl.reshape(mixed, (1, 128)), 1), (128,)) * svh
    target = out + token.to(tl.int64) * HIDDEN + channel
    tl.store(target, result.to(out.dtype.element_ty))
