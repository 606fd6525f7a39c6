"""Stacks, models within models, layers of next-token prediction: what is read, what is refused."""

import json
import re
from pathlib import Path

import checkpoints
import pytest
import quantized
import torch
from checkpoints import PARTS, config, expert_key, write_checkpoint
from safetensors.torch import load_file

from qsrt_pack import job
from qsrt_pack.encode.expert import Settings
from qsrt_pack.restore import DensePackage, decode_package
from qsrt_pack.source import formats
from qsrt_pack.source.checkpoint import open_checkpoint
from qsrt_pack.source.config import RoutedExperts
from qsrt_pack.source.models import carried_tensors, find_experts
from qsrt_pack.validate import validate
from qsrt_runtime.format import tensorfile
from qsrt_runtime.format.errors import FormatError

Weights = dict[str, torch.Tensor]
ROUTED = ("hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok")
INNER = (*ROUTED, "num_hidden_layers", "hidden_act", "mlp_only_layers", "decoder_sparse_step")


@pytest.fixture(scope="module")
def weights() -> Weights:
    return checkpoints.tensors()


@pytest.fixture(scope="module")
def small() -> Weights:
    """One layer of two experts."""
    return checkpoints.tensors(layers=1, experts=2)


def small_config(**changes: object) -> dict:
    sizes = {"num_hidden_layers": 1, "num_experts": 2, "num_experts_per_tok": 1}
    return config(**{**sizes, **changes})


def found(folder: Path, weights: Weights, value: dict) -> RoutedExperts:
    write_checkpoint(folder, weights=weights, config_value=value)
    return find_experts(open_checkpoint(folder))


def refused(folder: Path, weights: Weights, value: dict, message: str) -> None:
    write_checkpoint(folder, weights=weights, config_value=value)
    with pytest.raises(FormatError, match=message):
        find_experts(open_checkpoint(folder))


def packed(source: Path, out: Path) -> Path:
    job.run(job.prepare(source, out, Settings(search="fast")), show_progress=False)
    validate(out, deep=True, show_progress=False)
    return out


def same_layers(one: Path, other: Path) -> bool:
    """Whether two packages hold the same layers of the same bytes, sources aside."""
    names = [
        [path.name for path in sorted(p.glob("qsrt-layer-*.safetensors"))] for p in (one, other)
    ]
    pairs = [(load_file(one / name), load_file(other / name)) for name in names[0]]
    return names[0] == names[1] and all(torch.equal(a[k], b[k]) for a, b in pairs for k in a)


def fused(weights: Weights, layers: int, experts: int) -> Weights:
    """The same with gate_up_proj [E, 2I, H] and down_proj [E, H, I] of each layer."""
    prefixes = tuple(f"model.layers.{layer}.mlp.experts." for layer in range(layers))
    out = {name: tensor for name, tensor in weights.items() if not name.startswith(prefixes)}
    for layer in range(layers):
        gate, up, down = (
            torch.stack([weights[expert_key(layer, e, part)] for e in range(experts)])
            for part in PARTS
        )
        out[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        out[f"model.layers.{layer}.mlp.experts.down_proj"] = down
    return out


@pytest.fixture(scope="module")
def small_package(tmp_path_factory: pytest.TempPathFactory, small: Weights) -> Path:
    folder = tmp_path_factory.mktemp("small")
    write_checkpoint(folder / "model", weights=small, config_value=small_config())
    return packed(folder / "model", folder / "package")


def test_cv_1a_stacks_give_the_package_of_single_tensors(
    tmp_path: Path, small: Weights, small_package: Path
) -> None:
    source = fused(small, 1, 2)
    write_checkpoint(tmp_path / "model", weights=source, config_value=small_config())
    package = packed(tmp_path / "model", tmp_path / "package")
    assert same_layers(package, small_package)
    decode_package(package, tmp_path / "dense", show_progress=False)
    (shard,) = (tmp_path / "dense").glob("*.safetensors")
    dense, single = load_file(shard), DensePackage(small_package)
    assert {k: v.shape for k, v in dense.items()} == {k: v.shape for k, v in source.items()}
    for expert in range(2):
        gate, up, down = (single.expert_weight(expert_key(0, expert, part)) for part in PARTS)
        block = dense["model.layers.0.mlp.experts.gate_up_proj"][expert]
        assert torch.equal(block, torch.cat([gate, up]).bfloat16())
        assert torch.equal(dense["model.layers.0.mlp.experts.down_proj"][expert], down.bfloat16())


def test_no_more_than_an_expert_of_a_stack_is_read(
    tmp_path: Path, small: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "model", weights=fused(small, 1, 2), config_value=small_config())
    sizes = []

    def read(path: Path, entry: tensorfile.TensorEntry) -> torch.Tensor:
        sizes.append(entry.end - entry.start)
        return tensorfile.read_tensor(path, entry)

    monkeypatch.setattr(formats, "tensorfile", type("", (), {"read_tensor": read}))
    packed(tmp_path / "model", tmp_path / "package")
    assert max(sizes) == 2 * 256 * 128 * 2  # gate and up of one, in bfloat16


def test_a_place_in_a_stack(tmp_path: Path, weights: Weights) -> None:
    experts = found(tmp_path / "m", fused(weights, 2, 4), config())
    gate, up, down = (experts.weight(1, 3, matrix) for matrix in ("w1", "w3", "w2"))
    assert gate.tensor == up.tensor == "model.layers.1.mlp.experts.gate_up_proj"
    assert (gate.rows, up.rows, down.rows) == (range(256), range(256, 512), range(128))
    assert {place.index for place in (gate, up, down)} == {3}
    assert len(experts.stored()) == 4
    assert len(experts.blocks()) == 16


def test_qn_5a_a_nan_in_a_stack_is_placed(tmp_path: Path, small: Weights) -> None:
    source = fused(small, 1, 2)
    source["model.layers.0.mlp.experts.down_proj"][1, 7, 9] = float("nan")
    write_checkpoint(tmp_path / "m", weights=source, config_value=small_config())
    prepared = job.prepare(tmp_path / "m", tmp_path / "p", Settings(search="fast"))
    with pytest.raises(FormatError, match=r"experts\.down_proj holds nan at \[1, 7, 9\]"):
        job.run(prepared, show_progress=False)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "down_proj",
            (4, 256, 128),
            r"down_proj has shape \[4, 256, 128\], expected \[4, 128, 256\]",
        ),
        ("gate_up_proj", (3, 512, 128), r"expected \[4, 512, 128\]"),
        ("gate_up_proj", (4, 256, 128), r"expected \[4, 512, 128\]"),
        ("gate_up_proj", (512, 128), r"expected \[4, 512, 128\]"),
        ("0.up_proj.weight", (256, 128), "experts.0.up_proj.weight is in a layout"),
        ("gate_up_proj_scale", (4, 512), "gate_up_proj_scale is in a layout"),
    ],
)
def test_a_stack_that_does_not_fit(
    tmp_path: Path, weights: Weights, name: str, shape: tuple[int, ...], message: str
) -> None:
    bad = {f"model.layers.1.mlp.experts.{name}": torch.ones(shape, dtype=torch.bfloat16)}
    refused(tmp_path / "m", fused(weights, 2, 4) | bad, config(), message)


def test_a_stack_that_is_missing(tmp_path: Path, weights: Weights) -> None:
    left = fused(weights, 2, 4)
    del left["model.layers.1.mlp.experts.down_proj"]
    refused(tmp_path / "m", left, config(), r"down_proj is missing \(layer 1, expert 0, down\)")


def test_cv_1b_no_expert_is_no_success(tmp_path: Path, weights: Weights) -> None:
    none = {name: t for name, t in weights.items() if ".experts." not in name}
    refused(tmp_path / "m", none, config(), "has no routed experts")


@pytest.mark.parametrize("plural", ["", "s"])
def test_cv_6_shared_experts_are_carried(tmp_path: Path, small: Weights, plural: str) -> None:
    prefix, up = f"model.layers.0.mlp.shared_expert{plural}", small[expert_key(0, 0, "up_proj")]
    shared = {f"{prefix}.up_proj.weight": up.clone(), f"{prefix}_gate.weight": up[:1].clone()}
    experts = found(tmp_path / "m", small | shared, small_config())
    carried = carried_tensors(open_checkpoint(tmp_path / "m"), experts)
    assert carried.keys() == {n for n in small | shared if ".experts." not in n}


def within(value: dict, **beside: object) -> dict:
    """A config with what is said of the experts in text_config."""
    text = {key: value[key] for key in INNER} | {"model_type": "qwen3_moe_text"}
    outer = {key: item for key, item in value.items() if key not in INNER}
    return {**outer, "text_config": text, **beside}


def test_cf_1a_decode_takes_the_dtype_of_the_text_model(tmp_path: Path, small: Weights) -> None:
    value = within(small_config())
    value["text_config"]["dtype"] = value.pop("dtype")
    inner = {name.replace("model.", "model.language_model.", 1): t for name, t in small.items()}
    write_checkpoint(tmp_path / "model", weights=inner, config_value=value)
    package = packed(tmp_path / "model", tmp_path / "package")
    decode_package(package, tmp_path / "dense", show_progress=False)
    (shard,) = (tmp_path / "dense").glob("*.safetensors")
    assert {tensor.dtype for tensor in load_file(shard).values()} == {torch.bfloat16}


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_cf_1a_a_text_model_inside_another(
    tmp_path: Path, small: Weights, small_package: Path, prefix: str
) -> None:
    inner = {name.replace("model.", prefix, 1): t for name, t in small.items()}
    value = within(small_config())
    write_checkpoint(tmp_path / "model", weights=inner, config_value=value)
    package = packed(tmp_path / "model", tmp_path / "package")
    assert same_layers(package, small_package)
    assert json.loads((package / "config.json").read_text())["text_config"] == value["text_config"]
    decode_package(package, tmp_path / "dense", show_progress=False)
    index = json.loads((tmp_path / "dense" / checkpoints.INDEX).read_text())
    assert index["weight_map"].keys() == inner.keys()


def test_cf_1b_a_text_config_of_null(tmp_path: Path, weights: Weights) -> None:
    assert found(tmp_path / "m", weights, config() | {"text_config": None}).layers == (0, 1)


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "mtp_num_hidden_layers"])
def test_cf_1b_next_token_prediction_in_conflict(
    tmp_path: Path, weights: Weights, key: str
) -> None:
    value = within(config(), **{key: 2})
    value["text_config"][key] = 1
    refused(tmp_path / "m", weights, value, f"{key} is 2, and 1 in text_config")


@pytest.mark.parametrize("key", ROUTED)
def test_cf_1b_levels_in_conflict(tmp_path: Path, weights: Weights, key: str) -> None:
    value = within(config(), **{key: config()[key] * 2})
    refused(tmp_path / "m", weights, value, f"{key} is {2 * config()[key]}, and .* in text_config")


def test_cf_1b_two_quantizations(tmp_path: Path) -> None:
    source = quantized.write_checkpoint(tmp_path / "model", quantized.KINDS["fp8_block"])
    value = json.loads((source / "config.json").read_text())
    inner = {"quantization_config": value["quantization_config"]}
    checkpoints.edit_json(source / "config.json", lambda v: v.update(text_config=inner))
    assert find_experts(open_checkpoint(source)).layers == (0, 1)
    inner["quantization_config"]["quant_method"] = "gptq"
    checkpoints.edit_json(source / "config.json", lambda v: v.update(text_config=inner))
    with pytest.raises(FormatError, match="quantization_config and another in text_config"):
        open_checkpoint(source)


def test_cf_1b_levels_that_agree(tmp_path: Path, weights: Weights) -> None:
    value = config() | {"text_config": {"num_experts": 4, "hidden_size": None}}
    refused(tmp_path / "a", weights, value, "hidden_size is None")
    value["text_config"].pop("hidden_size")
    assert found(tmp_path / "b", weights, value).geometry.experts == 4


def test_a_text_config_that_is_none(tmp_path: Path, weights: Weights) -> None:
    refused(tmp_path / "m", weights, config() | {"text_config": [1]}, "text_config is .* object")


@pytest.mark.parametrize("key", ["num_experts", "n_routed_experts", "num_local_experts"])
def test_cf_1c_the_expert_count_by_any_name(tmp_path: Path, weights: Weights, key: str) -> None:
    value = config(num_experts=None) | {key: 4}
    assert found(tmp_path / "m", weights, value).geometry.experts == 4


def test_cf_1d_a_dense_checkpoint(tmp_path: Path, weights: Weights) -> None:
    none = {name: t for name, t in weights.items() if ".experts." not in name}
    refused(tmp_path / "m", none, config(model_type="llama"), "has no routed experts")


@pytest.mark.parametrize("key", ["moe_intermediate_size", "num_experts_per_tok", "num_experts"])
def test_a_size_by_layer(tmp_path: Path, weights: Weights, key: str) -> None:
    """As Hunyuan's config.json states some of its sizes."""
    value = config()
    value[key] = [value[key]] * 2
    write_checkpoint(tmp_path / "m", weights=weights, config_value=value)
    prepared = job.prepare(tmp_path / "m", tmp_path / "p", Settings(search="fast"))
    assert (prepared.experts.topk, prepared.experts.geometry.experts) == (2, 4)
    for n, bad in enumerate(([value[key][0], 1], [])):
        message = rf"{key} is \[.*expected an integer"
        refused(tmp_path / str(n), weights, value | {key: bad}, message)


def deepseek(**changes: object) -> dict:
    value = config(model_type="deepseek_v3", mlp_only_layers=None, decoder_sparse_step=None)
    return {**value, "num_hidden_layers": 3, "first_k_dense_replace": 1, **changes}


@pytest.mark.parametrize("frequency", [None, 1, [0, 1, 1], [1, 1, 1]])
def test_cf_2a_dense_layers_keep_their_numbers(tmp_path: Path, frequency: object) -> None:
    weights = checkpoints.tensors(layers=3)
    left = {n: t for n, t in weights.items() if ".layers.0.mlp.experts." not in n}
    experts = found(tmp_path / "m", left, deepseek(moe_layer_freq=frequency))
    assert experts.layers == (1, 2)


@pytest.mark.parametrize("frequency", [0, [0, 1], [0, 1, 2], ["0", 1, 1], [False, True, True]])
def test_cf_2a_a_frequency_that_is_none(tmp_path: Path, frequency: object) -> None:
    weights = checkpoints.tensors(layers=3)
    refused(tmp_path / "m", weights, deepseek(moe_layer_freq=frequency), "moe_layer_freq is")


def test_cf_2b_experts_in_a_dense_layer(tmp_path: Path) -> None:
    weights = checkpoints.tensors(layers=3)
    refused(tmp_path / "m", weights, deepseek(), "is an expert of layer 0, config.json has experts")


def mtp(weights: Weights, layer: int) -> Weights:
    """The same with that layer named mtp.layers.0."""
    return {n.replace(f"model.layers.{layer}.", "mtp.layers.0."): t for n, t in weights.items()}


@pytest.mark.parametrize(("apart", "stacked"), [(False, 0), (True, 0), (True, 1)])
def test_cf_3a_layers_of_next_token_prediction_are_packed(
    tmp_path: Path, apart: bool, stacked: int
) -> None:
    """Named apart, they may be in a layout of their own."""
    weights = checkpoints.tensors(layers=2, experts=1)
    source = mtp(weights, 1) if apart else weights
    source = fused(source, stacked, 1) if apart else source
    sizes = {"num_experts": 1, "num_hidden_layers": 1}
    value = small_config(**sizes, num_nextn_predict_layers=None if apart else 1)
    write_checkpoint(tmp_path / "model", weights=source, config_value=value)
    package = packed(tmp_path / "model", tmp_path / "package")
    plain = small_config(num_experts=1, num_hidden_layers=2)
    write_checkpoint(tmp_path / "plain", weights=weights, config_value=plain)
    assert same_layers(package, packed(tmp_path / "plain", tmp_path / "two"))
    decode_package(package, tmp_path / "dense", show_progress=False)
    index = json.loads((tmp_path / "dense" / checkpoints.INDEX).read_text())
    assert index["weight_map"].keys() == source.keys()


def test_cf_3a_without_experts_they_are_carried(tmp_path: Path, weights: Weights) -> None:
    for n, names in enumerate((["model.layers.2.eh_proj.weight"], ["mtp.fc.weight"])):
        more = {name: torch.ones(2, 2) for name in names}
        experts = found(tmp_path / str(n), weights | more, config(num_nextn_predict_layers=1))
        assert experts.layers == (0, 1)
        assert names[0] in carried_tensors(open_checkpoint(tmp_path / str(n)), experts)


@pytest.mark.parametrize("name", [expert_key(7, 0, "up_proj"), "model.layers.7.eh_proj.weight"])
def test_cf_3b_a_layer_that_is_not_counted(tmp_path: Path, name: str) -> None:
    weights = checkpoints.tensors(layers=3)
    value = config(num_nextn_predict_layers=1)
    message = "is of layer 7, config.json counts 2 and 1 of next-token prediction"
    refused(tmp_path / "m", weights | {name: torch.ones(256, 128)}, value, message)


def test_cf_3b_one_more_than_is_counted(tmp_path: Path) -> None:
    weights = checkpoints.tensors(layers=3)
    value = config(mtp_num_hidden_layers=0)
    refused(tmp_path / "a", mtp(weights, 2), value, "is of layer 2, config.json counts 2 and 0")
    both = weights | {k: t.clone() for k, t in mtp(weights, 2).items()}
    value = config(num_nextn_predict_layers=1)
    refused(tmp_path / "b", both, value, r"model\.layers\.2\.\S+ is of layer 2")


def test_cf_3a_a_layer_in_part(tmp_path: Path) -> None:
    weights = checkpoints.tensors(layers=3)
    del weights[expert_key(2, 3, "down_proj")]
    value = config(num_nextn_predict_layers=1)
    refused(tmp_path / "m", weights, value, r"is missing \(layer 2, expert 3, down\)")


@pytest.mark.parametrize("bias", ["gate_up_proj_bias", "down_proj_bias"])
def test_cf_5a_a_bias_is_refused_by_name(tmp_path: Path, weights: Weights, bias: str) -> None:
    more = {f"model.layers.0.mlp.experts.{bias}": torch.zeros(4, 128)}
    value = config(model_type="gpt_oss")
    refused(tmp_path / "m", fused(weights, 2, 4) | more, value, f"{bias} is a bias of experts")


def test_cf_5b_a_clamp_is_refused_by_name(tmp_path: Path, weights: Weights) -> None:
    message = "swiglu_limit is set; clamped activations are not packed"
    refused(tmp_path / "m", weights, config(swiglu_limit=10.0), message)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu_pytorch_tanh"),
        ("hidden_act", "swigluoai"),
        ("hidden_act", "situ"),
        ("mlp_hidden_act", "relu2"),
    ],
)
def test_cf_5c_an_activation_is_refused_by_name(
    tmp_path: Path, weights: Weights, key: str, value: str
) -> None:
    for n, kind in enumerate(("qwen3_moe", "nemotron_h")):
        said = config(model_type=kind) | {key: value}
        refused(tmp_path / str(n), weights, said, f"{key} is '{value}'; packed experts compute")


def test_cf_5c_no_activation(tmp_path: Path, weights: Weights) -> None:
    refused(tmp_path / "m", weights, config(hidden_act=None), "hidden_act is None, expected one of")


def test_the_plan_names_the_layout(tmp_path: Path, weights: Weights) -> None:
    write_checkpoint(tmp_path / "m", weights=fused(weights, 2, 4))
    plan = job.prepare(tmp_path / "m", tmp_path / "p", Settings(search="fast")).plan
    assert re.fullmatch(r"model\.layers\.\{layer\}\.mlp\.experts\.gate_up_proj", plan["expert_key"])
