"""A BF16 mixture-of-experts layer in Triton for decode batches: the yardstick for 3-bit kernels.

A layer is

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

from qsrt_pack.bench.bf16_moe.choices import BEST, TARGETS
from qsrt_pack.bench.bf16_moe.sweep import Bench, make_weights
from qsrt_pack.bench.timing import graph_time

__all__ = ["BEST", "TARGETS", "Bench", "graph_time", "make_weights"]
