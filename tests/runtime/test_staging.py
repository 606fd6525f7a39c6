import errno
import os
import time
from pathlib import Path

import pytest
import torch

from qsrt_runtime import staging
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.staging import Staging

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(staging, "THREADS", 3)
    monkeypatch.setattr(staging, "PART", 4096)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("threads", [1, 3, 16])
@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 37 * 4096 + 17])
def test_bytes_arrive(tmp_path, monkeypatch, device, threads, size):
    monkeypatch.setattr(staging, "THREADS", threads)
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
    monkeypatch.setattr(staging, "PART", part)
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


def test_file_that_is_cut_after_it_was_opened(tmp_path):
    (tmp_path / "file").write_bytes(bytes(9000))
    with pytest.raises(FormatError, match="file ends at byte 5000;"), Staging(CPU) as reading:
        reading.read(tmp_path / "file", 6000, 3000)
        os.truncate(tmp_path / "file", 5000)


def test_reads_that_bring_less_than_asked(tmp_path, monkeypatch):
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


def test_an_interrupt_waits_for_the_threads(tmp_path, monkeypatch):
    """No thread reads from a descriptor that is closed, and perhaps opened anew."""
    (tmp_path / "file").write_bytes(bytes(100 * 4096))
    started, errors, original = [], [], staging._read

    class Interrupted(staging.Thread):
        def start(self):
            if len(started) == 2:
                raise KeyboardInterrupt
            started.append(self)
            super().start()

    def slow(part, memory):
        time.sleep(0.01)
        try:
            original(part, memory)
        except BaseException as error:
            errors.append(error)

    monkeypatch.setattr(staging, "Thread", Interrupted)
    monkeypatch.setattr(staging, "_read", slow)
    with pytest.raises(KeyboardInterrupt), Staging(CPU) as reading:
        reading.read(tmp_path / "file", 0, 100 * 4096)
    assert len(started) == 2
    assert not any(thread.is_alive() for thread in started)
    assert errors == []
