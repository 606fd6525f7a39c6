"""Bytes of files to a device, through pinned memory, while more of them are read.

A GPU takes a copy from pinned memory several times faster than one thread copies out of the page
cache. The interpreter's lock is slow to get back among many threads, so where glibc reads by
threads of its own, one of Python's starts those reads and the copies. tests/bench/bench_load.py
compares the ways.
"""

import ctypes
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from queue import SimpleQueue
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
COPIES = 4  # parts that are copied while aio.THREADS are read
WORTH_A_REQUEST = 32 << 10  # bytes of a piece, on average: as quick as one by one, on 2 cores


def reads_ahead(device: torch.device) -> bool:
    """Whether one thread reads ahead to this device, instead of THREADS by turns."""
    return device.type == "cuda" and CORES >= ENOUGH_CORES and aio.is_available()


class Staging:
    """Reads extents of files onto one CPU or CUDA device; a context manager.

    What `read` returns is filled when the block ends.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._reads_ahead = reads_ahead(device)
        self._parts: SimpleQueue[_Part | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._descriptors: list[int] = []
        self._errors: list[BaseException] = []
        self._stopped = False

    def __enter__(self) -> "Staging":
        try:
            for _ in range(1 if self._reads_ahead else THREADS):
                thread = Thread(target=self._serve)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self._end(stop=True)
            raise
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
        ready = None
        if self.device.type == "cuda":  # what had the memory before may still be running
            ready = torch.cuda.current_stream(self.device).record_event()
        descriptor = os.open(path, os.O_RDONLY)
        self._descriptors.append(descriptor)
        if size == stride:  # they lie side by side
            rows, size = 1, rows * size
        flat, most = out.view(-1), AHEAD_PART if self._reads_ahead else PART
        for first in range(0, len(flat), most):
            target = flat[first : first + most]
            pieces = tuple(_pieces(start, size, stride, range(first, first + len(target))))
            self._parts.put(_Part(path, descriptor, pieces, target, ready))
        return out

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(stop=kind is not None)
        if kind is None and self._errors:
            raise self._errors[0]

    def _end(self, stop: bool) -> None:
        """Wait for the threads, which read what is left unless they are to stop."""
        self._stopped |= stop
        try:
            for _ in self._threads:
                self._parts.put(None)
            for thread in self._threads:
                thread.join()
        finally:
            self._stopped = True  # so that an interrupt ends the threads, before files are closed
            for _ in self._threads:
                self._parts.put(None)
            for thread in self._threads:
                thread.join()
            for descriptor in self._descriptors:
                os.close(descriptor)

    def _serve(self) -> None:
        """Read parts until none is left."""
        try:
            if self._reads_ahead:
                self._stage_ahead()
            elif self.device.type == "cpu":
                while part := self._take():
                    _read(part, part.target)
            else:
                self._stage()
        except BaseException as error:  # for the caller's thread
            self._errors.append(error)
            self._stopped = True

    def _take(self) -> "_Part | None":
        """The next part, once there is one; None after the last one."""
        part = self._parts.get()
        return None if self._stopped else part

    def _stage(self) -> None:
        """As _serve, by way of a pinned buffer."""
        memory = torch.empty(PART, dtype=torch.uint8, device="cpu", pin_memory=True)
        with self._own_stream():
            while part := self._take():
                buffer = memory[: len(part.target)]
                _read(part, buffer)
                _copy(part, buffer)
                torch.cuda.current_stream().synchronize()

    def _stage_ahead(self) -> None:
        """As _serve, by way of a ring of buffers, most of which are read to at any time."""
        is_cuda = self.device.type == "cuda"
        ring = (aio.THREADS + COPIES, AHEAD_PART)
        memory = torch.empty(ring, dtype=torch.uint8, device="cpu", pin_memory=is_cuda)
        buffers = cycle((m, torch.cuda.Event() if is_cuda else None) for m in memory)
        under_way: deque[_Ahead] = deque()
        has_more = True
        with self._own_stream():
            try:
                while has_more or under_way:
                    is_free = len(under_way) < aio.THREADS and not self._parts.empty()
                    if has_more and (is_free or not under_way):
                        part = self._take()
                        has_more = part is not None
                        if part is not None:
                            under_way.append(_Ahead(part, *next(buffers)))
                    else:
                        under_way.popleft().finish()
            finally:
                for ahead in under_way:
                    ahead.give_up()

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """A stream of the thread's own, and nothing left on it at the end; nothing on the CPU."""
        if self.device.type == "cpu":
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.Stream(self.device)):
            try:
                yield
            finally:
                torch.cuda.current_stream().synchronize()


@dataclass(frozen=True)
class _Part:
    """Where bytes come from and where they go.

    pieces: (start, size) of each in the file; they lie side by side in the target.
    ready: when the target may be written to, on a CUDA device.
    """

    path: Path
    descriptor: int
    pieces: tuple[tuple[int, int], ...]
    target: torch.Tensor
    ready: torch.cuda.Event | None


class _Ahead:
    """A part on its way into a buffer, and from there to its target."""

    def __init__(self, part: _Part, buffer: torch.Tensor, copied: torch.cuda.Event | None) -> None:
        """copied: when the buffer's last part is where it goes, and then when this one is."""
        self._part, self._buffer, self._copied = part, buffer[: len(part.target)], copied
        if copied is not None:
            copied.synchronize()
        self._reading = None
        if len(part.target) >= WORTH_A_REQUEST * len(part.pieces):
            self._reading = aio.Reading(part.descriptor, part.pieces, buffer.data_ptr())

    def finish(self) -> None:
        """Wait for the reading, and start the copy."""
        _read(self._part, self._buffer, self._reading.finish() if self._reading else None)
        _copy(self._part, self._buffer)
        if self._copied is not None:
            self._copied.record()

    def give_up(self) -> None:
        """Wait until nothing writes to the buffer."""
        if self._reading:
            self._reading.finish()


def _pieces(start: int, size: int, stride: int, taken: range) -> Iterator[tuple[int, int]]:
    """(start, size) in the file of what makes bytes `taken` of rows that lie side by side.

    size, stride: the rows', of which the first begins at `start`.
    """
    at = taken.start
    while at < taken.stop:
        row, column = divmod(at, size)
        count = min(size - column, taken.stop - at)
        yield start + row * stride + column, count
        at += count


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


def _copy(part: _Part, memory: torch.Tensor) -> None:
    """Start copying a part from memory, on the current stream, once its target is ready."""
    if part.ready is not None:
        torch.cuda.current_stream().wait_event(part.ready)
    part.target.copy_(memory, non_blocking=True)
