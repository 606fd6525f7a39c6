"""Bytes of files to a device, through pinned memory, by many threads at once.

A GPU takes a copy from pinned memory several times faster than one thread copies out of the page
cache, and the interpreter's lock is slow to get back among many threads: so each of them reads
large parts and waits for their copies, letting go of the lock twice a part. What else was tried is
in tests/bench/results/load_h200.txt.
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
        descriptor = os.open(path, os.O_RDONLY)
        self._descriptors.append(descriptor)
        if size == stride:  # they lie side by side
            rows, size = 1, rows * size
        for first in range(0, out.nbytes, PART):
            target = out.view(-1)[first : first + PART]
            pieces = _pieces(start, size, stride, first, len(target))
            self._parts.append(_Part(path, descriptor, pieces, target))
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
    """Where bytes come from and where they go.

    pieces: (start, size) of each in the file; they lie side by side in the target.
    """

    path: Path
    descriptor: int
    pieces: tuple[tuple[int, int], ...]
    target: torch.Tensor


def _pieces(
    start: int, size: int, stride: int, first: int, count: int
) -> tuple[tuple[int, int], ...]:
    """(start, size) in the file of bytes [first, first + count) of rows that lie side by side.

    size, stride: the rows', of which the first begins at `start`.
    """
    pieces, last = [], first + count
    while first < last:
        row, column = divmod(first, size)
        taken = min(size - column, last - first)
        pieces.append((start + row * stride + column, taken))
        first += taken
    return tuple(pieces)


def _read(part: _Part, memory: torch.Tensor) -> None:
    """Fill contiguous CPU memory with a part's bytes, without the interpreter's lock."""
    address = memory.data_ptr()
    for start, size in part.pieces:
        _read_piece(part, start, address, size)
        address += size


def _read_piece(part: _Part, start: int, address: int, size: int) -> None:
    """Read bytes [start, start + size) of a part's file to an address of the CPU."""
    view = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    while len(view):
        try:
            count = os.preadv(part.descriptor, [view], start)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(part.path)) from error
        if not count:
            end = os.fstat(part.descriptor).st_size
            raise FormatError(f"{part.path} ends at byte {end}; it was cut short while read")
        view, start = view[count:], start + count
