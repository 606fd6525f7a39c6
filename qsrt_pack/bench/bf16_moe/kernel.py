"""The kernels of a bfloat16 layer for few tokens; see `layer` for how they are launched."""

from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext

import triton
import triton.language as tl

OutOfResources = triton.runtime.errors.OutOfResources


def compiling(pool: Executor) -> AbstractContextManager:
    """Where kernels are compiled by the threads of a pool; one by one before Triton 3.5."""
    if hasattr(triton, "AsyncCompileMode"):
        return triton.AsyncCompileMode(pool, ignore_errors=True)
    return nullcontext()


@triton.jit
def _prefetch(pointers):
    """Ask for the 128-byte lines at `pointers` to be brought to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["routes", "max_blocks"])
def route_kernel(
    ids, experts, sizes, rows, routes, max_blocks, LANES: tl.constexpr, ROWS: tl.constexpr
):
    """Blocks of up to ROWS routes of one expert, in order of first appearance; one program.

    ids [routes] int32 -> experts [max_blocks] int32, sizes [max_blocks] int32 (0: unused),
    rows [max_blocks, ROWS] int32 (route numbers; the first `sizes` of each row are set).
    """
    lane = tl.arange(0, LANES)
    valid = lane < routes
    mine = tl.load(ids + lane, mask=valid, other=-1)
    same = (mine[:, None] == mine[None, :]) & valid[:, None] & valid[None, :]
    before = lane[None, :] < lane[:, None]
    # The place of a route among those of its expert, along either axis of the matrix.
    place = tl.sum((same & before).to(tl.int32), 1)
    place_across = tl.sum((same & (lane[:, None] < lane[None, :])).to(tl.int32), 0)
    total = tl.sum(same.to(tl.int32), 1)
    first = (place % ROWS == 0) & valid
    first_across = (place_across % ROWS == 0) & valid
    # A route's block: as many blocks as start before the route that starts its own.
    start = same & (place_across[None, :] == (place // ROWS * ROWS)[:, None])
    starts_at = tl.sum(tl.where(start, lane[None, :], 0), 1)
    block = tl.sum((first_across[None, :] & (lane[None, :] < starts_at[:, None])).to(tl.int32), 1)
    count = tl.sum(first.to(tl.int32), 0)
    tl.store(experts + block, mine, mask=first)
    tl.store(sizes + block, tl.minimum(total - place, ROWS), mask=first)
    tl.store(sizes + lane, tl.zeros_like(lane), mask=(lane >= count) & (lane < max_blocks))
    tl.store(rows + block * ROWS + place % ROWS, lane, mask=valid)


@triton.jit
def fc1_gemm(
    x,
    w13,
    act,
    experts,
    sizes,
    rows,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GDC: tl.constexpr,
):
    """act[r] = silu(gate) * up for the routes r of one block and BLOCK_N columns.

    x [M, HIDDEN], w13 [E, 2 INTER, HIDDEN], act [routes, INTER], all bf16. Gate and up rows
    alternate in one tile, so that both values of a column land in the same thread.
    """
    TILES: tl.constexpr = INTER // BLOCK_N
    block = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    size = tl.load(sizes + block)
    expert = tl.load(experts + block)
    lane = tl.arange(0, ROWS)
    route = tl.load(rows + block * ROWS + lane)  # with the two above; beyond `size` anything
    if GDC:
        tl.extra.cuda.gdc_launch_dependents()
    if size == 0:
        return
    valid = lane < size
    route = tl.where(valid, route, 0)
    k = tl.arange(0, BLOCK_K)
    pair = tl.arange(0, 2 * BLOCK_N)
    row = (pair % 2) * INTER + tile * BLOCK_N + pair // 2
    a = x + (route // TOP_K)[:, None] * HIDDEN + k[None, :]
    b = w13 + expert.to(tl.int64) * (2 * INTER * HIDDEN) + row[None, :] * HIDDEN + k[:, None]
    total = tl.zeros((ROWS, 2 * BLOCK_N), tl.float32)
    for _ in tl.range(0, HIDDEN, BLOCK_K, num_stages=STAGES):
        right = tl.load(b, eviction_policy="evict_first")
        total = tl.dot(tl.load(a, mask=valid[:, None], other=0.0), right, total)
        a += BLOCK_K
        b += BLOCK_K
    gate, up = tl.split(tl.reshape(total, (ROWS, BLOCK_N, 2)))
    value = gate / (1.0 + tl.exp(-gate)) * up
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    target = act + route[:, None] * INTER + column[None, :]
    tl.store(target, value.to(act.dtype.element_ty), mask=valid[:, None])


@triton.jit(do_not_specialize=["routes"])
def fc2_gemm(
    act,
    w2,
    partial,
    experts,
    sizes,
    rows,
    routes,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    GDC: tl.constexpr,
    FIRST: tl.constexpr,
    LINES: tl.constexpr,
):
    """partial[s, r] = w2[e] @ act[r] over a SPLIT-th of INTER, for one block and BLOCK_N columns.

    act [routes, INTER] bf16, w2 [E, HIDDEN, INTER] bf16, partial [SPLIT, routes, HIDDEN] float32.
    The first FIRST programs ask for LINES lines of each of their weight rows before they wait.
    """
    PART: tl.constexpr = INTER // SPLIT
    TILES: tl.constexpr = HIDDEN // BLOCK_N * SPLIT
    pid = tl.program_id(0)
    block = pid // TILES
    split = pid % SPLIT
    tile = pid % TILES // SPLIT
    size = tl.load(sizes + block)
    expert = tl.load(experts + block)
    lane = tl.arange(0, ROWS)
    route = tl.load(rows + block * ROWS + lane)  # with the two above; beyond `size` anything
    if GDC:
        tl.extra.cuda.gdc_launch_dependents()
    if size == 0:
        return
    valid = lane < size
    route = tl.where(valid, route, 0)
    k = tl.arange(0, BLOCK_K)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    weights = w2 + expert.to(tl.int64) * (HIDDEN * INTER) + split * PART
    if GDC:
        if pid < FIRST:
            line = tl.minimum(tl.arange(0, LINES) * 64, PART - 1)
            _prefetch(weights + column[:, None] * INTER + line[None, :])
        tl.extra.cuda.gdc_wait()
    a = act + route[:, None] * INTER + split * PART + k[None, :]
    b = weights + column[None, :] * INTER + k[:, None]
    total = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for _ in tl.range(0, PART, BLOCK_K, num_stages=STAGES):
        right = tl.load(b, eviction_policy="evict_first")
        total = tl.dot(tl.load(a, mask=valid[:, None], other=0.0), right, total)
        a += BLOCK_K
        b += BLOCK_K
    target = partial + (split * routes + route)[:, None].to(tl.int64) * HIDDEN + column[None, :]
    tl.store(target, total, mask=valid[:, None])


@triton.jit(do_not_specialize=["routes"])
def combine_kernel(
    partial,
    weights,
    out,
    routes,
    TOP_K: tl.constexpr,
    SPLIT: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GDC: tl.constexpr,
):
    """out[m] = sum over splits s and the routes r of token m of weights[r] * partial[s, r].

    partial [SPLIT, routes, HIDDEN] float32, weights [routes] float32, out [M, HIDDEN] bf16.
    """
    token = tl.program_id(1)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    factors = ()
    for j in tl.static_range(TOP_K):
        factors += (tl.load(weights + token * TOP_K + j),)
    if GDC:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK_N,), tl.float32)
    for j in tl.static_range(TOP_K):
        for split in tl.static_range(SPLIT):
            place = (split * routes + token * TOP_K + j).to(tl.int64) * HIDDEN
            total += factors[j] * tl.load(partial + place + column)
    tl.store(out + token * HIDDEN + column, total.to(out.dtype.element_ty))


@triton.jit
def fc1_gemv(
    x,
    w13,
    act,
    ids,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GDC: tl.constexpr,
):
    """act[r] = silu(gate) * up for one route r and BLOCK_N columns; shapes as in `fc1_gemm`."""
    TILES: tl.constexpr = INTER // BLOCK_N
    route = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    expert = tl.load(ids + route)
    if GDC:
        tl.extra.cuda.gdc_launch_dependents()
    row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)[None, :]
    inputs = x + route // TOP_K * HIDDEN
    gate_rows = w13 + expert.to(tl.int64) * (2 * INTER * HIDDEN) + row[:, None] * HIDDEN
    up_rows = gate_rows + INTER * HIDDEN
    gates = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    ups = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.static_range(0, HIDDEN, BLOCK_K):
        if start + BLOCK_K <= HIDDEN:
            gate = tl.load(gate_rows + start + k, eviction_policy="evict_first")
            up = tl.load(up_rows + start + k, eviction_policy="evict_first")
            value = tl.load(inputs + start + k)
        else:
            inside = start + k < HIDDEN
            gate = tl.load(gate_rows + start + k, mask=inside, other=0.0)
            up = tl.load(up_rows + start + k, mask=inside, other=0.0)
            value = tl.load(inputs + start + k, mask=inside, other=0.0)
        value = value.to(tl.float32)
        gates += gate.to(tl.float32) * value
        ups += up.to(tl.float32) * value
    gate = tl.sum(gates, 1)
    value = gate / (1.0 + tl.exp(-gate)) * tl.sum(ups, 1)
    tl.store(act + route * INTER + row, value.to(act.dtype.element_ty))


@triton.jit
def fc2_gemv(
    act,
    w2,
    out,
    ids,
    weights,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
    GDC: tl.constexpr,
    FIRST: tl.constexpr,
    LINES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """out[m] = sum over j of weights[m, j] * (w2[ids[m, j]] @ act[m, j]) for BLOCK_N columns.

    act [routes, INTER] bf16, w2 [E, HIDDEN, INTER] bf16, ids [M, TOP_K] int32, weights [M, TOP_K]
    float32, out [M, HIDDEN] bf16. The first FIRST programs ask for LINES lines of each of their
    rows of the first AHEAD experts before they wait.
    """
    tile = tl.program_id(0)
    token = tl.program_id(1)
    row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)[None, :]
    experts = ()
    factors = ()
    for j in tl.static_range(TOP_K):
        experts += (tl.load(ids + token * TOP_K + j),)
        factors += (tl.load(weights + token * TOP_K + j),)
    if GDC:
        if token * tl.num_programs(0) + tile < FIRST:
            # One lane for each line of the AHEAD experts' rows, so that their ids load at once.
            lane = tl.arange(0, AHEAD * BLOCK_N * LINES)
            early = tl.load(ids + token * TOP_K + lane // (BLOCK_N * LINES)).to(tl.int64)
            early_row = tile * BLOCK_N + lane // LINES % BLOCK_N
            column = tl.minimum(lane % LINES * 64, INTER - 1)
            _prefetch(w2 + early * (HIDDEN * INTER) + early_row * INTER + column)
        tl.extra.cuda.gdc_wait()
    totals = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for j in tl.static_range(TOP_K):
        weight = factors[j]
        inputs = act + (token * TOP_K + j) * INTER + k
        matrix = w2 + experts[j].to(tl.int64) * (HIDDEN * INTER) + row[:, None] * INTER + k
        if UNROLL:
            for start in tl.static_range(0, INTER, BLOCK_K):
                if start + BLOCK_K <= INTER:
                    tile_w = tl.load(matrix + start, eviction_policy="evict_first")
                    value = tl.load(inputs + start)
                else:
                    inside = start + k < INTER
                    tile_w = tl.load(matrix + start, mask=inside, other=0.0)
                    value = tl.load(inputs + start, mask=inside, other=0.0)
                totals += tile_w.to(tl.float32) * (value.to(tl.float32) * weight)
        else:
            for start in tl.range(0, INTER, BLOCK_K, loop_unroll_factor=2):
                tile_w = tl.load(matrix + start, eviction_policy="evict_first")
                value = tl.load(inputs + start).to(tl.float32)
                totals += tile_w.to(tl.float32) * (value * weight)
    tl.store(out + token * HIDDEN + row, tl.sum(totals, 1).to(out.dtype.element_ty))
