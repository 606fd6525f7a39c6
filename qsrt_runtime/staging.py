"""Bytes of files to a device, in pieces through pinned memory, by several threads at once.

A GPU takes a copy from pinned memory several times faster than one thread copies out of the page
cache, so that threads read pieces while others are on their way, without a stop between files.
"""

import ctypes
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch

from qsrt_runtime.format.errors import FormatError

THREADS = min(16, os.cpu_count() or 1)
PIECE = 4 << 20  # bytes read at once; two of them are pinned for each thread


class Staging:
    """Reads extents of files onto one CPU or CUDA device; a context manager.

    What `read` returns is filled when the block ends.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._local = threading.local()  # each thread's buffers
        self._tasks: list[Future[None]] = []
        self._files: list[BinaryIO] = []

    def __enter__(self) -> "Staging":
        self._pool = ThreadPoolExecutor(THREADS)
        return self

    def read(self, path: Path, start: int, size: int) -> torch.Tensor:
        """Bytes [start, start + size) of a file as a [size] uint8 tensor, filled later.

        The block ends with FormatError when the file does before that.
        """
        out = torch.empty(size, dtype=torch.uint8, device=self.device)
        file = path.open("rb", buffering=0)
        self._files.append(file)
        extent = _Extent(path, file.fileno(), start, out)
        shares = [range(i * PIECE, size, THREADS * PIECE) for i in range(THREADS)]
        if self.device.type == "cpu":
            self._tasks += [self._pool.submit(_read, extent, share) for share in shares if share]
        else:
            free = torch.cuda.current_stream(self.device).record_event()
            self._tasks += [
                self._pool.submit(self._stage, extent, share, free) for share in shares if share
            ]
        return out

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
        wait(self._tasks)
        for file in self._files:
            file.close()
        if kind is None:
            for task in self._tasks:
                task.result()

    def _stage(self, extent: "_Extent", offsets: range, free: torch.cuda.Event) -> None:
        """Read pieces and copy them on this thread's stream, after the memory is `free`."""
        if not hasattr(self._local, "buffers"):
            self._local.buffers = [_Buffer(self.device) for _ in range(2)]
            self._local.stream = torch.cuda.Stream(self.device)
        stream = self._local.stream
        stream.wait_event(free)
        with torch.cuda.stream(stream):
            for offset in offsets:
                buffer = self._local.buffers[0]
                self._local.buffers.reverse()
                target = extent.out[offset : offset + PIECE]
                buffer.copied.synchronize()
                _read_exactly(extent, offset, buffer.view[: len(target)])
                target.copy_(buffer.memory[: len(target)], non_blocking=True)
                buffer.copied.record(stream)
        stream.synchronize()


class _Buffer:
    """Pinned memory for a piece, and when the copy out of it was done."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
        self.view = _bytes_of(self.memory)
        self.copied = torch.cuda.Event()


@dataclass(frozen=True)
class _Extent:
    """Where bytes come from and where they go."""

    path: Path
    descriptor: int
    start: int
    out: torch.Tensor


def _read(extent: _Extent, offsets: range) -> None:
    for offset in offsets:
        _read_exactly(extent, offset, _bytes_of(extent.out[offset : offset + PIECE]))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's own memory."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _read_exactly(extent: _Extent, offset: int, target: memoryview) -> None:
    """Fill memory from a place in the extent, without the interpreter's lock."""
    position = extent.start + offset
    while len(target):
        count = os.preadv(extent.descriptor, [target], position)
        if not count:
            raise FormatError(f"{extent.path} ends at byte {position}; it was cut short while read")
        target, position = target[count:], position + count
