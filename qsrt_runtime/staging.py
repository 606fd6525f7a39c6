"""Bytes of files to a device, by way of mappings and pinned memory.

One thread copies out of the page cache several times more slowly than a GPU takes a copy from
pinned memory, so torch's own threads fill one pinned buffer together while the GPU takes the
other: 0.86 of a plain copy from pinned memory, where threads of Python, which wait for the
interpreter's lock, reach 0.78 at best (tests/bench/bench_reading.py).
"""

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch

from qsrt_runtime.format.errors import FormatError

THREADS = min(16, len(os.sched_getaffinity(0)))
PART = 32 << 20  # bytes of each of the two pinned buffers


class Staging:
    """Reads extents of files onto one CPU or CUDA device; a context manager.

    What `read` returns is filled when the block ends. A file must not be cut short before that.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies: deque[tuple[torch.Tensor, torch.Tensor]] = deque()  # mapped source, target

    def __enter__(self) -> "Staging":
        return self

    def read(self, path: Path, start: int, size: int) -> torch.Tensor:
        """Bytes [start, start + size) of a file as a [size] uint8 tensor, filled later.

        Raises FormatError when the file ends before that.
        """
        found, end = path.stat().st_size, start + size
        if found < end:
            raise FormatError(f"{path} ends at byte {found}, expected {end}; it was cut short")
        out = torch.empty(size, dtype=torch.uint8, device=self.device)
        if size:
            source = torch.from_file(str(path), shared=False, size=end, dtype=torch.uint8)
            self._copies.append((source[start:], out))
        return out

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                with _threads(THREADS):
                    self._fill()
        finally:
            self._copies.clear()

    def _fill(self) -> None:
        if self.device.type == "cpu":
            for source, target in self._parts():
                target.copy_(source)
            return
        with torch.cuda.device(self.device):
            _stage(self._parts())

    def _parts(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What is to be copied; a file's mapping is gone once its last part is."""
        while self._copies:
            yield from zip(*(x.split(PART) for x in self._copies.popleft()), strict=True)


def _stage(parts: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy parts, mapped to GPU, on the current stream, through two pinned buffers in turn."""
    memory = [torch.empty(PART, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    taken = [torch.cuda.Event() for _ in memory]
    for turn, (source, target) in enumerate(parts):
        buffer, event = memory[turn % 2][: len(source)], taken[turn % 2]
        event.synchronize()
        buffer.copy_(source)
        target.copy_(buffer, non_blocking=True)
        event.record()
    torch.cuda.current_stream().synchronize()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch use so many threads, whatever OMP_NUM_THREADS says."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
