"""The last launch: the partial sums of down to the output, over each token's routes."""

import triton
import triton.language as tl

from qsrt_runtime.ops.kernel import (
    COLUMNS,
    expert_of,
    first_and_last_program,
    rotate,
    wait_for_previous,
)


@triton.jit
def _routes(
    choice,
    token,
    weights,
    ids,
    expert_map,
    block_experts,
    route_places,
    num_ids,
    num_experts,
    PLACES: tl.constexpr,
    TOPK: tl.constexpr,
    WEIGH: tl.constexpr,
    SINGLE: tl.constexpr,
    HAS_MAP: tl.constexpr,
):
    """Of some of a token's routes: whether there is one, its block, place, expert and weight."""
    route, mask = token * TOPK + choice, choice < TOPK
    if SINGLE:
        expert, _ = expert_of(ids, expert_map, route, mask, num_ids, num_experts, HAS_MAP)
        mask &= expert >= 0
        block, place = choice, choice * 0
    else:
        at = tl.load(route_places + route, mask=mask, other=-1)
        mask &= at >= 0
        block, place = tl.where(mask, at // PLACES, 0), tl.where(mask, at % PLACES, 0)
        expert = tl.load(block_experts + block, mask=mask, other=0)
    weight = tl.where(mask, 1.0, 0.0)
    if WEIGH:
        weight = tl.load(weights + route, mask=mask, other=0).to(tl.float32)
    return mask, block, place, tl.where(mask, expert, 0), weight


@triton.jit
def _sums(
    partial,
    mask,
    block,
    place,
    num_blocks,
    group,
    channel,
    programs,
    PLACES: tl.constexpr,
    CHOICES: tl.constexpr,
    HIDDEN: tl.constexpr,
    TILES: tl.constexpr,
    STEPS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Of some routes the sums of their parts at 256 channels: [CHOICES, 256]."""
    tile = block * TILES + group // (COLUMNS // 256)
    first, last = first_and_last_program(num_blocks, tile, TILES, STEPS, programs)
    total = tl.zeros((CHOICES, 256), tl.float32)
    number, most = 0, tl.max(last - first, 0)
    while number <= most:
        program = (first + number)[:, None] + tl.arange(0, PARTS)[None, :]
        there = mask[:, None] & (program <= last[:, None])
        there = there[:, :, None] & (channel < HIDDEN)[None, None, :]
        part = ((program + tile[:, None]) * PLACES + place[:, None]).to(tl.int64) * COLUMNS
        source = partial + part[:, :, None] + (channel % COLUMNS)[None, None, :]
        total += tl.sum(tl.load(source, mask=there, other=0), 1)
        number += PARTS
    return total


@triton.jit(
    do_not_specialize=["programs", "num_ids", "num_experts"],
    do_not_specialize_on_alignment=["scales", "weights", "ids", "expert_map", "out"],
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
    SCALE_ROWS: tl.constexpr,
    TILES: tl.constexpr,
    STEPS: tl.constexpr,
    TOPK: tl.constexpr,
    CHOICES: tl.constexpr,
    CHUNK: tl.constexpr,
    BY_ROUTE: tl.constexpr,
    WEIGH: tl.constexpr,
    PLACES: tl.constexpr,
    SINGLE: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """256 channels of one token.

    partial: [parts, PLACES, COLUMNS] float32.   scales: [SCALE_ROWS, HIDDEN], of all experts
    alike unless BY_ROUTE.   weights: [T, TOPK].   out: [T, HIDDEN].
    CHOICES: TOPK rounded up to a power of two, CHUNK of them at once; all of them unless BY_ROUTE,
    where each route is rotated.   PARTS: of each route added at once.
    """
    token, group = tl.program_id(0), tl.program_id(1)
    channel = group * 256 + tl.arange(0, 256)
    is_channel = channel < HIDDEN
    svh = tl.load(scales + channel, mask=is_channel, other=0).to(tl.float32)
    num_blocks = TOPK
    if not SINGLE:
        num_blocks = tl.load(counts)
    result = tl.zeros((256,), tl.float32)
    for start in tl.static_range(0, CHOICES, CHUNK):
        mask, block, place, expert, weight = _routes(
            start + tl.arange(0, CHUNK),
            token,
            weights,
            ids,
            expert_map,
            block_experts,
            route_places,
            num_ids,
            num_experts,
            PLACES,
            TOPK,
            WEIGH,
            SINGLE,
            HAS_MAP,
        )
        if start == 0:
            wait_for_previous(PDL)
        total = _sums(
            partial,
            mask,
            block,
            place,
            num_blocks,
            group,
            channel,
            programs,
            PLACES,
            CHUNK,
            HIDDEN,
            TILES,
            STEPS,
            PARTS,
        )
        if BY_ROUTE:
            row = (expert if SCALE_ROWS > 1 else expert * 0).to(tl.int64)[:, None] * HIDDEN
            own = tl.load(scales + row + channel[None, :], mask=is_channel[None, :], other=0)
            total = rotate(tl.reshape(total, (2 * CHUNK, 128)), 2 * CHUNK)
            total = tl.reshape(total, (CHUNK, 256)) * own.to(tl.float32)
        result += tl.sum(total * weight[:, None], 0)
    if not BY_ROUTE:
        result = tl.reshape(rotate(tl.reshape(result, (2, 128)), 2), (256,)) * svh
    target = out + token.to(tl.int64) * HIDDEN + channel
    tl.store(target, result.to(out.dtype.element_ty), mask=is_channel)
