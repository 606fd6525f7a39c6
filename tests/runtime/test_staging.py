import errno
import os
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest
import torch

from qsrt_runtime import reader
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.reader import library
from qsrt_runtime.staging import Staging

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(reader, "THREADS", 3)
    monkeypatch.setattr(reader, "PART", 4096)


@pytest.fixture(autouse=True, params=["threads", "caller"])
def way(monkeypatch, request):
    """Have files read by threads in C, or by the caller's."""
    if request.param == "caller":
        monkeypatch.setattr(reader, "library", lambda: None)
    elif library() is None:
        pytest.skip("no C compiler")
    return request.param


def threads():
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("count", [1, 3, 16])
@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 37 * 4096 + 17])
def test_bytes_arrive(tmp_path, monkeypatch, device, count, size):
    monkeypatch.setattr(reader, "THREADS", count)
    data = os.urandom(size + 300)
    (tmp_path / "file").write_bytes(data)
    with Staging(device) as reading:
        found = [reading.read(tmp_path / "file", start, size) for start in (123, 0, 300)]
    for start, tensor in zip((123, 0, 300), found, strict=True):
        assert (tensor.device, tensor.dtype, tensor.shape) == (device, torch.uint8, (size,))
        assert bytes(tensor.tolist()) == data[start : start + size]


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("part", [1000, 4096, 1 << 20])
@pytest.mark.parametrize(
    ("rows", "size", "stride"),
    [(1, 9973, 9973), (7, 9973, 9973), (7, 9973, 10007), (301, 17, 33), (5, 0, 8), (0, 8, 8)],
)
def test_rows_arrive(tmp_path, monkeypatch, device, part, rows, size, stride):
    monkeypatch.setattr(reader, "PART", part)
    data = os.urandom(rows * stride + 50)
    (tmp_path / "file").write_bytes(data)
    with Staging(device) as reading:
        found = reading.read_rows(tmp_path / "file", 41, rows, size, stride)
    assert (found.device, found.dtype, found.shape) == (device, torch.uint8, (rows, size))
    begins = range(41, 41 + rows * stride, stride)
    assert [bytes(row) for row in found.tolist()] == [data[at : at + size] for at in begins]


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("rest", [0, 1, 990])
def test_file_that_ends_too_early(tmp_path, device, rest):
    (tmp_path / "file").write_bytes(bytes(9000 + rest))
    ends = pytest.raises(FormatError, match=rf"file ends at byte {9000 + rest}; it was cut short")
    with ends, Staging(device) as reading:
        reading.read(tmp_path / "file", 0, 9000)
        reading.read(tmp_path / "file", 10, 9991)


def test_file_that_is_cut_after_it_was_opened(tmp_path, monkeypatch):
    """Before any thread reads, which may be at once."""
    (tmp_path / "file").write_bytes(bytes(9000))
    original = os.open

    def open_and_cut(path, *options):
        file = original(path, *options)
        os.truncate(path, 5000)
        return file

    monkeypatch.setattr(os, "open", open_and_cut)
    with pytest.raises(FormatError, match="file ends at byte 5000;"), Staging(CPU) as reading:
        reading.read(tmp_path / "file", 6000, 3000)


def test_reads_that_bring_less_than_asked(tmp_path, monkeypatch, way):
    if way == "threads":
        pytest.skip("in C nothing can be put in pread's place")
    original, data = os.preadv, os.urandom(9000)
    monkeypatch.setattr(os, "preadv", lambda file, views, at: original(file, [views[0][:700]], at))
    (tmp_path / "file").write_bytes(data)
    with Staging(CPU) as reading:
        found = reading.read(tmp_path / "file", 100, 8900)
    assert bytes(found.tolist()) == data[100:]


@pytest.mark.parametrize("number", [errno.EISDIR, errno.EIO], ids=errno.errorcode.get)
def test_errors_name_the_file(tmp_path, number):
    path = tmp_path if number == errno.EISDIR else Path("/proc/self/mem")  # nothing is at 0
    with pytest.raises(OSError, match=str(path)) as caught, Staging(CPU) as reading:
        reading.read(path, 0, 9000)
    assert (caught.value.errno, caught.value.filename) == (number, str(path))


def test_files_are_closed(tmp_path):
    (tmp_path / "file").write_bytes(bytes(1000))
    before = os.listdir("/proc/self/fd")
    with Staging(CPU) as reading:
        reading.read(tmp_path / "file", 0, 1000)
    assert os.listdir("/proc/self/fd") == before
    with pytest.raises(FileNotFoundError), Staging(CPU) as reading:
        reading.read(tmp_path / "file", 0, 1000)
        reading.read(tmp_path / "missing", 0, 1)
    with pytest.raises(FormatError), Staging(CPU) as reading:
        reading.read(tmp_path / "file", 0, 1001)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_an_error_ends_threads_and_closes_files(tmp_path, device):
    """None reads on from a descriptor that is closed, and perhaps opened anew."""
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    torch.zeros(1, device=device)
    files, before = os.listdir("/proc/self/fd"), threads()
    for _ in range(20):
        with pytest.raises(ZeroDivisionError), Staging(device) as reading:
            for _ in range(50):
                reading.read(tmp_path / "file", 0, 1 << 20)
            raise ZeroDivisionError
        assert threads() == before
    assert os.listdir("/proc/self/fd") == files


@pytest.mark.gpu
def test_a_thread_that_has_not_used_the_gpu(tmp_path):
    """Pinned memory and the device's are there from the load before, so that nothing makes it."""
    data = os.urandom(100_000)
    (tmp_path / "file").write_bytes(data)
    found = []

    def load():
        with Staging(torch.device("cuda", 0)) as reading:
            found.append(reading.read(tmp_path / "file", 0, len(data)))

    load()
    found.clear()
    thread = Thread(target=load)
    thread.start()
    thread.join()
    assert bytes(found[0].tolist()) == data


def test_the_first_error_is_told(tmp_path):
    (tmp_path / "good").write_bytes(bytes(1 << 20))
    (tmp_path / "short").write_bytes(bytes(5000))
    for _ in range(20):
        with pytest.raises(FormatError, match="short ends at byte 5000;"), Staging(CPU) as reading:
            for _ in range(10):
                reading.read(tmp_path / "good", 0, 1 << 20)
            reading.read(tmp_path / "short", 0, 6000)
            for _ in range(10):
                reading.read(tmp_path / "good", 0, 1 << 20)


def test_an_interrupt_while_reading(tmp_path, way):
    """Heard within a part or a tenth of a second, not when all is read."""
    (tmp_path / "file").write_bytes(bytes(1 << 26))
    script = f"""
import os, signal, sys, threading, time
import torch
from pathlib import Path
from qsrt_runtime import reader, staging
if {way == "caller"}:
    reader.library = lambda: None
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    with staging.Staging(torch.device("cpu")) as reading:
        for _ in range(60):  # a minute of work
            reading.read_rows(Path(sys.argv[1]), 0, 1 << 19, 64, 128)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
except KeyboardInterrupt:
    sys.exit(3 if time.monotonic() - start < 2 else 4)
"""
    command = [sys.executable, "-c", script, str(tmp_path / "file")]
    assert subprocess.run(command, check=False).returncode == 3


@pytest.mark.parametrize("compiler", ["", "false", "/nowhere/cc"])
def test_without_a_compiler_files_are_read_all_the_same(tmp_path, compiler):
    script = """
import sys
import torch
from pathlib import Path
from qsrt_runtime import reader, staging
assert reader.library() is None
with staging.Staging(torch.device("cpu")) as reading:
    found = reading.read(Path(sys.argv[1]), 1, 3)
assert found.tolist() == [2, 3, 4]
"""
    (tmp_path / "file").write_bytes(bytes(range(1, 10)))
    values = {"CC": compiler, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    if not compiler:
        values["PATH"] = str(tmp_path)
    command = [sys.executable, "-c", script, str(tmp_path / "file")]
    done = subprocess.run(
        command, env={**os.environ, **values}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "files are read by one thread, slowly: " in done.stderr


def test_is_compiled_once(tmp_path, way):
    if way == "caller":
        pytest.skip("nothing is compiled")
    script = "from qsrt_runtime import reader; assert reader.library()"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", script], env=environment, check=True)
        (kept,) = (tmp_path / "qsrt/native").iterdir()
        environment["CC"] = "/nowhere/cc"
    assert kept.suffix == ".so"


def test_a_kept_library_that_does_not_load_is_made_anew(tmp_path, way):
    if way == "caller":
        pytest.skip("nothing is compiled")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    script = "from qsrt_runtime import reader; assert reader.library()"
    for _ in range(2):
        subprocess.run([sys.executable, "-c", script], env=environment, check=True)
        (kept,) = (tmp_path / "qsrt/native").iterdir()
        size = kept.stat().st_size
        os.truncate(kept, 100)
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    assert kept.stat().st_size == size


def test_an_interrupt_is_told_before_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(bytes(100))
    with pytest.raises(KeyboardInterrupt), Staging(CPU) as reading:
        reading.read(tmp_path / "file", 0, 101)
        original = reading._reader.wait

        def interrupted():
            try:
                original()
            finally:
                raise KeyboardInterrupt

        monkeypatch.setattr(reading._reader, "wait", interrupted)


def test_a_cache_that_cannot_be_written(tmp_path, way):
    if way == "caller":
        pytest.skip("nothing is compiled")
    (tmp_path / "file").touch()
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "file")}
    script = "from qsrt_runtime import reader; assert reader.library()"
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


@pytest.fixture
def fake_cuda(tmp_path, way):
    """Environment of a process whose CUDA driver copies in memory of the CPU, as late as it may."""
    if way == "caller":
        pytest.skip("the caller's thread copies by torch")
    if torch.cuda.is_available():
        pytest.skip("there is a driver, which torch looks for under the same name")
    source = Path(__file__).with_name("fake_cuda.c")
    compiler = os.environ.get("CC", "cc").split()
    target = str(tmp_path / "libcuda.so.1")
    subprocess.run([*compiler, "-shared", "-fPIC", "-o", target, str(source)], check=True)
    return {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}


STAGED = """
import os, sys
import torch
from pathlib import Path
from qsrt_runtime import reader
data, pinned = os.urandom(3_000_000), torch.empty
Path(sys.argv[1]).write_bytes(data)
reader.THREADS, reader.PART = 5, 4096
reader.torch.empty = lambda *sizes, pin_memory=False, **options: pinned(*sizes, **options)
reading = reader.Reader(torch.device("cuda", 3))
outs = [pinned(rows, size, dtype=torch.uint8) for rows, size in ((1, 2_999_990), (301, 17))]
try:
    reading.add(Path(sys.argv[1]), 7, 2_999_990, 2_999_990, outs[0])
    reading.add(Path(sys.argv[1]), 41, 17, 33, outs[1])
    reading.wait()
finally:
    reading.end(True)
assert bytes(outs[0][0].tolist()) == data[7:2_999_997]
assert [bytes(row) for row in outs[1].tolist()] == [data[41 + 33 * i :][:17] for i in range(301)]
"""


def test_buffers_wait_for_their_copies(tmp_path, fake_cuda):
    command = [sys.executable, "-c", STAGED, str(tmp_path / "file")]
    done = subprocess.run(command, env=fake_cuda, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("copy", [1, 2, 700])
def test_a_copy_that_fails(tmp_path, fake_cuda, copy):
    command = [sys.executable, "-c", STAGED, str(tmp_path / "file")]
    environment = fake_cuda | {"FAKE_CUDA_FAILS": str(copy)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "RuntimeError: the CUDA driver reports 719 on a copy" in done.stderr
