import os
import time

import pytest
import torch

from qsrt_runtime import staging
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.staging import Staging

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("threads", [1, 3, 16])
@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 37 * 4096 + 17])
def test_bytes_arrive(tmp_path, monkeypatch, device, threads, size):
    monkeypatch.setattr(staging, "PART", 4096)
    monkeypatch.setattr(staging, "THREADS", threads)
    data = os.urandom(size + 300)
    (tmp_path / "file").write_bytes(data)
    with Staging(device) as reading:
        found = [reading.read(tmp_path / "file", start, size) for start in (123, 0, 300)]
    for start, tensor in zip((123, 0, 300), found, strict=True):
        assert (tensor.device, tensor.dtype, tensor.shape) == (device, torch.uint8, (size,))
        assert bytes(tensor.tolist()) == data[start : start + size]


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_file_that_ends_too_early(tmp_path, device):
    (tmp_path / "file").write_bytes(bytes(1000))
    ends = pytest.raises(FormatError, match=r"file ends at byte 1000; it was cut short")
    with ends, Staging(device) as reading:
        reading.read(tmp_path / "file", 0, 1000)
        reading.read(tmp_path / "file", 10, 991)


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


def test_an_interrupt_waits_for_the_readers(tmp_path, monkeypatch):
    """No thread reads from a descriptor that is closed, and perhaps opened anew."""
    (tmp_path / "file").write_bytes(bytes(100 * 4096))
    monkeypatch.setattr(staging, "PART", 4096)
    monkeypatch.setattr(staging, "THREADS", 3)
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
