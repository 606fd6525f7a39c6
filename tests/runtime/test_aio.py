import os
import platform
import subprocess
import sys

import pytest
import torch

from qsrt_runtime import aio

IS_GLIBC = platform.libc_ver()[0] == "glibc" and sys.maxsize > 2**32
needs_aio = pytest.mark.skipif(not IS_GLIBC, reason="needs glibc of 64 bits")


def read(path, *readings, flags=os.O_RDONLY):
    """The counts of each reading's pieces, and its memory, which held 255 everywhere before."""
    sizes = [sum(size for _, size in pieces) for pieces in readings]
    memories = [torch.full((size,), 255, dtype=torch.uint8) for size in sizes]
    descriptor = os.open(path, flags)

    started = [aio.Reading(pieces) for pieces in readings]
    for reading, memory in zip(started, memories, strict=True):
        reading.start(descriptor, memory.data_ptr())
    counts = [reading.wait() for reading in started]
    assert [reading.wait() for reading in started] == counts
    os.close(descriptor)
    return list(zip(counts, (bytes(memory.tolist()) for memory in memories), strict=True))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(250)) * 400)
    return path


def test_available_with_glibc_alone():
    assert aio.is_available() == IS_GLIBC


@needs_aio
@pytest.mark.parametrize("at_once", [1, 3, 100])
@pytest.mark.parametrize(
    "pieces",
    [
        [(0, 100_000)],
        [(99_999, 1)],
        [(17, 4099), (3, 1), (50_000, 4096), (17, 4099)],
        [(17 * i, 13) for i in range(500)],
        [(5, 0), (6, 7)],
        [],
    ],
    ids=["whole", "byte", "unaligned", "many", "empty piece", "none"],
)
def test_pieces_lie_side_by_side(file, pieces, at_once):
    data = file.read_bytes()
    expected = b"".join(data[start : start + size] for start, size in pieces)
    before = os.listdir("/proc/self/fd")
    assert read(file, *at_once * [pieces]) == at_once * [([size for _, size in pieces], expected)]
    assert os.listdir("/proc/self/fd") == before


@needs_aio
def test_offsets_past_four_gib(tmp_path):
    with (tmp_path / "sparse").open("wb") as file:
        file.seek(5 << 30)
        file.write(b"far away")
    assert read(tmp_path / "sparse", [(5 << 30, 8), (1 << 30, 1)]) == [([8, 1], b"far away\0")]


@needs_aio
def test_a_file_that_ends(file):
    ((counts, memory),) = read(file, [(0, 10), (99_990, 20), (100_000, 5), (7 << 30, 5)])
    data = file.read_bytes()
    assert counts == [10, 10, 0, 0]
    assert memory == data[:10] + data[-10:] + b"\xff" * 20


@needs_aio
def test_reads_that_fail_bring_nothing(file, tmp_path):
    pieces = [(0, 10), (10, 20)]
    for path, flags in ((file, os.O_WRONLY), (tmp_path, os.O_RDONLY)):
        assert read(path, pieces, flags=flags) == [([0, 0], b"\xff" * 30)]
    assert read("/proc/self/mem", pieces)[0][0] == [0, 0]  # EIO: nothing is mapped there


def run(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        timeout=120,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


FEW_DESCRIPTORS = """
import os, resource, sys, torch
from qsrt_runtime import aio
path, more = sys.argv[1], int(sys.argv[2])
descriptor = os.open(path, os.O_RDONLY)
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor + 1 + more, hard))
memory = torch.zeros(3, 1000, dtype=torch.uint8)
started = [aio.Reading([(0, 500), (500, 500)]) for row in memory]
for reading, row in zip(started, memory):
    reading.start(descriptor, row.data_ptr())
results = [reading.wait() for reading in started]
os.dup(descriptor) if more else None
right = [row.numpy().tobytes() == os.pread(descriptor, 1000, 0) for row in memory]
print(results, sum(right))
"""


@needs_aio
@pytest.mark.parametrize("more", [0, 1, 2, 5])
def test_as_many_descriptors_as_may_be_open(file, more):
    result = run(FEW_DESCRIPTORS, file, more)
    done = min(3, more)
    expected = done * [[500, 500]] + (3 - done) * [[0, 0]]
    assert result.stdout == f"{expected} {done}\n", result.stderr


NO_THREADS = """
import ctypes, os, resource, sys
from qsrt_runtime import aio
descriptor = os.open(sys.argv[1], os.O_RDONLY)
memory = ctypes.create_string_buffer(8)
limit, results = resource.getrlimit(resource.RLIMIT_AS), []
def read():
    reading = aio.Reading([(0, 4), (4, 4)])
    reading.start(descriptor, ctypes.addressof(memory))
    results.append(reading.wait())
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), limit[1]))
read()
resource.setrlimit(resource.RLIMIT_AS, limit)
read()
print(results)
"""


@needs_aio
def test_no_memory_for_threads(file):
    result = run(NO_THREADS, file)
    assert result.stdout == "[[0, 0], [4, 4]]\n", result.stderr


CHILD = """
import os, signal, sys, torch
from qsrt_runtime import aio
descriptor = os.open(sys.argv[1], os.O_RDONLY)
memory = torch.zeros(8, dtype=torch.uint8)
def read():
    reading = aio.Reading([(0, 4), (4, 4)])
    reading.start(descriptor, memory.data_ptr())
    return reading.wait()
def in_a_child():
    child = os.fork()
    if not child:
        signal.alarm(20)
        print(aio.is_available(), aio.is_available() and read(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
in_a_child()
print(aio.is_available(), read(), flush=True)
in_a_child()
"""


@needs_aio
def test_a_child_forked_after_the_first_read_has_no_threads_for_it(file):
    result = run(CHILD, file)
    assert result.stdout.splitlines() == ["True [4, 4]", "True [4, 4]", "False False"]


SIGNALS = """
import ctypes, os, signal, sys, threading, torch
from qsrt_runtime import aio
caught = [0]
def handler(*_):
    caught[0] += 1
signal.signal(signal.SIGALRM, handler)
descriptor = os.open(sys.argv[1], os.O_RDONLY)
size = os.fstat(descriptor).st_size
data = os.pread(descriptor, size, 0)
piece = size // int(sys.argv[2])
pieces = [(start, piece) for start in range(0, size, piece)]
right = []
def work():
    memory = torch.zeros(size, dtype=torch.uint8)
    for _ in range(20):
        memory.zero_()
        started = [aio.Reading([place]) for place in pieces]
        for reading, place in zip(started, pieces):
            reading.start(descriptor, memory.data_ptr() + place[0])
        counts = [reading.wait() for reading in started]
        right.append(counts == [[piece]] * len(pieces) and memory.numpy().tobytes() == data)
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
tgkill, sent = ctypes.CDLL(None).tgkill, 0
while any(thread.is_alive() for thread in threads):
    for thread in threads:
        sent += not tgkill(os.getpid(), thread.native_id, signal.SIGALRM)
print(len(right), all(right), sent > 100, caught[0] > 0)
"""


@needs_aio
@pytest.mark.parametrize("pieces", [1, 16])
def test_signals_do_not_end_the_waiting(tmp_path, pieces):
    (tmp_path / "file").write_bytes(os.urandom(32 << 20))
    result = run(SIGNALS, tmp_path / "file", pieces)
    assert (result.returncode, result.stdout) == (0, "40 True True True\n"), result.stderr
