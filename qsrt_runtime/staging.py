"""Bytes of files to a device: read by many threads into pinned memory, copied chunk by chunk.

A GPU takes a copy from pinned memory several times faster than one thread copies out of the page
cache, so that every thread reads one part of a chunk, and parts of the next ones while it is on
its way. Among so many, who lets go of the interpreter's lock waits long to get it back: readers
do so once a part, and the caller's thread alone talks to the GPU, once a chunk.
"""

import ctypes
import os
from collections import deque
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import TracebackType

import torch

from qsrt_runtime.format.errors import FormatError

THREADS = min(12, os.cpu_count() or 1)
PART = 2 << 20  # bytes that one thread reads at once; a chunk has one part for each thread
CHUNKS = 5  # in pinned memory at a time


class Staging:
    """Reads extents of files onto one CPU or CUDA device; a context manager.

    What `read` returns is filled when the block ends.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._queues: list[SimpleQueue[_Chunk | None]] = [SimpleQueue() for _ in range(THREADS)]
        self._threads = [
            Thread(target=_serve, args=(part, queue), daemon=True)
            for part, queue in enumerate(self._queues)
        ]
        self._chunks: deque[_Chunk] = deque()  # being read or copied, in order
        self._descriptors: list[int] = []

    def __enter__(self) -> "Staging":
        for thread in self._threads:
            thread.start()
        return self

    def read(self, path: Path, start: int, size: int) -> torch.Tensor:
        """Bytes [start, start + size) of a file as a [size] uint8 tensor, filled later.

        FormatError, here or at the end of the block, when the file ends before that.
        """
        out = torch.empty(size, dtype=torch.uint8, device=self.device)
        descriptor = os.open(path, os.O_RDONLY)
        self._descriptors.append(descriptor)
        for offset in range(0, size, THREADS * PART):
            target = out[offset : offset + THREADS * PART]
            memory = target if self.device.type == "cpu" else self._pinned_memory()
            chunk = _Chunk(path, descriptor, start + offset, memory, target)
            self._chunks.append(chunk)
            for queue in self._queues[: chunk.parts]:
                queue.put(chunk)
        return out

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A small CPU tensor on the device, without waiting for what is on its way."""
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            thread.join()
        for descriptor in self._descriptors:
            os.close(descriptor)
        if kind is None:
            for chunk in self._chunks:
                chunk.send()
        for chunk in self._chunks:
            chunk.wait()

    def _pinned_memory(self) -> torch.Tensor:
        if len(self._chunks) < CHUNKS:
            return torch.empty(THREADS * PART, dtype=torch.uint8, pin_memory=True)
        for chunk in list(self._chunks)[:2]:  # a copy is queued behind the one waited for
            chunk.send()
        oldest = self._chunks.popleft()
        oldest.wait()
        return oldest.memory


class _Chunk:
    """Bytes of a file from `start` on, read into memory and sent to a target of their size."""

    def __init__(
        self, path: Path, descriptor: int, start: int, memory: torch.Tensor, target: torch.Tensor
    ) -> None:
        self.path, self.descriptor, self.start = path, descriptor, start
        self.memory, self.target = memory, target
        self.parts = -(-len(target) // PART)
        address = memory.data_ptr()
        self._view = memoryview((ctypes.c_char * len(target)).from_address(address)).cast("B")
        self._finished = count(1)  # what it gives is one thread's alone
        self._all_read: SimpleQueue[None] = SimpleQueue()
        self._errors: list[BaseException] = []
        self._sent: torch.cuda.Event | None = None

    def read(self, part: int) -> None:
        """One thread's part of the work."""
        try:
            self._fill(self._view[part * PART : (part + 1) * PART], self.start + part * PART)
        except BaseException as error:  # for the caller's thread
            self._errors.append(error)
        if next(self._finished) == self.parts:
            self._all_read.put(None)

    def _fill(self, memory: memoryview, position: int) -> None:
        while len(memory):
            size = os.preadv(self.descriptor, [memory], position)
            if not size:
                raise FormatError(
                    f"{self.path} ends at byte {position}; it was cut short while read"
                )
            memory, position = memory[size:], position + size

    def send(self) -> None:
        """Wait until all parts are read and start the copy to the target; once."""
        if self._sent is not None:
            return
        self._all_read.get()
        if self._errors:
            raise self._errors[0]
        if self.target.is_cuda:
            self.target.copy_(self.memory[: len(self.target)], non_blocking=True)
            self._sent = torch.cuda.current_stream(self.target.device).record_event()

    def wait(self) -> None:
        """Until the target is filled, if `send` was called."""
        if self._sent is not None:
            self._sent.synchronize()


def _serve(part: int, queue: "SimpleQueue[_Chunk | None]") -> None:
    """A reading thread: its part of each chunk, until there is None."""
    while (chunk := queue.get()) is not None:
        chunk.read(part)
