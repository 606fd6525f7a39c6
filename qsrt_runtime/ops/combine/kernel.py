"""The last launch: the partial sums of down to the output, over each token's routes."""

import triton
import triton.language as tl

from qsrt_runtime.ops.kernel import (
    COLUMNS,
    PLACES,
    expert_of,
    first_and_last_program,
    rotate,
    wait_for_previous,
)


@triton.jit(
    do_not_specialize=["programs", "num_ids", "num_experts"],
    do_not_specialize_on_alignment=["weights", "ids", "expert_map", "out"],
)
def combine_kernel(
    partial,
    scales,
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
    TILES: tl.constexpr,
    STEPS: tl.constexpr,
    TOPK: tl.constexpr,
    CHOICES: tl.constexpr,
    BY_ROUTE: tl.constexpr,
    WEIGH: tl.constexpr,
    SINGLE: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """256 channels of one token.

    partial: [parts, PLACES, COLUMNS] float32.   scales: [1 or E, HIDDEN], of all experts alike
    unless BY_ROUTE.   weights: [T, TOPK].   out: [T, HIDDEN].
    CHOICES: TOPK rounded up to a power of two.   PARTS: of each route added at once.
    """
    token, group = tl.program_id(0), tl.program_id(1)
    choice = tl.arange(0, CHOICES)
    route = token * TOPK + choice
    mask = choice < TOPK
    if SINGLE:
        expert, _ = expert_of(ids, expert_map, route, mask, num_ids, num_experts, HAS_MAP)
        mask &= expert >= 0
        block, place = choice, choice * 0
        num_blocks = TOPK
    else:
        at = tl.load(route_places + route, mask=mask, other=-1)
        mask &= at >= 0
        block, place = tl.where(mask, at // PLACES, 0), tl.where(mask, at % PLACES, 0)
        expert = tl.load(block_experts + block, mask=mask, other=0)
        num_blocks = tl.load(counts)
    weight = tl.full((CHOICES,), 1.0, tl.float32)
    if WEIGH:
        weight = tl.load(weights + route, mask=mask, other=0).to(tl.float32)
    channel = group * 256 + tl.arange(0, 256)
    is_channel = channel < HIDDEN
    if BY_ROUTE:
        row = tl.where(mask, expert, 0).to(tl.int64)[:, None] * HIDDEN
        svh = tl.load(scales + row + channel[None, :], mask=is_channel[None, :], other=0)
        svh = svh.to(tl.float32) * weight[:, None]
    else:
        svh = tl.load(scales + channel, mask=is_channel, other=0).to(tl.float32)
    tile = block * TILES + group // (COLUMNS // 256)
    first, last = first_and_last_program(num_blocks, tile, TILES, STEPS, programs)
    column = channel % COLUMNS
    wait_for_previous(PDL)
    total = tl.zeros((CHOICES, 256), tl.float32)
    number, most = 0, tl.max(last - first, 0)
    while number <= most:
        program = (first + number)[:, None] + tl.arange(0, PARTS)[None, :]
        there = mask[:, None] & (program <= last[:, None])
        there = there[:, :, None] & is_channel[None, None, :]
        part = ((program + tile[:, None]) * PLACES + place[:, None]).to(tl.int64) * COLUMNS
        source = partial + part[:, :, None] + column[None, None, :]
        total += tl.sum(tl.load(source, mask=there, other=0), 1)
        number += PARTS
    if BY_ROUTE:
        rotated = rotate(tl.reshape(total, (2 * CHOICES, 128)), 2 * CHOICES)
        result = tl.sum(tl.reshape(rotated, (CHOICES, 256)) * svh, 0)
    else:
        mixed = tl.sum(total * weight[:, None], 0)
        result = tl.reshape(rotate(tl.reshape(mixed, (2, 128)), 2), (256,)) * svh
    target = out + token.to(tl.int64) * HIDDEN + channel
    tl.store(target, result.to(out.dtype.element_ty), mask=is_channel)
