import dataclasses
import json

import pytest
import torch
from checkpoints import edit_json

import qsrt_runtime
from qsrt_runtime.format import container
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.format.package import open_package
from qsrt_runtime.load import load_package

LAYER = "qsrt-layer-001.safetensors"


def test_golden_publication(golden):
    loaded = load_package(golden / "publication")
    assert loaded.path == golden / "publication"
    assert loaded.geometry == Geometry(1024, 512, 4)
    assert loaded.topk == 2
    assert list(loaded.layers) == [5]
    layer = loaded.layers[5]
    stored = container.read_layer(golden / "publication/qsrt-layer-005.safetensors")
    assert torch.equal(layer.atoms, stored.atoms)
    assert torch.equal(layer.shared_scales, stored.shared_scales)
    assert layer.geometry == loaded.geometry
    assert layer.activations.tolist() == [0, 0, 0, 0]


def test_tiny_package(package):
    loaded = load_package(str(package))
    assert loaded.path == package
    assert loaded.config == json.loads((package / "config.json").read_text())
    assert (loaded.geometry, loaded.topk) == (Geometry(128, 256, 4), 2)
    assert list(loaded.layers) == [0, 1]
    assert [layer.layer for layer in loaded.layers.values()] == [0, 1]
    assert loaded.seal_sha256 == open_package(package).seal_sha256


def test_frozen(golden):
    loaded = load_package(golden / "publication")
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.topk = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.layers[5].layer = 1


def test_loads_from_a_hub_cache(package, hub_snapshot):
    assert list(load_package(hub_snapshot(package)).layers) == [0, 1]


def test_activations_of_each_expert(package, reseal):
    activation = {"default": "silu", "experts": {"0": "situ", "1": "situ", "3": "situ"}}
    edit_json(
        package / "qsrt-manifest.json", lambda m: m["layers"]["1"].update(activation=activation)
    )
    reseal(package)
    layers = load_package(package).layers
    assert layers[0].activations.tolist() == [0, 0, 0, 0]
    assert layers[1].activations.tolist() == [1, 1, 0, 1]


def test_activation_of_the_model(publication, reseal):
    edit_json(publication / "config.json", lambda config: config.update(hidden_act="situ"))
    reseal(publication)
    assert load_package(publication).layers[5].activations.tolist() == [1, 1, 1, 1]


def test_default_activation_is_the_models(package, reseal):
    activation = {"default": "situ", "experts": {}}
    edit_json(
        package / "qsrt-manifest.json", lambda m: m["layers"]["1"].update(activation=activation)
    )
    reseal(package)
    with pytest.raises(FormatError, match=r"layers\.1\.activation\.default is 'situ'"):
        load_package(package)


@pytest.mark.parametrize("key", ["activation_situ_beta", "activation_situ_linear_beta"])
def test_other_parameters_of_situ_are_refused(publication, reseal, key):
    edit_json(
        publication / "config.json", lambda config: config.update({"hidden_act": "situ", key: 8.0})
    )
    reseal(publication)
    with pytest.raises(FormatError, match=f"{key} is 8.0"):
        load_package(publication)


@pytest.mark.parametrize("hidden_act", ["gelu_pytorch_tanh", "swigluoai", None])
def test_activation_that_is_not_run(publication, reseal, hidden_act):
    edit_json(publication / "config.json", lambda config: config.update(hidden_act=hidden_act))
    reseal(publication)
    with pytest.raises(FormatError, match=r"config\.json: hidden_act is"):
        load_package(publication)


@pytest.mark.parametrize(
    "name", [LAYER, "qsrt-layer-001.json", "qsrt-manifest.json", "config.json", "MANIFEST.sha256"]
)
def test_one_bit(package, name):
    data = bytearray((package / name).read_bytes())
    data[len(data) // 2] ^= 1
    (package / name).write_bytes(data)
    with pytest.raises(FormatError, match=name):
        load_package(package)


@pytest.mark.parametrize("name", [LAYER, "qsrt-layer-001.json", "QSRT_COMPLETE.json"])
def test_missing_file(package, name):
    (package / name).unlink()
    with pytest.raises(FormatError, match=name):
        load_package(package)


def test_base_shard_whose_header_disagrees(package, reseal):
    edit_json(
        package / "model.safetensors.index.json",
        lambda index: index["weight_map"].pop("lm_head.weight"),
    )
    reseal(package)
    with pytest.raises(FormatError, match=r"lm_head\.weight"):
        load_package(package)


def test_no_package(tmp_path):
    with pytest.raises(FormatError, match="has no QSRT_COMPLETE"):
        load_package(tmp_path)
    with pytest.raises(FormatError, match="is not a folder"):
        load_package(tmp_path / "missing")


def test_public_names():
    assert qsrt_runtime.load_package is load_package
    assert qsrt_runtime.FormatError is FormatError
    assert all(hasattr(qsrt_runtime, name) for name in qsrt_runtime.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = qsrt_runtime.nothing
