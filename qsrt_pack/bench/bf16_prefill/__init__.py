"""A bfloat16 mixture-of-experts layer for many tokens, what prefill is compared with.

Two ways: Triton products over routes sorted by expert, gate, up and SiLU fused, in the best tiles
of a sweep; and torch's grouped product. Both include sorting the routes and the sum over them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from qsrt_pack.bench.bf16_prefill.kernel import product_kernel, sort_kernel, sum_kernel

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
        self.programs = 3  # where there is no GPU, whose multiprocessors decide
        if device.type == "cuda":
            self.programs = torch.cuda.get_device_properties(device).multi_processor_count

    def sort(self, ids: torch.Tensor, block: int) -> None:
        routes = ids.numel()
        sort_kernel[(1,)](
            ids, self.counts, self.first_block, self.cursors, self.block_experts, self.order,
            routes, self.experts, EXPERTS=1 << (self.experts - 1).bit_length(),
            ROUTES=min(4096, 1 << (routes - 1).bit_length()), BLOCK=block, num_warps=32,
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
            product_kernel[(2 * self.programs,)](
                rows, matrix, *lists, found, self.inner if gated else self.hidden,
                self.hidden if gated else self.inner, self.topk if gated else 1, gated, block,
                min(width, 128) if gated else width, step, self.experts, 8,
                num_warps=warps, num_stages=stages,
            )  # fmt: skip
        width = min(256, self.hidden & -self.hidden)
        sum_kernel[(len(x), self.hidden // width)](self.parts, out, self.hidden, self.topk, width)

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
