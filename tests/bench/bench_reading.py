"""Ways to bring the page cache to a GPU, against a copy from memory that is pinned already.

    python tests/bench/bench_reading.py [--files 8] [--warm whole|pieces|read]

What qsrt_runtime.staging does, and what else could be done: it says what loading is held by.
`threads`: Python threads with preadv. `aio`: glibc's POSIX asynchronous I/O, whose threads know
no interpreter's lock. `mapped`: a copy out of a mapping by Python's threads; `parallel`: by
torch's own, from one thread of Python. Each with the copies to the GPU and without. Prints medians.
--warm: how the files came into the page cache, whose pages are larger or smaller for it: written
whole or in pieces of 1 MiB, or read from start to end, as the check of a new package does.
"""

import argparse
import ctypes
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from threading import Thread

import torch

MIB = 1 << 20
SIZE = 153 * MIB  # a file, as a layer of 256 experts of 1024 x 512
REPEATS = 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Todo = deque[tuple[int, int]]  # (file, offset) of what is not read yet


class Request(ctypes.Structure):
    """struct aiocb of glibc on 64-bit machines."""

    _fields_ = (
        ("descriptor", ctypes.c_int),
        ("operation", ctypes.c_int),
        ("priority", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("event", ctypes.c_char * 64),
        ("internal", ctypes.c_char * 32),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_char * 32),
    )


def run_threads(count: int, work: Callable[[], None]) -> None:
    threads = [Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def own_stream() -> object:
    return torch.cuda.stream(torch.cuda.Stream()) if DEVICE == "cuda" else nullcontext()


def pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=DEVICE == "cuda")


def write(path: Path, data: bytes, warm: str) -> None:
    piece = SIZE if warm == "whole" else MIB
    with path.open("wb", buffering=0) as file:
        for start in range(0, SIZE, piece):
            file.write(data[start : start + piece])
        os.fsync(file.fileno())
    if warm == "read":
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while file.read(8 * MIB):
                pass


class Files:
    """Files whose bytes go to tensors of their size; the page cache is warm."""

    def __init__(self, folder: Path, count: int, warm: str) -> None:
        data = os.urandom(SIZE)
        self.paths = [folder / str(i) for i in range(count)]
        for path in self.paths:
            write(path, data, warm)
        self.expected = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(DEVICE)
        self.targets = [torch.empty(SIZE, dtype=torch.uint8, device=DEVICE) for _ in self.paths]
        self.total = count * SIZE

    def todo(self, step: int) -> Todo:
        return deque((i, o) for i in range(len(self.paths)) for o in range(0, SIZE, step))

    def read(self, workers: int, step: int, fill: Callable, copy: bool) -> None:
        """Each worker fills its pinned memory, a step at a time, and copies it to the GPU."""
        todo = self.todo(step)

        def work() -> None:
            memory = pinned(step)
            with own_stream():
                while True:
                    try:
                        file, offset = todo.popleft()
                    except IndexError:
                        return
                    size = min(step, SIZE - offset)
                    fill(file, offset, memory[:size])
                    if copy:
                        self.targets[file][offset : offset + size].copy_(memory[:size])

        run_threads(workers, work)

    def threads(self, workers: int, step: int, copy: bool) -> None:
        descriptors = [os.open(path, os.O_RDONLY) for path in self.paths]

        def fill(file: int, offset: int, memory: torch.Tensor) -> None:
            array = (ctypes.c_char * len(memory)).from_address(memory.data_ptr())
            os.preadv(descriptors[file], [memoryview(array).cast("B")], offset)

        self.read(workers, step, fill, copy)
        for descriptor in descriptors:
            os.close(descriptor)

    def mapped(self, workers: int, step: int, copy: bool) -> None:
        storages = [torch.UntypedStorage.from_file(str(p), False, SIZE) for p in self.paths]

        def fill(file: int, offset: int, memory: torch.Tensor) -> None:
            source = storages[file].data_ptr() + offset
            ctypes.memmove(memory.data_ptr(), source, len(memory))

        self.read(workers, step, fill, copy)

    def parallel(self, buffers: int, step: int, copy: bool) -> None:
        sources = [
            torch.empty(0, dtype=torch.uint8).set_(
                torch.UntypedStorage.from_file(str(p), False, SIZE)
            )
            for p in self.paths
        ]
        memory = [pinned(step) for _ in range(buffers)]
        done: list[torch.cuda.Event | None] = [None] * buffers
        for turn, (file, offset) in enumerate(self.todo(step)):
            at, size = turn % buffers, min(step, SIZE - offset)
            if done[at] is not None:
                done[at].synchronize()
            memory[at][:size].copy_(sources[file][offset : offset + size])
            if copy:
                target = self.targets[file][offset : offset + size]
                target.copy_(memory[at][:size], non_blocking=True)
                if DEVICE == "cuda":
                    done[at] = torch.cuda.Event()
                    done[at].record()

    def aio(self, workers: int, requests: int, part: int, copy: bool) -> None:
        """As threads, but every fill is `requests` reads by glibc at once."""
        listio = ctypes.CDLL(None, use_errno=True).lio_listio
        # Reads of one descriptor follow one another, so that each has one of its own.
        opened = [[os.open(p, os.O_RDONLY) for _ in range(requests)] for p in self.paths]

        def fill(file: int, offset: int, memory: torch.Tensor) -> None:
            count = -(-len(memory) // part)
            blocks = (Request * count)()
            for i, block in enumerate(blocks):
                block.descriptor, block.offset = opened[file][i], offset + i * part
                block.buffer = memory.data_ptr() + i * part
                block.size = min(part, len(memory) - i * part)
            at = ctypes.addressof(blocks)
            size = ctypes.sizeof(Request)
            pointers = (ctypes.c_void_p * count)(*(at + i * size for i in range(count)))
            if listio(0, pointers, count, None):
                raise OSError(ctypes.get_errno(), "lio_listio")

        self.read(workers, requests * part, fill, copy)
        for descriptors in opened:
            for descriptor in descriptors:
                os.close(descriptor)


def median_s(run: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS + 1):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def plain_copy_s(total: int) -> float:
    source, target = pinned(total).random_(), torch.empty(total, dtype=torch.uint8, device=DEVICE)
    return median_s(lambda: target.copy_(source, non_blocking=True))


def compare(files: Files) -> None:
    plain = plain_copy_s(files.total)
    sys.stdout.write(f"plain pinned copy {files.total / plain / 1e9:.1f} GB/s\n")
    ways: list[tuple[str, Callable[[bool], None]]] = []
    for workers, mib in ((12, 8), (12, 16), (16, 8), (16, 16)):
        name = f"threads: {workers}, {mib} MiB"
        ways.append((name, lambda c, w=workers, m=mib: files.threads(w, m * MIB, c)))
    for workers, requests, mib in ((4, 8, 1), (6, 8, 1), (8, 4, 1), (3, 16, 2), (4, 16, 2)):
        name = f"aio: {workers} of {requests} reads of {mib} MiB"
        ways.append((name, lambda c, w=workers, r=requests, m=mib: files.aio(w, r, m * MIB, c)))
    ways.append(("mapped: 12, 8 MiB", lambda c: files.mapped(12, 8 * MIB, c)))
    for buffers, mib in ((2, 8), (2, 16), (3, 8), (3, 16), (2, 32), (3, 32)):
        name = f"parallel: {buffers} of {mib} MiB"
        ways.append((name, lambda c, b=buffers, m=mib: files.parallel(b, m * MIB, c)))
    for name, way in ways:
        for target in files.targets:
            target.zero_()
        with_copy = median_s(lambda way=way: way(True))
        if not all(torch.equal(target, files.expected) for target in files.targets):
            raise SystemExit(f"{name}: wrong bytes")
        alone = median_s(lambda way=way: way(False))
        sys.stdout.write(
            f"{name:32} {files.total / with_copy / 1e9:6.1f} GB/s, {plain / with_copy:.2f} of the "
            f"plain copy; the reading alone {files.total / alone / 1e9:6.1f}, {plain / alone:.2f}\n"
        )
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--warm", choices=("whole", "pieces", "read"), default="whole")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        compare(Files(folder, arguments.files, arguments.warm))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
