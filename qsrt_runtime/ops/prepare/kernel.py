"""The first launch: which routes share an expert, and the rotated rows."""

import triton
import triton.language as tl

from qsrt_runtime.ops.kernel import (
    PLACES,
    expert_of,
    rotate_rows,
    wait_for_previous,
)


@triton.jit
def _count_invalid(
    ids, expert_map, counts, num_routes, num_ids, num_experts,
    ROUTES: tl.constexpr, HAS_MAP: tl.constexpr,
):  # fmt: skip
    route = tl.arange(0, ROUTES)
    mask = route < num_routes
    _, wrong = expert_of(ids, expert_map, route, mask, num_ids, num_experts, HAS_MAP)
    tl.store(counts + 1, tl.sum(wrong.to(tl.int32), 0))


@triton.jit
def _map_routes(
    ids,
    expert_map,
    counts,
    block_experts,
    block_routes,
    route_places,
    scratch,
    num_routes,
    num_ids,
    num_experts,
    ROUTES: tl.constexpr,
    HAS_MAP: tl.constexpr,
):
    """Group routes by expert into blocks of PLACES, in the order of their first routes.

    Each thread has a route and looks at all others in turn, which costs no exchange of registers.
    """
    route = tl.arange(0, ROUTES)
    mask = route < num_routes
    expert, _ = expert_of(ids, expert_map, route, mask, num_ids, num_experts, HAS_MAP)
    valid = expert >= 0
    tl.store(scratch + route, expert)
    tl.debug_barrier()
    rank = tl.zeros((ROUTES,), tl.int32)  # among the routes of its expert
    for other_route in tl.range(0, ROUTES, loop_unroll_factor=8):
        other = tl.load(scratch + other_route)
        rank += ((other == expert) & (other_route < route)).to(tl.int32)
    ranks = scratch + ROUTES
    tl.store(ranks + route, tl.where(valid, rank, 1))
    tl.debug_barrier()
    number = tl.sum(route * 0, 0)  # of blocks so far
    block = tl.zeros((ROUTES,), tl.int32)
    size = tl.zeros((ROUTES,), tl.int32)  # of its block
    for other_route in tl.range(0, ROUTES, loop_unroll_factor=8):
        other, other_rank = tl.load(scratch + other_route), tl.load(ranks + other_route)
        together = (other == expert) & (other_rank // PLACES == rank // PLACES)
        leads = other_rank % PLACES == 0  # is the first of a block
        block = tl.where(together & leads, number, block)
        size += together.to(tl.int32)
        number += leads.to(tl.int32)
    tl.store(counts, number)
    place = block * PLACES + rank % PLACES
    leads = valid & (rank % PLACES == 0)
    tl.store(block_experts + block, expert, mask=leads)
    tl.store(block_routes + place, route, mask=valid)
    tl.store(route_places + route, tl.where(valid, place, -1), mask=mask)
    for empty in tl.static_range(1, PLACES):
        tl.store(block_routes + place + empty, -1, mask=leads & (size <= empty))


@triton.jit(
    do_not_specialize=["num_rows", "num_routes", "num_ids", "num_experts"],
    do_not_specialize_on_alignment=["x", "scales", "ids", "expert_map"],
)
def prepare_kernel(
    x,
    scales,
    ids,
    expert_map,
    rotated,
    exponents,
    counts,
    block_experts,
    block_routes,
    route_places,
    scratch,
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
    ROUTES: tl.constexpr,
    SINGLE: tl.constexpr,
    HAS_MAP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program 0 makes the route map, each other one rotates BLOCKS blocks of a row.

    QUANTIZED: to rows and exponents, see store_quantized.
    SINGLE: there is one token, whose routes are their own blocks, and no map is made.
    """
    wait_for_previous(PDL)
    program = tl.program_id(0)
    if program == 0:
        _count_invalid(ids, expert_map, counts, num_routes, num_ids, num_experts, ROUTES, HAS_MAP)
        if not SINGLE:
            _map_routes(
                ids,
                expert_map,
                counts,
                block_experts,
                block_routes,
                route_places,
                scratch,
                num_routes,
                num_ids,
                num_experts,
                ROUTES,
                HAS_MAP,
            )
    else:
        parts: tl.constexpr = (HIDDEN // 128 + BLOCKS - 1) // BLOCKS
        rotate_rows(
            x,
            scales,
            ids,
            expert_map,
            rotated,
            exponents,
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
            False,
            QUANTIZED,
        )
