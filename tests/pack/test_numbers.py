"""Weights of extreme sizes: what is packed of them, and what is refused.

A weight is a small integer times two float16 scales. A power of two goes from one to the other, so
weights of 1e-8 and of 1e6 are coded like those of 0.05; below about 1e-13 they decode to zeros,
and what is too large is refused by its tensor.
"""

import json
import logging
import shutil
from pathlib import Path

import checkpoints
import pytest
import torch
from checkpoints import PARTS, expert_key

from qsrt_pack import job, plan
from qsrt_pack.calibration import calibrate
from qsrt_pack.encode.expert import Settings
from qsrt_pack.restore import DensePackage
from qsrt_pack.validate import validate
from qsrt_runtime import load_package, moe_forward
from qsrt_runtime.format.container import read_layer
from qsrt_runtime.format.errors import FormatError

Weights = dict[str, torch.Tensor]
NAMES = [expert_key(0, expert, part) for expert in range(2) for part in PARTS]


@pytest.fixture(autouse=True)
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring the speed takes seconds."""
    monkeypatch.setattr(plan, "probe", lambda _method, _device: 1e6)


def draw(**changes: float) -> Weights:
    """Tensors of one layer of two experts. changes: factors of the parts of both."""
    weights = checkpoints.tensors(layers=1, experts=2)
    for name in NAMES:
        part = name.split(".")[-2]
        weights[name] = weights[name] * changes.get(part, changes.get("all", 1.0))
    return weights


def convert(folder: Path, weights: Weights, **settings: object) -> Path:
    given = dict.fromkeys(("num_experts", "num_experts_per_tok"), 2) | {"num_hidden_layers": 1}
    source = checkpoints.write_checkpoint(
        folder / "model", config_value=checkpoints.config(**given), weights=weights
    )
    prepared = job.prepare(source, folder / "out", Settings(search="fast", **settings))
    job.run(prepared, show_progress=False)
    validate(folder / "out", deep=True, show_progress=False)
    return folder / "out"


def errors(package: Path, weights: Weights) -> dict[str, float]:
    """Of each decoded matrix, once all of them are known to be finite."""
    dense, found = DensePackage(package), {}
    for name in NAMES:
        decoded, source = dense.expert_weight(name).double(), weights[name].double()
        assert decoded.isfinite().all()
        found[name] = float((decoded - source).square().sum() / source.square().sum())
    assert read_layer(package / "qsrt-layer-000.safetensors").shared_scales.isfinite().all()
    return found


@pytest.mark.parametrize("hidden_side", ["layer", "expert"])
@pytest.mark.parametrize("factor", [1e-8, 1e5])
def test_tiny_and_large_weights_are_coded_as_well(
    tmp_path: Path, factor: float, hidden_side: str
) -> None:
    weights = draw(all=factor)
    found = errors(convert(tmp_path, weights, hidden_side=hidden_side), weights)
    assert max(found.values()) < 0.03


@pytest.mark.parametrize("factor", [1e-5, 10.0, 1e5])
@pytest.mark.parametrize("parts", [("gate_proj",), ("up_proj", "down_proj")])
def test_matrices_of_one_expert_may_differ_in_size(
    tmp_path: Path, parts: tuple[str, ...], factor: float
) -> None:
    weights = draw(**dict.fromkeys(parts, factor))
    package = convert(tmp_path, weights)
    assert max(errors(package, weights).values()) < 0.03
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 1]] * 3)
    assert moe_forward(x, load_package(package).layers[0], ids, torch.ones(3, 2)).isfinite().all()


@pytest.mark.parametrize("factor", [1e-8, 1e5])
def test_calibrated(repository: Path, tmp_path: Path, factor: float) -> None:
    weights, example = draw(all=factor), repository / "examples/tiny_moe"
    vocabulary = json.loads((example / "model/config.json").read_text())["vocab_size"]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        generator = torch.Generator().manual_seed(1)
        weights[name] = torch.randn(vocabulary, 128, generator=generator).bfloat16()
    value = dict.fromkeys(("num_experts", "num_experts_per_tok"), 2) | {"num_hidden_layers": 1}
    value = checkpoints.config(**value, vocab_size=vocabulary)
    source = checkpoints.write_checkpoint(tmp_path / "model", config_value=value, weights=weights)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(example / "model" / name, source)
    given = {"window": 64, "windows": 20, "show_progress": False}
    statistics = calibrate(source, example / "calib.txt", tmp_path / "stats", **given)
    settings = Settings(search="fast", calibration_sha256=statistics.digest)
    out = tmp_path / "out"
    job.run(job.prepare(source, out, settings, statistics=statistics), show_progress=False)
    validate(out, deep=True, show_progress=False)
    assert max(errors(out, weights).values()) < 0.04


@pytest.mark.parametrize(
    ("dtype", "factor"),
    [
        (torch.bfloat16, 1e-20),
        (torch.bfloat16, 1e-38),
        (torch.float32, 1e-38),
        (torch.float32, 1e-42),
    ],
)
def test_weights_below_the_scales_decode_to_zeros(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: torch.dtype, factor: float
) -> None:
    """Denormal ones too. The evidence lists them, and a warning tells."""
    weights = {name: weight.to(dtype) for name, weight in draw().items()}
    for name in NAMES:
        weights[name] = (weights[name].double() * factor).to(dtype)
        assert weights[name].any()
    with caplog.at_level(logging.WARNING, "qsrt_pack"):
        package = convert(tmp_path, weights)
    assert [record.message for record in caplog.records] == [
        f"layer 0 expert {expert}: w1, w2, w3 too small for float16 scales, decodes to zeros"
        for expert in range(2)
    ]
    assert not any(DensePackage(package).expert_weight(name).any() for name in NAMES)
    evidence = json.loads((package / "qsrt-layer-000.json").read_text())["experts"]
    assert [entry["zero_matrices"] for entry in evidence] == 2 * [["w1", "w2", "w3"]]
    assert all(entry["nmse"] == {"w1": 1.0, "w2": 1.0, "w3": 1.0} for entry in evidence)


def test_an_expert_far_below_the_others_is_coded_as_well(tmp_path: Path) -> None:
    weights = draw()
    for part in PARTS:
        weights[expert_key(0, 1, part)] *= 1e-8
    assert max(errors(convert(tmp_path, weights), weights).values()) < 0.03


def test_denormals_among_normal_values(tmp_path: Path) -> None:
    weights = {name: weight.float() for name, weight in draw().items()}
    for name in NAMES:
        weights[name][::2, ::3] = 1e-42
    assert max(errors(convert(tmp_path, weights), weights).values()) < 0.03


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("side", ["rows", "columns"])
def test_one_huge_channel(tmp_path: Path, part: str, side: str) -> None:
    """It is coded nearly as well as any, and other matrices are not touched by it."""
    weights, name = draw(), expert_key(0, 0, part)
    channel = (5,) if side == "rows" else (slice(None), 5)
    weights[name][channel] *= 1e4
    found = errors(convert(tmp_path, weights), weights)
    assert max(found.values()) < 0.05
    others = [error for other, error in found.items() if other != name]
    assert max(others) < 0.03


@pytest.mark.parametrize("factor", [1e12, 1e30])
@pytest.mark.parametrize("part", PARTS)
def test_what_float16_scales_cannot_hold_is_refused(
    tmp_path: Path, part: str, factor: float
) -> None:
    weights, name = draw(), expert_key(0, 1, part)
    weights[name] = weights[name].float() * factor
    with pytest.raises(FormatError, match=rf"\.safetensors: tensor {name}: .*beyond float16"):
        convert(tmp_path, weights)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_qn_5a_by_dtype(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    weights, name = draw(), expert_key(0, 1, "gate_proj")
    weights[name] = weights[name].to(dtype)
    weights[name][255, 127] = value
    with pytest.raises(FormatError, match=rf"tensor {name} holds {value} at \[255, 127\]"):
        convert(tmp_path, weights)
    assert not (tmp_path / "out").exists()
