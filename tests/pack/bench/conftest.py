"""A machine that is no GPU: CPU tensors, the interpreter, and a clock that counts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from benched import bench_report
from triton.runtime import interpreter

from qsrt_pack.bench import dense
from qsrt_pack.bench.bf16_moe import choices
from qsrt_pack.bench.machine import Machine
from qsrt_runtime import moe_kernels

FREE = 8_000_000_000


class _Kind(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, int)

    def __call__(cls, value: Any = 0) -> int:
        return value.item() if isinstance(value, np.ndarray) else int(value)


class _Whole(metaclass=_Kind):
    """int, which takes arrays of one element, too, as those of NumPy 2.4 do not."""


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels run in the interpreter: one may end a range at what it has loaded."""
    if torch.cuda.is_available():
        pytest.skip("kernels run on the GPU here, not in the interpreter")
    monkeypatch.setattr(interpreter, "int", _Whole, raising=False)


def _choose(monkeypatch: pytest.MonkeyPatch, gemm: dict, gemv: dict, tiles: list) -> None:
    def candidates(_hidden: int, _inter: int, tokens: int) -> dict:
        return {"gemm": gemm} | ({"gemv": gemv} if tokens == 1 else {})

    monkeypatch.setattr(choices, "candidates", candidates)
    monkeypatch.setattr(dense, "TILES", tiles)


@pytest.fixture
def few_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two configurations of each kind instead of dozens."""
    gemm = {"fc1": [(16, 64, 1, 1)], "fc2": [(32, 64, 1, 1, 1), (64, 64, 1, 1, 2)]}
    gemv = {"fc1": [(2, 1), (4, 1)], "fc2": [(2, 1)]}
    _choose(monkeypatch, gemm, gemv, [(16, 128, 64, 4, 1), (32, 128, 64, 4, 1)])


@pytest.fixture
def one_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each kind, and moe_prefill from 17 tokens on."""
    gemm = {"fc1": [(64, 64, 1, 1)], "fc2": [(64, 128, 1, 1, 1)]}
    gemv = {"fc1": [(32, 1)], "fc2": [(32, 1)]}
    _choose(monkeypatch, gemm, gemv, [(32, 128, 64, 4, 1)])
    monkeypatch.setattr(moe_kernels, "FEW_ROWS", 4)  # so that few tokens are many


class Clock:
    """Microseconds by the name that a call's way gave; every call is made once."""

    def __init__(self) -> None:
        self.timed: list[int] = []

    def times(self, calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
        self.timed.append(len(calls))
        calls[-1]()
        return [10.0 * len(self.timed) + number for number in range(repeats)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def machine(clock: Clock) -> Machine:
    """A cache of 64 KB, so that several copies of tiny layers are gone through."""
    return Machine(
        device=torch.device("cpu"),
        name="no GPU",
        capability=(9, 0),
        multiprocessors=3,
        memory_bytes=2 * FREE,
        l2_bytes=1 << 16,
        free_bytes=lambda: FREE,
        times=clock.times,
    )


@pytest.fixture
def with_free(machine: Machine) -> Callable[[int], Machine]:
    """with_free(n): the machine with so many bytes free."""
    return lambda free: replace(machine, free_bytes=lambda: free)


@pytest.fixture
def report() -> dict[str, Any]:
    return bench_report()
