"""The first launch: which routes share an expert, and the rotated rows."""

import triton
import triton.language as tl

from qsrt_runtime.ops.kernel import PLACES, in_fragment_order, rotate, wait_for_previous


@triton.jit
def expert_of(ids, expert_map, place, mask, num_ids, num_experts, HAS_MAP: tl.constexpr):
    """The expert of a route, -1 for none, and whether what stands there is out of range."""
    expert = tl.load(ids + place, mask=mask, other=-1).to(tl.int64)
    wrong = (expert < -1) | (expert >= num_ids)
    if HAS_MAP:
        known = (expert >= 0) & (expert < num_ids)
        expert = tl.load(expert_map + expert, mask=mask & known, other=-1).to(tl.int64)
        wrong |= (expert < -1) | (expert >= num_experts)
    return tl.where(wrong, -1, expert).to(tl.int32), wrong & mask


@triton.jit
def _route(
    ids,
    expert_map,
    num_blocks,
    block_experts,
    block_routes,
    route_places,
    num_routes,
    num_ids,
    num_experts,
    ROUTES: tl.constexpr,
    HAS_MAP: tl.constexpr,
):
    """Group routes by expert into blocks of PLACES, in the order of their first routes."""
    row, column = tl.arange(0, ROUTES), tl.arange(0, ROUTES)  # routes along either axis
    mask, there = row < num_routes, column < num_routes
    expert, wrong = expert_of(ids, expert_map, row, mask, num_ids, num_experts, HAS_MAP)
    other, _ = expert_of(ids, expert_map, column, there, num_ids, num_experts, HAS_MAP)
    tl.store(num_blocks + 1, tl.sum(wrong.to(tl.int32), 0))
    valid = expert >= 0
    # [ROUTES, ROUTES], symmetric: whether two routes are of one expert
    same = (expert[:, None] == other[None, :]) & valid[:, None]
    earlier = column[None, :] < row[:, None]
    later = column[None, :] > row[:, None]
    rank = tl.sum((same & earlier).to(tl.int32), 1)
    other_rank = tl.sum((same & later).to(tl.int32), 0)
    leads = valid & (rank % PLACES == 0)  # the first of a block
    tl.store(num_blocks, tl.sum(leads.to(tl.int32), 0))
    other_number = tl.sum((leads[:, None] & later).to(tl.int32), 0)  # of leaders before it
    together = same & (other_rank[None, :] // PLACES == rank[:, None] // PLACES)
    size = tl.sum(together.to(tl.int32), 1)
    leader = together & (other_rank[None, :] % PLACES == 0)
    block = tl.sum(tl.where(leader, other_number[None, :], 0), 1)
    place = block * PLACES + rank % PLACES
    tl.store(block_experts + block, expert, mask=leads)
    tl.store(block_routes + place, row, mask=valid)
    tl.store(route_places + row, tl.where(valid, place, -1), mask=mask)
    for empty in tl.static_range(1, 8):
        tl.store(block_routes + place + empty, -1, mask=leads & (size <= empty))


@triton.jit
def _rotate_rows(
    x,
    scales,
    ids,
    expert_map,
    out,
    row,
    part,
    stride_x,
    num_rows,
    num_ids,
    num_experts,
    HIDDEN: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    TOPK: tl.constexpr,
    BY_ROUTE: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_MAP: tl.constexpr,
):
    """Rotate some blocks of a row by the scales of gate and, where INPUTS is 2, of up."""
    channel = part * BLOCKS * 128 + tl.arange(0, BLOCKS * 128)
    mask = channel < HIDDEN
    token, expert = row, row * 0
    if BY_ROUTE:
        token = row // TOPK
        expert, _ = expert_of(ids, expert_map, row, True, num_ids, num_experts, HAS_MAP)
        mask &= expert >= 0
    value = tl.load(x + token.to(tl.int64) * stride_x + channel, mask=mask, other=0)
    for matrix in tl.static_range(0, INPUTS):
        suh = scales + (matrix * SCALE_ROWS + expert).to(tl.int64) * HIDDEN
        scaled = value.to(tl.float32) * tl.load(suh + channel, mask=mask, other=0).to(tl.float32)
        rotated = rotate(tl.reshape(scaled, (BLOCKS, 128)), BLOCKS)
        rotated = tl.reshape(rotated, (BLOCKS * 128,)).to(out.dtype.element_ty)
        target = out + (matrix * num_rows + row).to(tl.int64) * HIDDEN
        tl.store(target + in_fragment_order(channel), rotated, mask=mask)


@triton.jit(
    do_not_specialize=["stride_x", "num_rows", "num_routes", "num_ids", "num_experts"],
    do_not_specialize_on_alignment=["x", "ids", "expert_map"],
)
def prepare_kernel(
    x,
    scales,
    ids,
    expert_map,
    rotated,
    num_blocks,
    block_experts,
    block_routes,
    route_places,
    stride_x,
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
    HAS_MAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program 0 makes the route map, each other one rotates BLOCKS blocks of a row."""
    wait_for_previous(PDL)
    program = tl.program_id(0)
    if program == 0:
        _route(
            ids,
            expert_map,
            num_blocks,
            block_experts,
            block_routes,
            route_places,
            num_routes,
            num_ids,
            num_experts,
            ROUTES,
            HAS_MAP,
        )
    else:
        parts: tl.constexpr = (HIDDEN // 128 + BLOCKS - 1) // BLOCKS
        _rotate_rows(
            x,
            scales,
            ids,
            expert_map,
            rotated,
            (program - 1) // parts,
            (program - 1) % parts,
            stride_x,
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
        )
