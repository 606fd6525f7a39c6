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

    outs: [T, H], what each call writes.   activation: of the products' rows, "a16" or "a8".
    """

    name: str
    calls: list[Call]
    outs: list[torch.Tensor]
    activation: str = "a16"


# Checks a choice against the reference; microseconds of a few replays.
Measure = Callable[[Choice], float]


class Way(Protocol):
    """name: its column's.   weights: "packed", as stored or expanded, or "dense".

    expert_bytes: of an expert's weights, all of which it reads.
    """

    name: str
    weights: str
    expert_bytes: int

    def buffer_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        """Of memory, beside weights and the calls' rows, in and out.

        Raises Unavailable where it takes fewer tokens.
        """

    def tune(self, inputs: Sequence[Input], measure: Measure) -> Choice:
        """The fastest choice. Raises Unavailable where there is none."""


@dataclass(frozen=True)
class Absent:
    """A way that cannot run here, whatever the number of tokens.   reason: why."""

    name: str
    expert_bytes: int
    reason: str
    weights: str = "packed"

    def buffer_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        raise Unavailable(self.reason)

    def tune(self, inputs: Sequence[Input], measure: Measure) -> Choice:
        raise Unavailable(self.reason)


def tensor_bytes(held: object) -> int:
    """Of all tensors that an object holds."""
    return sum(value.nbytes for value in vars(held).values() if isinstance(value, torch.Tensor))
