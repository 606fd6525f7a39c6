"""The first launch for many tokens: routes sorted by expert, and the rotated rows."""

import triton
import triton.language as tl

from qsrt_runtime.ops.kernel import expert_of, rotate_rows, wait_for_previous
from qsrt_runtime.ops.warps.kernel import rotate_rows_by_warps


@triton.jit
def sort_routes(
    ids,
    expert_map,
    counts,
    first_block,
    cursors,
    block_experts,
    order,
    places,
    num_routes,
    num_ids,
    num_experts,
    EXPERTS: tl.constexpr,
    ROUTES: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_PLACES: tl.constexpr,
    HAS_MAP: tl.constexpr,
):
    """Count each expert's routes, give it whole blocks of BLOCK places, and fill them.

    An expert's routes stand in any order, or where HAS_PLACES in their own: then a route's results
    may depend on its block.
    """
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < num_experts
    tl.store(cursors + expert, 0, mask=is_expert)
    tl.debug_barrier()
    wrongs, start = tl.zeros((ROUTES,), tl.int32), 0
    while start < num_routes:  # no range: the interpreter cannot take its end from an argument
        route = start + tl.arange(0, ROUTES)
        mask = route < num_routes
        found, wrong = expert_of(ids, expert_map, route, mask, num_ids, num_experts, HAS_MAP)
        tl.atomic_add(cursors + found, 1, mask=mask & (found >= 0), sem="relaxed")
        wrongs += wrong.to(tl.int32)
        start += ROUTES
    tl.store(counts + 1, tl.sum(wrongs, 0))
    tl.debug_barrier()
    count = tl.load(cursors + expert, mask=is_expert, other=0)
    blocks = tl.cdiv(count, BLOCK)
    last = tl.cumsum(blocks, 0)
    first = last - blocks
    tl.store(first_block + expert, first, mask=is_expert)
    tl.store(first_block + num_experts, tl.sum(blocks, 0))
    tl.store(counts, tl.sum(blocks, 0))
    tl.debug_barrier()
    tl.store(cursors + expert, first * BLOCK, mask=is_expert)
    number, most = 0, tl.max(blocks, 0)
    inside = tl.arange(0, BLOCK)
    while number < most:
        there = number < blocks
        tl.store(block_experts + first + number, expert, mask=there)
        place = (first + number)[:, None] * BLOCK + inside[None, :]
        empty = (number * BLOCK + inside[None, :] >= count[:, None]) & there[:, None]
        tl.store(order + place, -1, mask=empty)
        number += 1
    tl.debug_barrier()
    start = 0
    while start < num_routes:
        route = start + tl.arange(0, ROUTES)
        mask = route < num_routes
        found, _ = expert_of(ids, expert_map, route, mask, num_ids, num_experts, HAS_MAP)
        has_expert = mask & (found >= 0)
        place = tl.atomic_add(cursors + found, 1, mask=has_expert, sem="relaxed")
        tl.store(order + place, route, mask=has_expert)
        start += ROUTES
    if HAS_PLACES:
        tl.debug_barrier()
        start = 0
        while start < num_routes:  # each route's rank among its expert's
            route = start + tl.arange(0, ROUTES)
            mask = route < num_routes
            found, _ = expert_of(ids, expert_map, route, mask, num_ids, num_experts, HAS_MAP)
            has_expert = mask & (found >= 0)
            base = tl.load(first_block + found, mask=has_expert, other=0) * BLOCK
            end = tl.load(cursors + found, mask=has_expert, other=0)
            place, number, most = base, 0, tl.max(end - base, 0)
            while number < most:
                other = tl.load(order + base + number, mask=base + number < end, other=num_routes)
                place += (other < route).to(tl.int32)
                number += 1
            tl.store(places + route, tl.where(has_expert, place, -1), mask=mask)
            start += ROUTES
        tl.debug_barrier()
        start = 0
        while start < num_routes:
            route = start + tl.arange(0, ROUTES)
            place = tl.load(places + route, mask=route < num_routes, other=-1)
            tl.store(order + place, route, mask=place >= 0)
            start += ROUTES


@triton.jit(
    do_not_specialize=["num_rows", "num_routes", "num_ids", "num_experts"],
    do_not_specialize_on_alignment=["x", "scales", "ids", "expert_map"],
)
def group_kernel(
    x,
    scales,
    ids,
    expert_map,
    rotated,
    counts,
    first_block,
    cursors,
    block_experts,
    order,
    places,
    num_rows,
    num_routes,
    num_ids,
    num_experts,
    HIDDEN: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    TOPK: tl.constexpr,
    BY_ROUTE: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROUTES: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_WORD: tl.constexpr,
    HAS_PLACES: tl.constexpr,
    HAS_MAP: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program 0 sorts the routes, each other one rotates BLOCKS Hadamard blocks of a row, or WARPS
    of them by warps.

    first_block: [num_experts + 1], cursors: [num_experts], block_experts: [blocks], order:
    [blocks, BLOCK], -1 where empty; counts: [2], blocks, and ids that name no expert and are not
    -1; where HAS_PLACES places: [num_routes], where each route stands in order, -1 for none; int32.
    EXPERTS: num_experts rounded up to a power of two.   ROUTES: looked at at once.
    """
    wait_for_previous(PDL)
    program = tl.program_id(0)
    if program == 0:
        sort_routes(
            ids,
            expert_map,
            counts,
            first_block,
            cursors,
            block_experts,
            order,
            places,
            num_routes,
            num_ids,
            num_experts,
            EXPERTS,
            ROUTES,
            BLOCK,
            HAS_PLACES,
            HAS_MAP,
        )
    elif WARPS:
        rotate_rows_by_warps(
            x,
            scales,
            ids,
            expert_map,
            rotated,
            (program - 1) * WARPS,
            num_rows,
            num_ids,
            num_experts,
            HIDDEN,
            SCALE_ROWS,
            TOPK,
            BY_ROUTE,
            INPUTS,
            HAS_MAP,
            BY_WORD,
            WARPS,
        )
    else:
        parts: tl.constexpr = (HIDDEN // 128 + BLOCKS - 1) // BLOCKS
        rotate_rows(
            x,
            scales,
            ids,
            expert_map,
            rotated,
            rotated,
            (program - 1) // parts,
            (program - 1) % parts,
            num_rows,
            num_ids,
            num_experts,
            HIDDEN,
            SCALE_ROWS,
            TOPK,
            BY_ROUTE,
            INPUTS,
            BLOCKS,
            HAS_MAP,
            BY_WORD,
            False,
        )
