"""What a way of computing a layer is, and what it chooses among."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from qsrt_pack.bench.inputs import Input
from qsrt_pack.bench.machine import Call


class Unavailable(Exception):
    """Why a way cannot run here, or not so many tokens."""


@dataclass(frozen=True)
class Choice:
    """One way's calls, one for each input. name: of its kernels and how they are launched.

    outs: [T, H], what each call writes.
    """

    name: str
    calls: list[Call]
    outs: list[torch.Tensor]


# Checks a choice against the reference; microseconds of a few replays.
Measure = Callable[[Choice], float]


class Way(Protocol):
    """name: its column's.   weights: "packed" or "dense", what it computes with.

    expert_bytes: of an expert's weights, all of which it reads.
    """

    name: str
    weights: str
    expert_bytes: int

    def buffer_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        """Of memory, beside weights and the calls' rows, in and out."""

    def tune(self, inputs: Sequence[Input], measure: Measure) -> Choice:
        """The fastest choice. Raises Unavailable where there is none."""


def tensor_bytes(held: object) -> int:
    """Of all tensors that an object holds."""
    return sum(value.nbytes for value in vars(held).values() if isinstance(value, torch.Tensor))
