"""The one place that decides between W4A16 and W4A8."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from qsrt_runtime import arithmetic
from qsrt_runtime.arithmetic import arithmetic_of

CUDA = torch.device("cuda", 0)

STORED, EXPANDED = SimpleNamespace(labels=None), SimpleNamespace(labels=torch.empty(0))


@dataclass
class Rows:
    """What the decision sees of x, which need not be on a GPU that is here."""

    tokens: int
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = CUDA

    @property
    def shape(self):
        return self.tokens, 128

    def __len__(self):
        return self.tokens


def on(monkeypatch, *capability):
    monkeypatch.setattr(arithmetic, "_capability", lambda _device: capability)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("tokens", [0, 1, 16])
def test_quantized_rows_where_tensor_cores_take_labels(monkeypatch, capability, tokens):
    on(monkeypatch, *capability)
    assert arithmetic_of("a8", Rows(tokens), STORED) == "a8"
    assert arithmetic_of("a16", Rows(tokens), STORED) == "a16"


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6)])
def test_older_gpus_are_refused_by_name(monkeypatch, capability):
    on(monkeypatch, *capability)
    name = ".".join(map(str, capability))
    with pytest.raises(ValueError, match=f"capability 8.9 or newer.*cuda:0 has {name}; use 'a16'"):
        arithmetic_of("a8", Rows(1), STORED)
    assert arithmetic_of("auto", Rows(1), STORED) == "a16"


def test_other_makers_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(ValueError, match=r"takes an NVIDIA GPU of capability 8\.9"):
        arithmetic_of("a8", Rows(1), STORED)
    assert arithmetic_of("auto", Rows(1), STORED) == "a16"


def test_auto_takes_what_was_measured(monkeypatch):
    on(monkeypatch, 9, 0)
    monkeypatch.setattr(arithmetic, "QUICKER", {(9, 0): 4})
    for tokens, expected in ((1, "a8"), (4, "a8"), (5, "a16"), (17, "a16"), (4096, "a16")):
        assert arithmetic_of("auto", Rows(tokens), STORED) == expected
    assert arithmetic_of("auto", Rows(1, torch.float32), STORED) == "a16"
    assert arithmetic_of("auto", Rows(1, device=torch.device("cpu")), STORED) == "a16"
    on(monkeypatch, 8, 9)
    assert arithmetic_of("auto", Rows(1), STORED) == "a16"


@pytest.mark.parametrize(
    ("activation", "rows", "message"),
    [
        ("a4", Rows(1), "activation is 'a4', expected 'a16', 'a8' or 'auto'"),
        (None, Rows(1), "activation is None"),
        ("a8", Rows(1, torch.float32), "float16 or bfloat16 rows, x is torch.float32"),
        ("a8", Rows(17), "up to 16 tokens, x has 17"),
    ],
)
def test_refusals(monkeypatch, activation, rows, message):
    on(monkeypatch, 9, 0)
    with pytest.raises(ValueError, match=message):
        arithmetic_of(activation, rows, STORED)


def test_an_expanded_layer_has_no_a8(monkeypatch):
    on(monkeypatch, 9, 0)
    for activation in ("a16", "auto"):
        assert arithmetic_of(activation, Rows(1), EXPANDED) == "a16"
    with pytest.raises(ValueError, match="'a8' takes layers as stored, this one is expanded"):
        arithmetic_of("a8", Rows(1), EXPANDED)
