import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from qsrt_runtime import staging
from qsrt_runtime.format.errors import FormatError

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)]


@pytest.fixture
def pool():
    with ThreadPoolExecutor(staging.THREADS) as pool:
        yield pool


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 3 * 4096 * staging.THREADS + 17])
def test_bytes_arrive(tmp_path, monkeypatch, pool, device, size):
    monkeypatch.setattr(staging, "PIECE", 4096)
    data = os.urandom(size + 300)
    (tmp_path / "file").write_bytes(data)
    found = staging.read_to_device(tmp_path / "file", 123, size, device, pool)
    assert (found.device.type, found.dtype, found.shape) == (device.type, torch.uint8, (size,))
    assert bytes(found.tolist()) == data[123 : 123 + size]


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_file_that_ends_too_early(tmp_path, pool, device):
    (tmp_path / "file").write_bytes(bytes(1000))
    with pytest.raises(FormatError, match=r"file ends at byte 1000; it was cut short"):
        staging.read_to_device(tmp_path / "file", 10, 991, device, pool)


def test_file_is_closed(tmp_path, pool):
    (tmp_path / "file").write_bytes(bytes(1000))
    before = os.listdir("/proc/self/fd")
    staging.read_to_device(tmp_path / "file", 0, 1000, CPU, pool)
    with pytest.raises(FormatError):
        staging.read_to_device(tmp_path / "file", 0, 1001, CPU, pool)
    assert os.listdir("/proc/self/fd") == before
