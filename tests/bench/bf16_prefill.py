"""A bfloat16 mixture-of-experts layer for many tokens, what prefill is compared with.

Two ways: Triton products over routes sorted by expert, gate, up and SiLU fused, in the best tiles
of a sweep; and torch's grouped product. Both include sorting the routes and the sum over them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from qsrt_runtime.ops.group.kernel import group_kernel

# BLOCK (routes), WIDTH (columns), STEP, warps, stages
TILES = [
    (16, 128, 128, 4, 3),
    (32, 128, 64, 4, 4),
    (64, 128, 64, 4, 4),
    (64, 256, 64, 8, 3),
    (128, 128, 64, 8, 3),
    (128, 128, 64, 4, 4),
    (128, 256, 64, 8, 3),
]


@triton.jit
def _product(
    x, weights, first_block, block_experts, order, route_weights, out,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, DIVISOR: tl.constexpr, GATED: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, EXPERTS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """out [R, ROWS]: SiLU(x W1) * (x W3) where GATED, weights [E, 2 ROWS, DEPTH], else x W2."""
    tiles: tl.constexpr = ROWS // WIDTH
    blocks = tl.load(first_block + EXPERTS)
    matrix: tl.constexpr = 2 * ROWS if GATED else ROWS
    for number in tl.range(tl.program_id(0), blocks * tiles, tl.num_programs(0)):
        group = number // (GROUP * tiles)
        size = tl.minimum(blocks - group * GROUP, GROUP)
        block = group * GROUP + number % (GROUP * tiles) % size
        tile = number % (GROUP * tiles) // size
        expert = tl.load(block_experts + block).to(tl.int64)
        route = tl.load(order + block * BLOCK + tl.arange(0, BLOCK))
        row = tl.maximum(route, 0) // DIVISOR
        channel = tile * WIDTH + tl.arange(0, WIDTH)
        depth = tl.arange(0, STEP)
        source = x + row.to(tl.int64)[:, None] * DEPTH + depth[None, :]
        weight = weights + (expert * matrix + channel)[None, :] * DEPTH + depth[:, None]
        sums = tl.zeros((BLOCK, WIDTH), tl.float32)
        ups = tl.zeros((BLOCK, WIDTH), tl.float32)
        for at in tl.range(0, DEPTH, STEP):
            rows = tl.load(source + at)
            sums = tl.dot(rows, tl.load(weight + at), sums)
            if GATED:
                ups = tl.dot(rows, tl.load(weight + ROWS * DEPTH + at), ups)
        if GATED:
            sums = sums * tl.sigmoid(sums) * ups
        else:
            sums *= tl.load(route_weights + tl.maximum(route, 0))[:, None]
        target = out + route.to(tl.int64)[:, None] * ROWS + channel[None, :]
        tl.store(target, sums.to(tl.bfloat16), mask=(route >= 0)[:, None])


@triton.jit
def _sum(parts, out, HIDDEN: tl.constexpr, TOPK: tl.constexpr, WIDTH: tl.constexpr):
    token, channel = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    for choice in tl.static_range(0, TOPK):
        row = (token * TOPK + choice).to(tl.int64) * HIDDEN
        total += tl.load(parts + row + channel).to(tl.float32)
    tl.store(out + token.to(tl.int64) * HIDDEN + channel, total.to(tl.bfloat16))


@dataclass
class Dense:
    """w13 [E, 2I, H] and w2 [E, H, I], bfloat16, and buffers for `tokens` tokens of `topk`."""

    w13: torch.Tensor
    w2: torch.Tensor
    tokens: int
    topk: int

    def __post_init__(self) -> None:
        self.experts, self.hidden, self.inner = self.w2.shape
        routes, device = self.tokens * self.topk, self.w2.device
        places = min(routes * 128, routes + self.experts * 127)

        def integers(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        self.first_block, self.cursors = integers(self.experts + 1), integers(self.experts)
        self.block_experts, self.order = integers(routes // 16 + self.experts), integers(places)
        self.counts = integers(2)
        self.middle = self.w2.new_empty(routes, self.inner)
        self.parts = self.w2.new_empty(routes, self.hidden)
        self.programs = torch.cuda.get_device_properties(device).multi_processor_count

    def sort(self, ids: torch.Tensor, block: int) -> None:
        routes = ids.numel()
        group_kernel[(1,)](
            self.w2, self.w2, ids, ids, self.w2, self.counts, self.first_block, self.cursors,
            self.block_experts, self.order, self.order, 0, routes, self.experts, self.experts,
            HIDDEN=self.hidden, SCALE_ROWS=1, TOPK=self.topk, BY_ROUTE=False, INPUTS=1, BLOCKS=2,
            EXPERTS=triton.next_power_of_2(self.experts),
            ROUTES=min(4096, triton.next_power_of_2(routes)), BLOCK=block,
            BY_WORD=True, HAS_PLACES=False, HAS_MAP=False, WARPS=32,
            PDL=False, num_warps=32,
        )  # fmt: skip

    def triton(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor,
        first: tuple[int, ...], second: tuple[int, ...],
    ) -> None:  # fmt: skip
        """first, second: of TILES, with the same BLOCK."""
        self.sort(ids, first[0])
        lists = (self.first_block, self.block_experts, self.order, weights)
        for rows, matrix, found, (block, width, step, warps, stages), gated in (
            (x, self.w13, self.middle, first, True),
            (self.middle, self.w2, self.parts, second, False),
        ):
            _product[(2 * self.programs,)](
                rows, matrix, *lists, found, self.inner if gated else self.hidden,
                self.hidden if gated else self.inner, self.topk if gated else 1, gated, block,
                min(width, 128) if gated else width, step, self.experts, 8,
                num_warps=warps, num_stages=stages,
            )  # fmt: skip
        _sum[(len(x), self.hidden // 256)](self.parts, out, self.hidden, self.topk, 256)

    def torch(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> None:
        flat = ids.flatten()
        order = flat.argsort()
        ends = torch.histc(flat.float(), self.experts, 0, self.experts).cumsum(0).int()
        rows = x[order // self.topk]
        gate, up = torch._grouped_mm(rows, self.w13.mT, offs=ends).chunk(2, 1)
        found = torch._grouped_mm(torch.nn.functional.silu(gate) * up, self.w2.mT, offs=ends)
        found = found * weights.flatten()[order, None].to(found.dtype)
        parts = torch.empty_like(found).index_copy_(0, order, found)
        out.copy_(parts.view(len(x), self.topk, -1).sum(1))


def best_us(
    dense: Dense,
    inputs: list[tuple[Any, ...]],
    graph_us: Callable[[list[Callable[[], object]]], float],
) -> tuple[float, str]:
    """The least median of microseconds, and by what way."""
    found = [(graph_us([lambda i=i: dense.torch(*i) for i in inputs]), "torch._grouped_mm")]
    for first in TILES:
        for second in TILES:
            if first[0] == second[0]:
                calls = [lambda i=i, f=first, s=second: dense.triton(*i, f, s) for i in inputs]
                found.append((graph_us(calls), f"Triton {first} {second}"))
    return min(found)
