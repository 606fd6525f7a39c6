"""search(): the one place where the device decides."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qsrt_pack.encode import viterbi

ROOT = Path(__file__).parents[4]
TARGETS = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)) * 1.4


@pytest.mark.parametrize(("method", "direct"), [("exact", "search_cpu"), ("fast", "search_fast")])
def test_method_chooses(method, direct):
    expected = getattr(viterbi, direct)(TARGETS, 4)
    assert torch.equal(viterbi.search(TARGETS, 4, method), expected)


def test_exact_is_the_default_and_the_methods_differ():
    exact = viterbi.search(TARGETS, 4)
    assert torch.equal(exact, viterbi.search(TARGETS, 4, method="exact"))
    assert not torch.equal(exact, viterbi.search(TARGETS, 4, method="fast"))
    assert viterbi.METHODS == ("exact", "fast")


def test_other_devices_take_the_kernel(monkeypatch):
    stand_in = SimpleNamespace(search_kernel=lambda targets, bits: (targets, bits))
    monkeypatch.setitem(sys.modules, f"{viterbi.__name__}.kernel", stand_in)
    there = torch.empty(1, 256, device="meta")
    found, bits = viterbi.search(there, 3)
    assert found is there
    assert bits == 3


def test_the_cpu_needs_no_triton():
    code = """
import sys
sys.modules["triton"] = None  # which makes its import an error
import torch
from qsrt_pack.encode.viterbi import search
print(search(torch.zeros(1, 256), 4).shape)
try:
    search(torch.zeros(1, 256, device="meta"), 4)
except ImportError as error:
    print(error.name)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["torch.Size([1, 256])", "triton"], done.stderr


def test_fast_is_for_the_cpu_only():
    with pytest.raises(ValueError, match='use method="exact"'):
        viterbi.search(torch.empty(1, 256, device="meta"), 3, method="fast")


def test_refuses_other_methods():
    with pytest.raises(ValueError, match="expected one of"):
        viterbi.search(TARGETS, 4, method="beam")
