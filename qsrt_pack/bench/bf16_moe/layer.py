"""The launches of a bfloat16 layer for few tokens, and the buffers that they use."""

from dataclasses import dataclass
from typing import Any

import torch

from qsrt_pack.bench.bf16_moe.kernel import (
    combine_kernel,
    fc1_gemm,
    fc1_gemv,
    fc2_gemm,
    fc2_gemv,
    route_kernel,
)
from qsrt_runtime.ops.kernel import INTERPRETED

BLOCK = 16  # routes of a block: the rows of one tensor-core tile
MAX_ROUTES = 128
FIRST_WAVE = 132 * 4  # programs that ask for weights before they may start
PREFETCH_BYTES = 32768  # at most, for each of them

Config = dict[str, tuple[int, ...]]


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
        lanes = max(16, _power_above(self.routes))
        args = (ids, self.experts, self.sizes, self.rows, self.routes, self.max_blocks)
        route_kernel[(1,)](*args, lanes, BLOCK, num_warps=max(1, lanes * lanes // 1024))
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
                fc1_gemm,
                (blocks * (self.inter // n1),),
                (x, self.w13, self.act, *lists, self.top_k, *sizes, BLOCK, n1, k1, stages1, pdl),
                {"num_warps": warps1},
            ),
            Launch(
                fc2_gemm,
                (blocks * (self.hidden // n2) * split,),
                (self.act, self.w2, self.partial, *lists, self.routes, *sizes, BLOCK, *second),
                {"num_warps": warps2, **late},
            ),
            Launch(
                combine_kernel,
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
        k1 = min(256 * warps1, _power_above(self.hidden))
        k2 = min(256 * warps2, _power_above(self.inter))
        sizes = (self.top_k, self.hidden, self.inter)
        lines = _lines(self.inter, n2)
        ahead = _power(max(1, min(self.top_k, PREFETCH_BYTES // (128 * lines * n2))))
        unroll = self.inter <= 4 * k2 or self.inter % k2 != 0
        second = (n2, k2, unroll, pdl, 2 * FIRST_WAVE, lines, ahead)
        late = {"launch_pdl": True} if pdl else {}
        return [
            Launch(
                fc1_gemv,
                (self.routes * (self.inter // n1),),
                (x, self.w13, self.act, ids, *sizes, n1, k1, pdl),
                {"num_warps": warps1},
            ),
            Launch(
                fc2_gemv,
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
    wanted = min(_power_above(-(-columns // 64)), PREFETCH_BYTES // (128 * rows))
    return _power(max(1, wanted))


def _power(number: int) -> int:
    """The largest power of two that is no larger than `number`."""
    return 1 << (number.bit_length() - 1)


def _power_above(number: int) -> int:
    """The least power of two that is no less than `number`."""
    return 1 << (number - 1).bit_length()
