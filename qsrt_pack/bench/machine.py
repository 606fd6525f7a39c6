"""The GPU that measures: what is known of it, its memory and its clock."""

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from qsrt_pack.bench.timing import graph_times

_COPIED = 1 << 30  # bytes, far more than any L2 cache
_COPIES, _REPEATS = 4, 15

Call = Callable[[], object]


@dataclass(frozen=True)
class Machine:
    """name, capability, multiprocessors, memory_bytes, l2_bytes: as the driver states them.

    free_bytes: of memory, now.   times: microseconds of a call in each of so many replays, see
    graph_times.
    """

    device: torch.device
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    l2_bytes: int
    free_bytes: Callable[[], int]
    times: Callable[[Sequence[Call], int], list[float]]


def machine_of(device: torch.device) -> Machine:
    """A CUDA device as it is, which becomes the current one."""
    torch.cuda.set_device(device)
    found = torch.cuda.get_device_properties(device)

    def free_bytes() -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]

    return Machine(
        device=device,
        name=re.sub("[^A-Za-z0-9 ._+()/-]", "_", found.name)[:100],
        capability=(found.major, found.minor),
        multiprocessors=found.multi_processor_count,
        memory_bytes=found.total_memory,
        l2_bytes=found.L2_cache_size,
        free_bytes=free_bytes,
        times=graph_times,
    )


def copy_rate(machine: Machine) -> float:
    """Bytes a second, read and written, of a kernel that copies within the GPU's memory.

    In a graph, copy_ would be the copy engine's, which is slower.
    """
    size = min(_COPIED, machine.free_bytes() // 4) // 4
    source = torch.randint(-(2**31), 2**31 - 1, (size,), dtype=torch.int32, device=machine.device)
    target = torch.empty_like(source)
    times = machine.times([lambda: torch.add(source, 1, out=target)] * _COPIES, _REPEATS)
    return 2 * source.nbytes / statistics.median(times) * 1e6
