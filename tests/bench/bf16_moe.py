"""A BF16 mixture-of-experts layer in Triton for decode batches: the yardstick for 3-bit kernels.

    python tests/bench/bf16_moe.py [--shapes NAME ...] [--tokens M ...] [--known] [--no-pdl]
                                   [--budget SECONDS]

Sweeps the configurations of each shape and batch on the first CUDA device, checks the best of each
path against plain torch, and prints the times and the dict `BEST`; with `--known` it measures what
`BEST` holds instead of sweeping. A layer is

    out[m] = sum over k of weights[m, k] * (w2[e] @ (silu(gate) * up)),   e = ids[m, k]

with x [M, H], w13 [E, 2I, H] (gate rows, then up rows), w2 [E, H, I], all bf16; ids [M, k] int32,
weights [M, k] float32; out [M, H] bf16. Two paths compute it:

- "gemm": blocks of up to 16 routes of one expert (`route`), two grouped GEMMs with the activation
  in the first's epilogue, and a kernel that sums the k routes of a token: 3 launches;
- "gemv": a program for a few columns of one route, without blocks, and a second kernel that sums
  the experts of a token itself: 2 launches. It reads an expert once for each of its routes.

Either reads each weight from memory once. Nothing is allocated and nothing depends on the host
after set-up. With `pdl`, a kernel starts while the one before it in the layer drains (programmatic
dependent launch) and asks for its first weights; the first kernel of a layer starts normally.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

# hidden size H, intermediate size I, experts E, experts of a token k
SHAPES = {
    "fruit": (1024, 512, 256, 8),
    "qwen30b": (2048, 768, 128, 8),
    "glm": (6144, 2048, 32, 8),
    "mixtral": (4096, 14336, 8, 2),
}
TOKENS = (1, 2, 4, 8, 16)
# Microseconds of a layer on one H200 to be reached, by (shape, tokens).
TARGETS = {
    ("fruit", 1): 13.4,
    ("fruit", 4): 38.0,
    ("fruit", 16): 113.0,
    ("qwen30b", 1): 30.3,
    ("qwen30b", 4): 83.4,
    ("qwen30b", 16): 292.0,
    ("glm", 1): 152.0,
    ("glm", 4): 553.0,
    ("glm", 16): 551.0,
    ("mixtral", 1): 174.0,
    ("mixtral", 4): 661.0,
    ("mixtral", 16): 656.0,
}
# (path, configuration) by (shape, tokens), as a sweep printed it.
BEST: dict[tuple[str, int], tuple[str, dict[str, tuple[int, ...]]]] = {
    ("fruit", 1): ("gemv", {"fc1": (2, 4), "fc2": (4, 2)}),
    ("fruit", 2): ("gemv", {"fc1": (8, 2), "fc2": (8, 2)}),
    ("fruit", 4): ("gemm", {"fc1": (16, 128, 2, 3), "fc2": (32, 256, 4, 3, 1)}),
    ("fruit", 8): ("gemm", {"fc1": (32, 256, 4, 3), "fc2": (64, 64, 4, 5, 1)}),
    ("fruit", 16): ("gemm", {"fc1": (32, 256, 4, 3), "fc2": (32, 128, 2, 3, 1)}),
    ("qwen30b", 1): ("gemv", {"fc1": (2, 4), "fc2": (2, 2)}),
    ("qwen30b", 2): ("gemv", {"fc1": (2, 4), "fc2": (2, 1)}),
    ("qwen30b", 4): ("gemm", {"fc1": (32, 256, 4, 3), "fc2": (64, 128, 4, 3, 1)}),
    ("qwen30b", 8): ("gemm", {"fc1": (32, 256, 4, 3), "fc2": (64, 256, 4, 3, 1)}),
    ("qwen30b", 16): ("gemm", {"fc1": (32, 256, 4, 3), "fc2": (64, 256, 4, 3, 1)}),
    ("glm", 1): ("gemv", {"fc1": (4, 2), "fc2": (4, 8)}),
    ("glm", 2): ("gemv", {"fc1": (4, 2), "fc2": (4, 8)}),
    ("glm", 4): ("gemm", {"fc1": (32, 128, 4, 4), "fc2": (32, 256, 4, 3, 1)}),
    ("glm", 8): ("gemm", {"fc1": (32, 128, 4, 3), "fc2": (32, 256, 4, 3, 1)}),
    ("glm", 16): ("gemm", {"fc1": (32, 128, 4, 4), "fc2": (32, 256, 4, 3, 1)}),
    ("mixtral", 1): ("gemv", {"fc1": (2, 8), "fc2": (2, 8)}),
    ("mixtral", 2): ("gemv", {"fc1": (2, 8), "fc2": (2, 8)}),
    ("mixtral", 4): ("gemm", {"fc1": (32, 128, 4, 4), "fc2": (32, 256, 4, 3, 2)}),
    ("mixtral", 8): ("gemm", {"fc1": (32, 128, 4, 4), "fc2": (32, 256, 4, 3, 2)}),
    ("mixtral", 16): ("gemm", {"fc1": (32, 128, 4, 4), "fc2": (32, 256, 4, 3, 1)}),
}

BLOCK = 16  # routes of a block: the rows of one tensor-core tile
MAX_ROUTES = 128
FIRST_WAVE = 132 * 4  # programs that ask for weights before they may start
PREFETCH_BYTES = 32768  # at most, for each of them
LARGEST_ERROR = 1e-2  # relative L2, against plain torch
GEMV_TOKENS = 2  # largest batch for which the sweep tries the gemv path
INTERPRETED = triton.knobs.runtime.interpret

Config = dict[str, tuple[int, ...]]


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
def _route_kernel(
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
def _fc1_gemm(
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
def _fc2_gemm(
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
def _combine_kernel(
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
def _fc1_gemv(
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
    """act[r] = silu(gate) * up for one route r and BLOCK_N columns; shapes as in `_fc1_gemm`."""
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
def _fc2_gemv(
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


@dataclass(frozen=True)
class Launch:
    """One kernel with its grid, arguments and options; `compile` prepares it without running."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](*self.args, **self.options)

    def compile(self) -> None:
        self.kernel.warmup(*self.args, grid=self.grid, **self.options)


class Routing:
    """Buffers for the blocks of a batch's routes; `run` fills them on the device.

    experts [B] int32, sizes [B] int32 (0: unused), rows [B, 16] int32, for B = max_blocks: as many
    blocks as `tokens * top_k` routes over `experts` experts can make.
    """

    def __init__(self, tokens: int, top_k: int, experts: int, device: torch.device | str) -> None:
        self.routes = tokens * top_k
        if self.routes > MAX_ROUTES:
            raise ValueError(f"{self.routes} routes, at most {MAX_ROUTES}")
        self.max_blocks = min(self.routes, experts + self.routes // BLOCK)
        self.experts = torch.zeros(self.max_blocks, dtype=torch.int32, device=device)
        self.sizes = torch.zeros(self.max_blocks, dtype=torch.int32, device=device)
        self.rows = torch.zeros(self.max_blocks, BLOCK, dtype=torch.int32, device=device)

    def run(self, ids: torch.Tensor) -> "Routing":
        """Fill the buffers from ids [M, k] int32, in one launch of one program."""
        lanes = max(16, triton.next_power_of_2(self.routes))
        args = (ids, self.experts, self.sizes, self.rows, self.routes, self.max_blocks)
        _route_kernel[(1,)](*args, lanes, BLOCK, num_warps=max(1, lanes * lanes // 1024))
        return self


class Layer:
    """One layer's weights, w13 [E, 2I, H] and w2 [E, H, I], bf16, contiguous, and its buffers:

    act [M k, I] bf16, partial [max_split, M k, H] float32 and out [M, H] bf16.
    """

    def __init__(
        self,
        w13: torch.Tensor,
        w2: torch.Tensor,
        tokens: int,
        top_k: int,
        *,
        max_split: int = 4,
    ) -> None:
        self.w13, self.w2, self.tokens, self.top_k = w13, w2, tokens, top_k
        self.experts, self.hidden, self.inter = w2.shape
        if w13.shape != (self.experts, 2 * self.inter, self.hidden):
            raise ValueError(f"w13 {tuple(w13.shape)} and w2 {tuple(w2.shape)} do not match")
        if not (w13.is_contiguous() and w2.is_contiguous()):
            raise ValueError("weights must be contiguous")
        self.routes = tokens * top_k
        self.act = w2.new_empty(self.routes, self.inter)
        self.partial = w2.new_empty(max_split, self.routes, self.hidden, dtype=torch.float32)
        self.out = w2.new_empty(tokens, self.hidden)

    def launches(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        routing: Routing | None,
        path: str,
        config: Config,
        *,
        pdl: bool = True,
        out: torch.Tensor | None = None,
    ) -> list[Launch]:
        """The launches of a layer in order, for x [M, H] bf16, ids and weights [M, k].

        path "gemm" takes fc1 = (BLOCK_N, BLOCK_K, warps, stages) and fc2 = the same and a split of
        I, and a `routing` filled from ids; "gemv" takes fc1 and fc2 = (BLOCK_N, warps).
        """
        pdl = pdl and not INTERPRETED
        out = self.out if out is None else out
        if path == "gemv":
            return self._gemv(x, ids, weights, config, pdl, out)
        if routing is None:
            raise ValueError("the gemm path needs a routing")
        return self._gemm(x, weights, routing, config, pdl, out)

    def __call__(self, *args: Any, **options: Any) -> torch.Tensor:
        """Run `launches` and return out [M, H] bf16: the layer's buffer or the one given."""
        for launch in self.launches(*args, **options):
            launch.run()
        given = options.get("out")
        return self.out if given is None else given

    def _gemm(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        routing: Routing,
        config: Config,
        pdl: bool,
        out: torch.Tensor,
    ) -> list[Launch]:
        n1, k1, warps1, stages1 = config["fc1"]
        n2, k2, warps2, stages2, split = config["fc2"]
        _divides(self.inter, n1, k2 * split)
        _divides(self.hidden, k1, n2)
        blocks = routing.max_blocks
        lists = (routing.experts, routing.sizes, routing.rows)
        sizes = (self.hidden, self.inter)
        late = {"launch_pdl": True} if pdl else {}
        second = (n2, k2, stages2, split, pdl, FIRST_WAVE, _lines(self.inter // split, n2))
        wide = min(256, self.hidden & -self.hidden)
        return [
            Launch(
                _fc1_gemm,
                (blocks * (self.inter // n1),),
                (x, self.w13, self.act, *lists, self.top_k, *sizes, BLOCK, n1, k1, stages1, pdl),
                {"num_warps": warps1},
            ),
            Launch(
                _fc2_gemm,
                (blocks * (self.hidden // n2) * split,),
                (self.act, self.w2, self.partial, *lists, self.routes, *sizes, BLOCK, *second),
                {"num_warps": warps2, **late},
            ),
            Launch(
                _combine_kernel,
                (self.hidden // wide, self.tokens),
                (
                    self.partial,
                    weights,
                    out,
                    self.routes,
                    self.top_k,
                    split,
                    self.hidden,
                    wide,
                    pdl,
                ),
                {"num_warps": 2, **late},
            ),
        ]

    def _gemv(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        config: Config,
        pdl: bool,
        out: torch.Tensor,
    ) -> list[Launch]:
        n1, warps1 = config["fc1"]
        n2, warps2 = config["fc2"]
        _divides(self.inter, n1)
        _divides(self.hidden, n2)
        k1 = min(256 * warps1, triton.next_power_of_2(self.hidden))
        k2 = min(256 * warps2, triton.next_power_of_2(self.inter))
        sizes = (self.top_k, self.hidden, self.inter)
        lines = _lines(self.inter, n2)
        ahead = _power(max(1, min(self.top_k, PREFETCH_BYTES // (128 * lines * n2))))
        unroll = self.inter <= 4 * k2 or self.inter % k2 != 0
        second = (n2, k2, unroll, pdl, 2 * FIRST_WAVE, lines, ahead)
        late = {"launch_pdl": True} if pdl else {}
        return [
            Launch(
                _fc1_gemv,
                (self.routes * (self.inter // n1),),
                (x, self.w13, self.act, ids, *sizes, n1, k1, pdl),
                {"num_warps": warps1},
            ),
            Launch(
                _fc2_gemv,
                (self.hidden // n2, self.tokens),
                (self.act, self.w2, out, ids, weights, *sizes, *second),
                {"num_warps": warps2, **late},
            ),
        ]


def _divides(size: int, *blocks: int) -> None:
    for block in blocks:
        if size % block:
            raise ValueError(f"{block} does not divide {size}")


def _lines(columns: int, rows: int) -> int:
    """128-byte lines to prefetch of each of `rows` bf16 rows of `columns`: a power of two."""
    wanted = min(triton.next_power_of_2(triton.cdiv(columns, 64)), PREFETCH_BYTES // (128 * rows))
    return _power(max(1, wanted))


def _power(number: int) -> int:
    """The largest power of two that is no larger than `number`."""
    return 1 << (number.bit_length() - 1)


def reference(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The layer in plain torch float32: out [M, H] float32."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token].float() @ w13[expert].float().T).chunk(2, dim=1)
        value = (torch.nn.functional.silu(gate) * up) @ w2[expert].float().T
        out.index_add_(0, token, value * weights[token, slot, None])
    return out


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative L2 distance of `got` from `wanted`."""
    return float((got.float() - wanted).norm() / wanted.norm())


def make_weights(shape: str, device: torch.device | str = "cuda") -> list[torch.Tensor]:
    """Random w13 [E, 2I, H] and w2 [E, H, I], bf16, of which outputs have about unit size."""
    hidden, inter, experts, _ = SHAPES[shape]
    made = []
    for size in ((experts, 2 * inter, hidden), (experts, hidden, inter)):
        weight = torch.empty(size, dtype=torch.bfloat16, device=device)
        made.append(weight.normal_(0.0, size[-1] ** -0.5))
    return made


def random_routes(
    tokens: int, experts: int, top_k: int, sets: int, seed: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`sets` of ids [tokens, top_k] int32 and weights float32 on the CPU.

    While tokens * top_k <= experts, the sets walk over disjoint experts, so that no cache helps.
    """
    generator = torch.Generator().manual_seed(seed)
    made, pool = [], []
    for _ in range(sets):
        rows = []
        for _ in range(tokens):
            if tokens * top_k > experts:
                rows.append(torch.randperm(experts, generator=generator)[:top_k].tolist())
                continue
            if len(pool) < top_k:
                pool = torch.randperm(experts, generator=generator).tolist()
            rows.append(pool[:top_k])
            pool = pool[top_k:]
        weights = torch.rand(tokens, top_k, generator=generator) + 0.1
        ids = torch.tensor(rows, dtype=torch.int32)
        made.append((ids, weights / weights.sum(1, keepdim=True)))
    return made


def layer_bytes(shape: str, ids: torch.Tensor) -> int:
    """Bytes of the weights that a batch's routes read at least: each of its experts once."""
    hidden, inter, _, _ = SHAPES[shape]
    return int(ids.unique().numel()) * 3 * hidden * inter * 2


def graph_time(calls: list[Callable[[], object]], repeats: int = 10, warm: int = 2) -> float:
    """Median microseconds of one of `calls`, captured in sequence in one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(warm):
        graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


Sizes = list[tuple[int, ...]]


def candidates(shape: str, tokens: int) -> dict[str, dict[str, Sizes]]:
    """The configurations to try, by path and kernel; see `Layer.launches` for their meaning."""
    hidden, inter, _, _ = SHAPES[shape]
    large = inter * hidden >= 1 << 23
    gemm1 = [(16, 128, 4, 4), (16, 256, 4, 3), (32, 64, 4, 5), (32, 128, 4, 3), (32, 128, 4, 4)]
    gemm1 += [(64, 64, 4, 4), (64, 128, 8, 3)] if large else [(16, 128, 2, 3), (32, 256, 4, 3)]
    gemm2 = [(32, 128, 4, 4, 1), (32, 256, 4, 3, 1), (64, 64, 4, 5, 1), (64, 128, 4, 3, 1)]
    gemm2 += [(128, 64, 4, 4, 1)] if large else [(32, 128, 2, 3, 1), (64, 256, 4, 3, 1)]
    if shape == "mixtral":
        gemm2 += [(32, 256, 4, 3, 2), (64, 128, 4, 3, 2), (64, 128, 4, 3, 4), (64, 64, 4, 5, 4)]
    found = {"gemm": {"fc1": gemm1, "fc2": gemm2}}
    if tokens <= GEMV_TOKENS:
        # 256 columns to a warp: more warps than that would share columns through shared memory.
        gemv1 = [(2, 4), (4, 4), (4, 2)]
        gemv1 += [(2, 8), (4, 8)] if hidden >= 2048 else [(8, 4), (4, 1), (8, 2)]
        gemv2 = [(2, 4), (4, 4), (2, 8), (4, 8), (4, 2)]
        if inter < 512 * 4:
            gemv2 = [(2, 2), (4, 2), (2, 1), (4, 1)]
            gemv2 += [(2, 4), (4, 4)] if inter > 512 else [(8, 2)]
        found["gemv"] = {"fc1": gemv1, "fc2": gemv2}
    return found


class Bench:
    """Layers of one shape and batch over several input sets, with buffers shared between sets."""

    def __init__(
        self, shape: str, tokens: int, tensors: list[torch.Tensor], pdl: bool = True
    ) -> None:
        hidden, _, experts, top_k = SHAPES[shape]
        self.shape, self.tokens, self.pdl = shape, tokens, pdl
        device = tensors[0].device
        self.layer = Layer(*tensors, tokens, top_k)
        one = random_routes(tokens, experts, top_k, 1)[0][0]
        sets = min(32, max(6, 600_000_000 // layer_bytes(shape, one)))
        routes = random_routes(tokens, experts, top_k, sets)
        self.bytes = statistics.mean(layer_bytes(shape, ids) for ids, _ in routes)
        self.inputs = []
        for ids, weights in routes:
            x = torch.randn(tokens, hidden, device=device).to(tensors[0].dtype)
            ids, weights = ids.to(device), weights.to(device)
            routing = Routing(tokens, top_k, experts, device).run(ids)
            self.inputs.append((x, ids, weights, routing))

    def launches(self, path: str, config: Config) -> list[list[Launch]]:
        """The launches of each input set."""
        return [self.layer.launches(*inputs, path, config, pdl=self.pdl) for inputs in self.inputs]

    def time(self, path: str, config: Config, repeats: int = 10) -> float:
        """Median microseconds of a layer, routing outside."""
        sets = self.launches(path, config)
        return graph_time([lambda s=s: [launch.run() for launch in s] for s in sets], repeats)

    def time_first(self, path: str, config: Config, repeats: int = 5) -> float:
        """Median microseconds of a layer's first kernel alone."""
        sets = self.launches(path, config)
        return graph_time([launches[0].run for launches in sets], repeats)

    def error(self, path: str, config: Config) -> float:
        """Largest relative L2 error over the first two input sets, against `reference`."""
        worst = 0.0
        for x, ids, weights, routing in self.inputs[:2]:
            got = self.layer(x, ids, weights, routing, path, config, pdl=self.pdl)
            wanted = reference(x, self.layer.w13, self.layer.w2, ids, weights)
            worst = max(worst, relative_error(got, wanted))
        return worst


def precompile(benches: list[Bench], threads: int = 16) -> None:
    """Compile every candidate of the benches, in threads; those that fail are left to the sweep."""
    with (
        ThreadPoolExecutor(threads) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        for bench in benches:
            for path, kernels in candidates(bench.shape, bench.tokens).items():
                for config in _pairs(kernels):
                    for launch in bench.launches(path, config)[0]:
                        launch.compile()


def _pairs(kernels: dict[str, Sizes]) -> list[Config]:
    """Configurations in which each candidate of either kernel occurs."""
    first, second = kernels["fc1"], kernels["fc2"]
    return [
        {"fc1": first[i % len(first)], "fc2": second[i % len(second)]}
        for i in range(max(len(first), len(second)))
    ]


def _fastest(options: Sizes, measure: Callable[[tuple[int, ...]], float]) -> tuple[int, ...]:
    """The option of least time; one that does not fit the device is passed over."""
    times: dict[tuple[int, ...], float] = {}
    for option in options:
        try:
            times[option] = measure(option)
        except triton.runtime.errors.OutOfResources:
            continue
    return min(times, key=times.__getitem__)


def tune_path(bench: Bench, path: str) -> tuple[Config, float]:
    """The fastest configuration of a path and its microseconds: first fc1 alone, then fc2."""
    kernels = candidates(bench.shape, bench.tokens)[path]
    second = kernels["fc2"][0]
    first = _fastest(
        kernels["fc1"], lambda option: bench.time_first(path, {"fc1": option, "fc2": second})
    )
    second = _fastest(
        kernels["fc2"], lambda option: bench.time(path, {"fc1": first, "fc2": option}, repeats=5)
    )
    config = {"fc1": first, "fc2": second}
    return config, bench.time(path, config)


@dataclass(frozen=True)
class Result:
    """The best configuration of each path of one shape and batch, with its microseconds."""

    shape: str
    tokens: int
    paths: dict[str, tuple[Config, float]]
    errors: dict[str, float]
    bytes: float

    @property
    def path(self) -> str:
        return min(self.paths, key=lambda path: self.paths[path][1])

    @property
    def best(self) -> tuple[str, Config]:
        return self.path, self.paths[self.path][0]

    @property
    def us(self) -> float:
        return self.paths[self.path][1]

    def line(self) -> str:
        each = ", ".join(
            f"{path} {us:.1f} us {config} error {self.errors[path]:.1e}"
            for path, (config, us) in self.paths.items()
        )
        target = TARGETS.get((self.shape, self.tokens))
        goal = f" (target {target:.1f})" if target else ""
        rate = self.bytes / self.us / 1e6
        return f"{self.shape} M={self.tokens}: {self.us:.1f} us{goal}, {rate:.2f} TB/s; {each}"


def measure(bench: Bench, paths: dict[str, Config]) -> Result:
    """Times and errors of the given configurations, by path."""
    timed = {path: (config, bench.time(path, config)) for path, config in paths.items()}
    errors = {path: bench.error(path, config) for path, config in paths.items()}
    return Result(bench.shape, bench.tokens, timed, errors, bench.bytes)


def tune(
    shape: str,
    tokens: int,
    tensors: list[torch.Tensor] | None = None,
    bench: Bench | None = None,
) -> Result:
    """Sweep both paths for one shape and batch and check them against `reference`.

    `tensors` are w13 and w2 (made here if left out); a given `bench` has compiled its kernels.
    """
    if bench is None:
        bench = Bench(shape, tokens, tensors or make_weights(shape))
        precompile([bench])
    paths = {path: tune_path(bench, path) for path in candidates(shape, tokens)}
    errors = {path: bench.error(path, config) for path, (config, _) in paths.items()}
    return Result(shape, tokens, paths, errors, bench.bytes)


def best(
    shape: str,
    tokens: int,
    tensors: list[torch.Tensor] | None = None,
    bench: Bench | None = None,
) -> Result:
    """The configuration in `BEST`, measured again; without one, `tune` with the same arguments."""
    known = BEST.get((shape, tokens))
    if known is None:
        return tune(shape, tokens, tensors, bench)
    path, config = known
    return measure(bench or Bench(shape, tokens, tensors or make_weights(shape)), {path: config})


def sweep(
    shapes: list[str], tokens: list[int], budget: float, known: bool = False, pdl: bool = True
) -> list[Result]:
    """`tune` (with `known`, `best`) each shape and batch, printed as it goes, within `budget` s.

    Raises if a path's relative L2 error is 1e-2 or more.
    """
    started, results = time.monotonic(), []
    for shape in shapes:
        tensors = make_weights(shape)
        benches = [Bench(shape, count, tensors, pdl) for count in tokens]
        precompile([b for b in benches if not (known and (shape, b.tokens) in BEST)])
        sys.stdout.write(f"{shape} ready after {time.monotonic() - started:.1f} s\n")
        for bench in benches:
            if time.monotonic() - started > budget:
                sys.stdout.write("out of time\n")
                return results
            result = (best if known else tune)(shape, bench.tokens, bench=bench)
            sys.stdout.write(result.line() + "\n")
            sys.stdout.flush()
            if not max(result.errors.values()) < LARGEST_ERROR:
                raise ArithmeticError(f"{shape}, {bench.tokens} tokens: {result.errors}")
            results.append(result)
        del tensors, benches, bench
        torch.cuda.empty_cache()
    sys.stdout.write(f"{time.monotonic() - started:.1f} s\n")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--budget", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--known", action="store_true", help="measure BEST, do not sweep")
    parser.add_argument("--no-pdl", dest="pdl", action="store_false")
    options = parser.parse_args()
    results = sweep(options.shapes, options.tokens, options.budget, options.known, options.pdl)
    sys.stdout.write("BEST = {\n")
    for result in results:
        sys.stdout.write(f"    ({result.shape!r}, {result.tokens}): {result.best!r},\n")
    sys.stdout.write("}\n")


if __name__ == "__main__":
    main()
