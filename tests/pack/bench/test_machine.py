"""The GPU's clock and copy bandwidth."""

from dataclasses import replace

import pytest
import torch

from qsrt_pack.bench.machine import copy_rate, machine_of
from qsrt_pack.bench.timing import graph_time, graph_times


def test_copies_are_counted_read_and_written(machine):
    given = []

    def times(calls, repeats):
        given.append((len(calls), repeats))
        for call in calls:
            assert len(call().unique()) > 200  # never of zeros
        return [50.0] * (repeats // 2) + [100.0] * (repeats - repeats // 2)

    rate = copy_rate(replace(machine, free_bytes=lambda: 4_000_000, times=times))
    assert rate == pytest.approx(2 * 1_000_000 / 100e-6)
    assert given == [(4, 15)]


@pytest.mark.gpu
def test_a_gpu():
    machine = machine_of(torch.device("cuda", 0))
    assert machine.name and machine.capability >= (7, 0) and machine.multiprocessors > 1
    assert machine.l2_bytes > 1 << 20
    assert 0 < machine.free_bytes() < machine.memory_bytes
    assert 1e11 < copy_rate(machine) < 1e14


@pytest.mark.gpu
def test_replays():
    x, count = torch.randn(4096, 4096, device="cuda"), torch.zeros((), device="cuda")
    times = graph_times([lambda: x @ x, lambda: count.add_(1)], 5, warm=2)
    assert len(times) == 5 and all(us > 0 for us in times)
    assert count.item() == 1 + 2 + 5  # once outside, captured, then replayed
    one, four = (graph_time([lambda n=n: [x @ x for _ in range(n)]]) for n in (1, 4))
    assert 2 < four / one < 8
