"""Bytes of files to a device: read by many threads into pinned memory, copied chunk by chunk.

A GPU takes a copy from pinned memory several times faster than one thread copies out of the page
cache, so that a chunk's parts are read by many threads, and the next chunk while one is on its
way. Only the caller's thread talks to the GPU; threads that all do so wait for each other.
"""

import ctypes
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import torch

from qsrt_runtime.format.errors import FormatError

THREADS = min(16, os.cpu_count() or 1)
PART = 4 << 20  # bytes that one thread reads at once; a chunk has one part for each thread
CHUNKS = 3  # pinned at a time


class Staging:
    """Reads extents of files onto one CPU or CUDA device; a context manager.

    What `read` returns is filled when the block ends.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._chunks: deque[_Chunk] = deque()  # in use, in order
        self._reads: list[Future[None]] = []  # straight into a CPU's memory

    def __enter__(self) -> "Staging":
        self._pool = ThreadPoolExecutor(THREADS)
        return self

    def read(self, path: Path, start: int, size: int) -> torch.Tensor:
        """Bytes [start, start + size) of a file as a [size] uint8 tensor, filled later.

        FormatError, here or at the end of the block, when the file ends before that.
        """
        out = torch.empty(size, dtype=torch.uint8, device=self.device)
        for offset in range(0, size, THREADS * PART):
            target = out[offset : offset + THREADS * PART]
            if self.device.type == "cpu":
                self._reads += self._start(path, start + offset, _bytes_of(target))
            else:
                chunk = self._free_chunk()
                view = chunk.view[: len(target)]
                chunk.target, chunk.reads = target, self._start(path, start + offset, view)
                self._chunks.append(chunk)
        return out

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                for read in self._reads:
                    read.result()
                for chunk in self._chunks:
                    chunk.copy()
                for chunk in self._chunks:
                    chunk.copied.synchronize()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def _start(self, path: Path, position: int, memory: memoryview) -> list[Future[None]]:
        """Have the parts of a chunk read into memory."""
        return [
            self._pool.submit(_read_part, path, position + i, memory[i : i + PART])
            for i in range(0, len(memory), PART)
        ]

    def _free_chunk(self) -> "_Chunk":
        if len(self._chunks) < CHUNKS:
            return _Chunk()
        chunk = self._chunks.popleft()
        chunk.copy()
        chunk.copied.synchronize()
        return chunk


class _Chunk:
    """Pinned memory, the reads into it, where they go, and when they have got there."""

    def __init__(self) -> None:
        self.memory = torch.empty(THREADS * PART, dtype=torch.uint8, pin_memory=True)
        self.view = _bytes_of(self.memory)
        self.copied = torch.cuda.Event()
        self.reads: list[Future[None]] = []
        self.target = self.memory[:0]

    def copy(self) -> None:
        """Start the copy to the target when the reads are done."""
        for read in self.reads:
            read.result()
        self.target.copy_(self.memory[: len(self.target)], non_blocking=True)
        self.copied.record(torch.cuda.current_stream(self.target.device))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's own memory."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _read_part(path: Path, position: int, memory: memoryview) -> None:
    """Fill memory from a place in a file, without the interpreter's lock."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while len(memory):
            count = os.preadv(descriptor, [memory], position)
            if not count:
                raise FormatError(f"{path} ends at byte {position}; it was cut short while read")
            memory, position = memory[count:], position + count
    finally:
        os.close(descriptor)
