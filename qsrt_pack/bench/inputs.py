"""What the calls of one graph are given."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qsrt_pack.bench.bf16_moe.sweep import random_routes
from qsrt_pack.bench.layers import TIMES_L2
from qsrt_pack.bench.shapes import Shape

_FEWEST, _MOST = 4, 128  # calls of a graph


@dataclass(frozen=True)
class Input:
    """One call's. place: of its layer among those that are gone through.

    x: [T, H].   ids: [T, k] int32.   weights: [T, k] float32, of which each row adds up to 1.
    """

    place: int
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def count_calls(shape: Shape, tokens: int, layers: int, l2_bytes: int) -> int:
    """So many that they read TIMES_L2 times the L2 cache, if _MOST do, and every layer."""
    experts = min(tokens * shape.topk, shape.geometry.experts)
    read = shape.packed_bytes * experts // shape.geometry.experts
    return max(layers, _FEWEST, min(_MOST, -(-TIMES_L2 * l2_bytes // read)))


def input_bytes(shape: Shape, tokens: int, dtype: torch.dtype) -> int:
    """Of one call's rows, in or out."""
    return tokens * shape.sizes.hidden * dtype.itemsize


def make_inputs(
    shape: Shape, tokens: int, calls: int, layers: int, dtype: torch.dtype, device: torch.device
) -> list[Input]:
    """Normal rows, routed at random; calls after one another take other layers and experts."""
    generator = torch.Generator(device).manual_seed(tokens)
    routes = random_routes(tokens, shape.geometry.experts, shape.topk, calls)
    found = []
    for number, (ids, weights) in enumerate(routes):
        x = torch.randn(tokens, shape.sizes.hidden, generator=generator, device=device)
        found.append(Input(number % layers, x.to(dtype), ids.to(device), weights.to(device)))
    return found


def experts_of(inputs: Sequence[Input]) -> tuple[float, int]:
    """Experts that a call's tokens go to, on average, and those of all layers that some go to."""
    each = [set(i.ids.unique().tolist()) for i in inputs]
    everyone = {(i.place, e) for i, experts in zip(inputs, each, strict=True) for e in experts}
    return sum(map(len, each)) / len(each), len(everyone)
