"""Bytes of files to a device, through pinned memory, while more of them are read.

A GPU takes a copy from pinned memory several times faster than one thread copies out of the page
cache. The interpreter's lock is slow to get back among several threads, so where glibc reads by
threads of its own, the caller's alone starts those reads and the copies, and reads go on while it
does something else. tests/bench/bench_load.py compares the ways.
"""

import ctypes
import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from threading import Thread
from types import TracebackType

import torch

from qsrt_runtime import aio
from qsrt_runtime.format.errors import FormatError

CORES = os.cpu_count() or 1
THREADS = min(12, CORES)
PART = 8 << 20  # bytes that a thread reads at once, into memory of its own
ENOUGH_CORES = 8  # to read ahead: with 2, glibc's threads are slower than Python's
AHEAD_PART = 4 << 20
COPIES = 12  # parts that are copied while aio.THREADS are read
WORTH_A_REQUEST = 32 << 10  # bytes of a piece, on average: as quick as one by one, on 2 cores


def reads_ahead(device: torch.device) -> bool:
    """Whether glibc reads ahead to this device, instead of THREADS of Python in the end."""
    return device.type == "cuda" and CORES >= ENOUGH_CORES and aio.is_available()


class Staging:
    """Reads extents of files onto one CPU or CUDA device; a context manager.

    What `read` returns is filled when the block ends.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ring = _Ring(device) if reads_ahead(device) else None
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
        flat, most = out.view(-1), PART if self._ring is None else AHEAD_PART
        parts = [
            _Part(path, descriptor, _pieces(start, size, stride, at, target.nbytes), target)
            for at, target in zip(range(0, len(flat), most), flat.split(most), strict=False)
        ]
        if self._ring is None:
            self._parts += parts
        else:
            self._ring.put(parts)
        return out

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._fill() if self._ring is None else self._ring.finish()
        finally:
            try:
                if self._ring is not None:
                    self._ring.give_up()
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


class _Ring:
    """Buffers, most of which are read to at any time, while others are copied to the device."""

    def __init__(self, device: torch.device) -> None:
        is_cuda, count = device.type == "cuda", aio.THREADS + COPIES
        memory = torch.empty(count, AHEAD_PART, dtype=torch.uint8, device="cpu", pin_memory=is_cuda)
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        self._buffers = cycle([(row, torch.cuda.Event() if is_cuda else None) for row in memory])
        self._under_way: deque[_Ahead] = deque()

    def put(self, parts: Iterable["_Part"]) -> None:
        """Start reading parts, each once there is room for it."""
        if self._stream is not None:  # what had the memory of targets before may still run
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for part in parts:
                if len(self._under_way) == aio.THREADS:
                    self._finish_first()
                self._start(part)

    def _start(self, part: "_Part") -> None:
        buffer, copied = next(self._buffers)
        if copied is not None:
            copied.synchronize()
        ahead = _Ahead(part, buffer[: part.target.nbytes], copied)
        self._under_way.append(ahead)  # before anything writes to the buffer, see give_up
        ahead.start()

    def _finish_first(self) -> None:
        self._under_way[0].arrive()
        self._under_way.popleft().copy(self._stream)

    def finish(self) -> None:
        """Wait until all parts are where they go."""
        with torch.cuda.stream(self._stream):
            while self._under_way:
                self._finish_first()
        if self._stream is not None:
            self._stream.synchronize()

    def give_up(self) -> None:
        """Wait until nothing writes to the buffers, nor to targets, even if interrupted again."""
        interrupt = None
        while self._under_way:
            try:
                self._under_way[0].wait()
                self._under_way.popleft()
            except KeyboardInterrupt as error:
                interrupt = error
        if self._stream is not None:
            self._stream.synchronize()
        if interrupt is not None:
            raise interrupt


class _Ahead:
    """A part on its way into a buffer, and from there to its target."""

    def __init__(self, part: "_Part", buffer: torch.Tensor, copied: torch.cuda.Event | None):
        """copied: tells when the buffer may be written to again."""
        self._part, self._buffer, self._copied = part, buffer, copied
        is_worth_it = buffer.nbytes >= WORTH_A_REQUEST * len(part.pieces)
        self._reading = aio.Reading(part.pieces) if is_worth_it else None

    def start(self) -> None:
        if self._reading is not None:
            self._reading.start(self._part.descriptor, self._buffer.data_ptr())

    def wait(self) -> list[int]:
        """Until nothing is read any more: how many bytes of each piece are there."""
        return self._reading.wait() if self._reading else [0] * len(self._part.pieces)

    def arrive(self) -> None:
        """Wait, and read what is not there yet."""
        _read(self._part, self._buffer, self.wait())

    def copy(self, stream: torch.cuda.Stream | None) -> None:
        """Start copying. stream: the current one, which to look up takes longer than to copy."""
        self._part.target.copy_(self._buffer, non_blocking=True)
        if self._copied is not None:
            self._copied.record(stream)


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


def _read(part: _Part, memory: torch.Tensor, there: list[int] | None = None) -> None:
    """Fill contiguous CPU memory with a part's bytes, without the interpreter's lock.

    there: how many bytes of each piece are in their place already.
    """
    address = memory.data_ptr()
    for (start, size), done in zip(part.pieces, there or [0] * len(part.pieces), strict=True):
        if done < size:
            _read_on(part, start + done, address + done, size - done)
        address += size


def _read_on(part: _Part, start: int, address: int, size: int) -> None:
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
