"""Bytes of a file to a device, in pieces through pinned memory, by several threads at once.

A GPU takes a copy from pinned memory faster than one thread copies out of the page cache, so
that several threads each read a piece while the one before is on its way.
"""

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch

from qsrt_runtime.format.errors import FormatError

THREADS = 8
PIECE = 4 << 20  # bytes read at once; two of them are pinned for each thread


def read_to_device(
    path: Path, start: int, size: int, device: torch.device, pool: ThreadPoolExecutor
) -> torch.Tensor:
    """Bytes [start, start + size) of a file as a [size] uint8 tensor on a CPU or CUDA device.

    pool: has THREADS threads that do nothing else.   FormatError when the file ends before.
    """
    out = torch.empty(size, dtype=torch.uint8, device=device)
    shares = [range(i * PIECE, size, THREADS * PIECE) for i in range(THREADS)]
    file = _Opened(path, os.open(path, os.O_RDONLY), start)
    try:
        if device.type == "cpu":
            tasks = [pool.submit(_read_pieces, file, out, share) for share in shares]
        else:
            ready = torch.cuda.current_stream(device).record_event()
            tasks = [pool.submit(_stage_pieces, file, out, share, ready) for share in shares]
        wait(tasks)  # all, before the file is closed
        for task in tasks:
            task.result()
    finally:
        os.close(file.descriptor)
    return out


@dataclass(frozen=True)
class _Opened:
    """A file and where in it the bytes to read start."""

    path: Path
    descriptor: int
    start: int


def _read_pieces(file: _Opened, out: torch.Tensor, offsets: range) -> None:
    for offset in offsets:
        _read_exactly(file, offset, out[offset : offset + PIECE])


def _stage_pieces(
    file: _Opened, out: torch.Tensor, offsets: range, ready: torch.cuda.Event
) -> None:
    """As _read_pieces, by way of two pinned buffers, on a stream of its own after `ready`."""
    stream = torch.cuda.Stream(out.device)
    stream.wait_event(ready)
    buffers = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in offsets[:2]]
    copied: list[torch.cuda.Event] = []
    with torch.cuda.stream(stream):
        for turn, offset in enumerate(offsets):
            if turn >= 2:
                copied[turn - 2].synchronize()
            target = out[offset : offset + PIECE]
            source = buffers[turn % 2][: len(target)]
            _read_exactly(file, offset, source)
            target.copy_(source, non_blocking=True)
            copied.append(stream.record_event())
    stream.synchronize()


def _read_exactly(file: _Opened, offset: int, target: torch.Tensor) -> None:
    """Fill a contiguous CPU tensor, without the interpreter's lock."""
    view = memoryview((ctypes.c_char * target.nbytes).from_address(target.data_ptr())).cast("B")
    position = file.start + offset
    while len(view):
        count = os.preadv(file.descriptor, [view], position)
        if not count:
            raise FormatError(f"{file.path} ends at byte {position}; it was cut short while read")
        view, position = view[count:], position + count
