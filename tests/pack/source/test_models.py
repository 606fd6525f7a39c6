"""Which tensors are routed experts: the layouts that are read, and every doubt refused."""

import re
from collections.abc import Callable
from pathlib import Path

import checkpoints
import pytest
import torch
from checkpoints import PARTS, config, expert_key, write_checkpoint

from qsrt_pack.source.checkpoint import open_checkpoint
from qsrt_pack.source.models import RoutedExperts, carried_tensors, find_experts
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import Geometry

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def weights() -> Weights:
    return checkpoints.tensors()


def found(folder: Path, weights: Weights, **changes: object) -> RoutedExperts:
    """The experts of a checkpoint of these tensors. changes: of its config."""
    write_checkpoint(folder, weights=weights, config_value=config(**changes))
    return find_experts(open_checkpoint(folder))


def refused(folder: Path, weights: Weights, message: str, **changes: object) -> None:
    write_checkpoint(folder, weights=weights, config_value=config(**changes))
    with pytest.raises(FormatError, match=message):
        find_experts(open_checkpoint(folder))


def without_experts(weights: Weights, layer: int | None = None) -> Weights:
    part = ".experts." if layer is None else f".layers.{layer}.mlp.experts."
    return {name: tensor for name, tensor in weights.items() if part not in name}


def renamed(weights: Weights, rename: Callable[[str], str]) -> Weights:
    return {rename(name): tensor for name, tensor in weights.items()}


def test_qwen3_moe(tmp_path: Path, weights: Weights) -> None:
    experts = found(tmp_path / "m", weights)
    assert experts.model_type == "qwen3_moe"
    assert experts.geometry == Geometry(hidden=128, intermediate=256, experts=4)
    assert (experts.layers, experts.topk, experts.activation) == ((0, 1), 2, "silu")
    expected = [expert_key(n, e, p) for n in range(2) for e in range(4) for p in PARTS]
    assert sorted(experts.stored()) == sorted(expected)
    assert experts.weight(1, 3, "w1").tensor == expert_key(1, 3, "gate_proj")
    assert experts.weight(1, 3, "w3").tensor == expert_key(1, 3, "up_proj")
    assert experts.weight(1, 3, "w2").tensor == expert_key(1, 3, "down_proj")


def test_mixtral(tmp_path: Path, weights: Weights) -> None:
    parts = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

    def rename(name: str) -> str:
        name = name.replace(".mlp.", ".block_sparse_moe.")
        return re.sub("|".join(parts), lambda part: parts[part[0]], name)

    changes = {"model_type": "mixtral", "num_local_experts": 4, "num_experts": None}
    experts = found(tmp_path / "m", renamed(weights, rename), **changes)
    assert experts.geometry == Geometry(hidden=128, intermediate=256, experts=4)
    prefix = "model.layers.1.block_sparse_moe.experts.3"
    for matrix in ("w1", "w3", "w2"):
        assert experts.weight(1, 3, matrix).tensor == f"{prefix}.{matrix}.weight"
    refused(tmp_path / "qwen", renamed(weights, rename), "is in a layout")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (".mlp.experts.", ".ffn.expert_", "no routed experts"),
        (".mlp.experts.", ".ffn.experts.", "ffn.experts.*is in a layout"),
        ("model.layers.", "model.encoder.layers.", "is in a layout"),
        ("gate_proj.weight", "gate_proj.qweight", "is in a layout"),
    ],
)
def test_cv_1b_keys_that_match_no_expert(
    tmp_path: Path, weights: Weights, old: str, new: str, message: str
) -> None:
    refused(tmp_path / "m", renamed(weights, lambda name: name.replace(old, new)), message)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "llama", None])
def test_cf_1d_a_dense_model(tmp_path: Path, weights: Weights, model_type: str | None) -> None:
    changes = dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size"))
    refused(
        tmp_path / "m",
        without_experts(weights),
        "no routed experts",
        model_type=model_type,
        **changes,
    )


@pytest.mark.parametrize("part", PARTS)
def test_cv_3a_a_missing_matrix(tmp_path: Path, weights: Weights, part: str) -> None:
    left = {name: t for name, t in weights.items() if name != expert_key(1, 2, part)}
    refused(tmp_path / "m", left, rf"is missing \(layer 1, expert 2, {part[:-5]}\)")


def test_cv_3b_a_layer_that_ends_early(tmp_path: Path, weights: Weights) -> None:
    left = {name: t for name, t in weights.items() if "layers.1.mlp.experts.3." not in name}
    refused(tmp_path / "m", left, "layer 1, expert 3, gate")


@pytest.mark.parametrize("parts", [PARTS, ("up_proj",)])
def test_cv_3b_an_expert_too_many(tmp_path: Path, weights: Weights, parts: tuple[str, ...]) -> None:
    more = {expert_key(1, 4, part): weights[expert_key(1, 3, part)] for part in parts}
    refused(tmp_path / "m", weights | more, "is expert 4 of layer 1, config.json says 4 experts")


def test_cv_3b_a_layer_without_experts(tmp_path: Path, weights: Weights) -> None:
    refused(tmp_path / "m", without_experts(weights, 1), "layer 1, expert 0, gate")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (expert_key(7, 0, "up_proj"), "is of layer 7, config.json counts 2 and 0"),
        (expert_key(2, 0, "up_proj"), "is of layer 2, config.json counts 2"),
        ("mtp.layers.0.mlp.experts.0.up_proj.weight", r"is missing \(layer 2, expert 0, gate\)"),
        ("model.layers.0.mlp.experts.0.up_proj.bias", "up_proj.bias is a bias of experts"),
        ("model.layers.0.mlp.experts.00.up_proj.weight", "is in a layout"),
        ("model.layers.0.mlp.experts.0.up_proj.weight_scale_inv", "is part of no weight"),
    ],
)
def test_an_expert_tensor_that_has_no_place(
    tmp_path: Path, weights: Weights, name: str, message: str
) -> None:
    refused(tmp_path / "m", weights | {name: torch.ones(256, 128)}, message)


@pytest.mark.parametrize("name", ["mlp.shared_expert.up_proj", "mlp.shared_experts.up_proj"])
def test_shared_experts_are_no_routed_ones(tmp_path: Path, weights: Weights, name: str) -> None:
    shared = {f"model.layers.0.{name}.weight": weights[expert_key(0, 0, "up_proj")].clone()}
    experts = found(tmp_path / "m", weights | shared)
    assert not shared.keys() & set(experts.stored())


@pytest.mark.parametrize("shape", [(0, 128), (256,), (128, 256), (256, 127), (1, 256, 128)])
def test_st_2e_a_wrong_shape(tmp_path: Path, weights: Weights, shape: tuple[int, ...]) -> None:
    name = expert_key(1, 2, "up_proj")
    bad = {name: torch.ones(shape, dtype=torch.bfloat16)}
    message = rf"tensor {name} has shape {re.escape(str(list(shape)))}, expected \[256, 128\]"
    refused(tmp_path / "m", weights | bad, message)


def test_down_has_the_shape_of_down(tmp_path: Path, weights: Weights) -> None:
    name = expert_key(0, 0, "down_proj")
    bad = {name: weights[name].T.contiguous()}
    refused(tmp_path / "m", weights | bad, rf"{name} has shape .*, expected \[128, 256\]")


@pytest.mark.parametrize(
    ("dtype", "shown"),
    [
        (torch.float8_e4m3fn, "F8_E4M3 and without its scale, which would be"),
        (torch.float8_e5m2, "F8_E5M2, codes that convert does not read"),
        (torch.int8, "I8, codes that convert does not read"),
        (torch.float64, "F64; convert reads BF16"),
    ],
)
def test_a_dtype_that_is_not_read(
    tmp_path: Path, weights: Weights, dtype: torch.dtype, shown: str
) -> None:
    name = expert_key(1, 3, "down_proj")
    bad = {name: weights[name].to(dtype)}
    refused(tmp_path / "m", weights | bad, f"tensor {name} is {shown}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dtypes_that_are_read(tmp_path: Path, weights: Weights, dtype: torch.dtype) -> None:
    assert found(tmp_path / "m", {name: t.to(dtype) for name, t in weights.items()}).layers == (
        0,
        1,
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model_type", "llama", "model_type 'llama' is not one of"),
        ("model_type", None, "model_type None is not one of"),
        ("model_type", ["qwen3_moe"], "model_type .* is not one of"),
        ("quantization_config", {"quant_method": "fp8"}, "is BF16, .*quantization_config says fp8"),
        ("quantization_config", {}, "'quant_method' is a required property"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'"),
        ("hidden_act", "gelu_pytorch_tanh", "hidden_act is 'gelu_pytorch_tanh'"),
        ("hidden_act", None, "hidden_act is None"),
        ("hidden_act", ["silu"], "hidden_act is"),
        ("num_experts", None, "num_experts is None"),
        ("num_experts", 0, "num_experts is 0"),
        ("num_experts", True, "num_experts is True"),
        ("num_experts", 4.0, "num_experts is 4.0"),
        ("num_experts", "4", "num_experts is '4'"),
        ("num_experts", 5, "layer 0, expert 4, gate"),
        ("num_experts", 3, "is expert 3 of layer 0"),
        ("num_experts_per_tok", 5, "num_experts_per_tok is 5, more than the 4 experts"),
        ("num_experts_per_tok", None, "num_experts_per_tok is None"),
        ("num_hidden_layers", 3, "layer 2, expert 0, gate"),
        ("num_hidden_layers", 1, "is of layer 1, config.json counts 1"),
        ("hidden_size", 192, r"has shape \[256, 128\], expected \[256, 192\]"),
        ("moe_intermediate_size", 384, r"has shape \[256, 128\], expected \[384, 128\]"),
        ("moe_intermediate_size", 512, r"has shape \[256, 128\], expected \[512, 128\]"),
        ("decoder_sparse_step", 0, "decoder_sparse_step is 0"),
        ("decoder_sparse_step", 3, "describes no layer with routed experts"),
        ("mlp_only_layers", [0, 1], "describes no layer with routed experts"),
        ("mlp_only_layers", "0", "mlp_only_layers is '0', expected a list"),
        ("mlp_only_layers", ["0"], "mlp_only_layers is"),
        ("mlp_only_layers", [0], "is an expert of layer 0"),
    ],
)
def test_a_config_that_does_not_fit(
    tmp_path: Path, weights: Weights, key: str, value: object, message: str
) -> None:
    if value is None:  # a key that is there and null
        write_checkpoint(tmp_path / "null", weights=weights, config_value=config() | {key: None})
        with pytest.raises(FormatError, match=message):
            find_experts(open_checkpoint(tmp_path / "null"))
    refused(tmp_path / "m", weights, message, **{key: value})


@pytest.mark.parametrize("changes", [{"num_experts": None}, {"num_experts": 4}])
def test_cf_1c_the_expert_count_by_its_other_name(
    tmp_path: Path, weights: Weights, changes: dict
) -> None:
    assert found(tmp_path / "m", weights, num_local_experts=4, **changes).geometry.experts == 4


def test_cf_1c_an_expert_count_of_null(tmp_path: Path, weights: Weights) -> None:
    value = config() | {"num_local_experts": None}
    checkpoints.write_checkpoint(tmp_path / "m", weights=weights, config_value=value)
    assert find_experts(open_checkpoint(tmp_path / "m")).geometry.experts == 4


def test_cf_1c_expert_counts_in_conflict(tmp_path: Path, weights: Weights) -> None:
    refused(tmp_path / "m", weights, "number of experts is in conflict", num_local_experts=5)


def test_keys_that_may_be_absent(tmp_path: Path, weights: Weights) -> None:
    changes = {"decoder_sparse_step": None, "mlp_only_layers": None}
    assert found(tmp_path / "m", weights, **changes).layers == (0, 1)
    null = config() | {"mlp_only_layers": None, "quantization_config": None}
    write_checkpoint(tmp_path / "null", weights=weights, config_value=null)
    assert find_experts(open_checkpoint(tmp_path / "null")).layers == (0, 1)


@pytest.mark.parametrize(
    ("step", "dense", "expected"),
    [(1, [0], (1, 2, 3)), (2, [], (1, 3)), (2, [3], (1,)), (1, [1, 9], (0, 2, 3)), (4, [], (3,))],
)
def test_layers_that_the_config_leaves_dense(
    tmp_path: Path, step: int, dense: list[int], expected: tuple[int, ...]
) -> None:
    weights = checkpoints.tensors(layers=4, experts=2)
    for layer in set(range(4)) - set(expected):
        weights = without_experts(weights, layer)
    changes = {"num_hidden_layers": 4, "num_experts": 2, "mlp_only_layers": dense}
    experts = found(tmp_path / "m", weights, decoder_sparse_step=step, **changes)
    assert experts.layers == expected
    assert len(experts.stored()) == 6 * len(expected)


def test_one_expert(tmp_path: Path) -> None:
    weights = checkpoints.tensors(layers=1, experts=1)
    changes = {"num_hidden_layers": 1, "num_experts": 1, "num_experts_per_tok": 1}
    assert found(tmp_path / "m", weights, **changes).geometry.experts == 1


def test_carried_tensors_are_all_others(tmp_path: Path, weights: Weights) -> None:
    write_checkpoint(tmp_path / "m", weights=weights)
    opened = open_checkpoint(tmp_path / "m")
    carried = carried_tensors(opened, find_experts(opened))
    assert carried == {n: ("BF16", tuple(t.shape)) for n, t in without_experts(weights).items()}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("swiglu_limit", 10.0),
        ("first_k_dense_replace", 1),
        ("expert_bias", True),
        ("mlp_bias", True),
        ("quantization", {"quant_method": "fp8"}),
        ("compression_config", {"config_groups": {}, "quant_method": "compressed-tensors"}),
        ("transformers_weights", "model.gguf"),
    ],
)
def test_a_field_that_would_change_the_experts(
    tmp_path: Path, weights: Weights, key: str, value: object
) -> None:
    refused(tmp_path / "m", weights, f"{key} is set", **{key: value})


def test_a_router_that_is_missing_or_of_another_size(tmp_path: Path, weights: Weights) -> None:
    name = "model.layers.1.mlp.gate.weight"
    without = {key: tensor for key, tensor in weights.items() if key != name}
    refused(tmp_path / "a", without, f"router {name} is missing")
    refused(tmp_path / "b", weights | {name: torch.ones(3, 128)}, r"expected \[4, 128\]")


@pytest.mark.parametrize("key", ["num_experts", "num_hidden_layers", "hidden_size"])
def test_an_enormous_number_is_refused_at_once(tmp_path: Path, weights: Weights, key: str) -> None:
    refused(tmp_path / "m", weights, f"{key} is 2147483647, expected", **{key: 2**31 - 1})


def test_an_expert_number_of_thousands_of_digits(tmp_path: Path, weights: Weights) -> None:
    name = expert_key(0, 10**4200, "up_proj")
    refused(tmp_path / "m", weights | {name: torch.ones(256, 128)}, "is in a layout")
