"""Bytes of files to a device, through pinned memory, by many threads at once.

A GPU takes a copy from pinned memory several times faster than one thread copies out of the page
cache, and the interpreter's lock is slow to get back among many threads: so each of them reads
large parts and waits for their copies, letting go of the lock twice a part.
"""

import ctypes
import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from types import TracebackType

import torch

from qsrt_runtime.format.errors import FormatError

THREADS = min(12, os.cpu_count() or 1)
PART = 8 << 20  # bytes that a thread reads at once, into pinned memory of its own


class Staging:
    """Reads extents of files onto one CPU or CUDA device; a context manager.

    What `read` returns is filled when the block ends.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._parts: deque[_Part] = deque()
        self._descriptors: list[int] = []
        self._errors: list[BaseException] = []

    def __enter__(self) -> "Staging":
        return self

    def read(self, path: Path, start: int, size: int) -> torch.Tensor:
        """Bytes [start, start + size) of a file as a [size] uint8 tensor, filled later.

        The block ends with FormatError when the file ends before that.
        """
        return self.read_rows(path, start, 1, size, size)[0]

    def read_rows(self, path: Path, start: int, rows: int, size: int, stride: int) -> torch.Tensor:
        """`rows` runs of `size` bytes that begin at start, start + stride, ...: [rows, size].

        As `read`, of nothing in between.
        """
        out = torch.empty(rows, size, dtype=torch.uint8, device=self.device)
        runs = out.view(1, rows * size) if size == stride else out  # that lie side by side are one
        descriptor = os.open(path, os.O_RDONLY)
        self._descriptors.append(descriptor)
        self._parts += [
            _Part(path, descriptor, start + row * stride + offset, run[offset : offset + PART])
            for row, run in enumerate(runs)
            for offset in range(0, len(run), PART)
        ]
        return out

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._fill()
        finally:
            for descriptor in self._descriptors:
                os.close(descriptor)

    def _fill(self) -> None:
        """Read all parts."""
        if self.device.type == "cuda":  # what had the memory before may still be running
            torch.cuda.current_stream(self.device).synchronize()
        started: list[Thread] = []
        try:
            for _ in range(min(THREADS, len(self._parts))):
                thread = Thread(target=self._serve)
                thread.start()
                started.append(thread)
            for thread in started:
                thread.join()
        finally:
            self._parts.clear()  # so that an interrupt ends the threads, before files are closed
            for thread in started:
                thread.join()
        if self._errors:
            raise self._errors[0]

    def _serve(self) -> None:
        """Read parts until none is left."""
        try:
            if self.device.type == "cpu":
                for part in self._take():
                    _read(part, part.target)
            else:
                self._stage()
        except BaseException as error:  # for the caller's thread
            self._errors.append(error)
            self._parts.clear()

    def _take(self) -> Iterator["_Part"]:
        """Parts that no other thread has taken."""
        with suppress(IndexError):
            while True:
                yield self._parts.popleft()

    def _stage(self) -> None:
        """As _serve, by way of a pinned buffer."""
        memory = torch.empty(PART, dtype=torch.uint8, device="cpu", pin_memory=True)
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.Stream(self.device)):
            for part in self._take():
                buffer = memory[: len(part.target)]
                _read(part, buffer)
                part.target.copy_(buffer)


@dataclass(frozen=True)
class _Part:
    """Where bytes come from and where they go."""

    path: Path
    descriptor: int
    start: int
    target: torch.Tensor


def _read(part: _Part, memory: torch.Tensor) -> None:
    """Fill contiguous CPU memory with a part's bytes, without the interpreter's lock."""
    array = (ctypes.c_char * memory.nbytes).from_address(memory.data_ptr())
    view, position = memoryview(array).cast("B"), part.start
    while len(view):
        count = os.preadv(part.descriptor, [view], position)
        if not count:
            raise FormatError(f"{part.path} ends at byte {position}; it was cut short while read")
        view, position = view[count:], position + count
