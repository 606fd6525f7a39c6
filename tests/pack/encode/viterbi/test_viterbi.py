"""search(): the one place where the device decides."""

import pytest
import torch

from qsrt_pack.encode import viterbi

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


def test_other_devices_take_the_reference(monkeypatch):
    monkeypatch.setattr(viterbi, "search_reference", lambda targets, bits: (targets.device, bits))
    there = torch.empty(1, 256, device="meta")
    assert viterbi.search(there, 3) == (there.device, 3)


def test_fast_is_for_the_cpu_only():
    with pytest.raises(ValueError, match='use method="exact"'):
        viterbi.search(torch.empty(1, 256, device="meta"), 3, method="fast")


def test_refuses_other_methods():
    with pytest.raises(ValueError, match="expected one of"):
        viterbi.search(TARGETS, 4, method="beam")
