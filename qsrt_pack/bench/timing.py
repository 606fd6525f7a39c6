"""Times of calls in replays of a CUDA graph."""

import statistics
from collections.abc import Callable, Sequence

import torch

REPEATS, WARM = 10, 2


def graph_times(
    calls: Sequence[Callable[[], object]], repeats: int = REPEATS, warm: int = WARM
) -> list[float]:
    """Microseconds of one of `calls` in each replay of one CUDA graph of all, in sequence.

    Each is first called once, which compiles what it needs.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
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
    return times


def graph_time(
    calls: Sequence[Callable[[], object]], repeats: int = REPEATS, warm: int = WARM
) -> float:
    """The median of `graph_times`."""
    return statistics.median(graph_times(calls, repeats, warm))
