"""What config.json says of quantized weights, which have to be stored so."""

import json
from pathlib import Path

import checkpoints
import pytest
import quantized
from quantized import KINDS, make, named, refused, write

from qsrt_pack.source.census import source_formats
from qsrt_pack.source.checkpoint import open_checkpoint
from qsrt_pack.source.models import find_experts
from qsrt_pack.source.quantization import KEY, read_quantization, stated, without
from qsrt_runtime.format.errors import FormatError

EXPERT = checkpoints.expert_key(1, 2, "up_proj")


def test_of_a_text_model_inside_another() -> None:
    """Stated there or above it; taken out of both."""
    said = KINDS["int4"].config
    inner = {"hidden_size": 8, "text_config": {"num_experts": 2, KEY: said}}
    outer = {"hidden_size": 8, "text_config": {"num_experts": 2}, KEY: said}
    bare = {"hidden_size": 8, "text_config": {"num_experts": 2}}
    for config in (inner, outer):
        assert stated(config) == said
        assert without(config) == bare
        assert read_quantization(config, "").method == "compressed-tensors"
    assert stated(bare) is None
    assert without(bare) == bare


def test_two_that_differ() -> None:
    """One for the whole and another for the text model in it: which is meant cannot be told."""
    config = {KEY: KINDS["fp8_block"].config, "text_config": {KEY: KINDS["int4"].config}}
    with pytest.raises(FormatError, match="quantization_config and another in text_config"):
        read_quantization(config, "")
    config["text_config"][KEY] = config[KEY]
    assert read_quantization(config, "").method == "fp8"


def changed(kind: str, **weights: object) -> dict:
    """The config of a kind with other `weights` in its group."""
    config = json.loads(json.dumps(KINDS[kind].config))
    config["config_groups"]["group_0"]["weights"].update(weights)
    return config


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("fp8_block", {"quant_method": "gptq"}, "'gptq' is not one of .*give it the checkpoint"),
        ("fp8_block", {"quant_method": "awq"}, "'awq' is not one of"),
        ("fp8_block", {"quant_method": "bitsandbytes"}, "'bitsandbytes' is not one of"),
        ("fp8_block", {"quant_method": ["fp8"]}, "quant_method"),
        ("fp8_block", "fp8", "'fp8' is not of type 'object'"),
        ("fp8_block", {}, "'quant_method' is a required property"),
        (
            "fp8_block",
            {"quant_method": "mxfp4"},
            "stored as fp8, config.json says that it is mxfp4",
        ),
        (
            "fp8_block",
            {"quant_method": "fp8", "weight_block_size": [64, 128]},
            r"weight_scale_inv has \[2, 3\], expected \[4, 3\]",
        ),
        (
            "fp8_block",
            {"quant_method": "fp8", "modules_to_not_convert": ["layer"]},
            "stored as fp8, config.json says that it is not quantized",
        ),
        ("nvfp4_modelopt", {"quant_method": "modelopt"}, "quant_algo is missing"),
        (
            "nvfp4_modelopt",
            {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}},
            "stored as nvfp4, config.json says that it is fp8",
        ),
        (
            "nvfp4_modelopt",
            {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
            "'W4A16_AWQ' is not one of",
        ),
        ("int4", changed("int4", num_bits=8), "weights of 8 bits, type int"),
        ("fp8_channel", changed("fp8_channel", symmetric=False), "symmetric False are not read"),
        ("nvfp4_packed", changed("nvfp4_packed", symmetric=False), "symmetric False are not read"),
        ("mxfp4_packed", changed("mxfp4_packed", group_size=64), "type float, groups of 64"),
        ("int4", changed("int4", symmetric=False), "lacks layer.proj.weight_zero_point"),
        ("int4", changed("int4", group_size=128), r"has \[256, 12\], expected \[256, 3\]"),
        ("int4", changed("int4", actorder="group"), "'group' is not one of"),
        (
            "int4",
            {**KINDS["int4"].config, "ignore": ["re:layer.*proj"]},
            "config.json says that it is not quantized",
        ),
        ("int4", {**KINDS["int4"].config, "ignore": ["re:("]}, "is no regular expression"),
        ("int4", {**KINDS["int4"].config, "format": "marlin-24"}, "'marlin-24' is not one of"),
        ("int4", {"quant_method": "compressed-tensors"}, "'config_groups' is a required"),
        (
            "int4",
            {**KINDS["int4"].config, "transform_config": {"config_groups": {"a": {}}}},
            "transform_config",
        ),
    ],
)
def test_a_config_that_says_otherwise(
    tmp_path: Path, kind: str, config: object, message: str
) -> None:
    parts = make(kind, 256, 384)
    write(tmp_path / "good", named(parts), KINDS[kind].config)
    refused(tmp_path / "bad", parts, config, message)


@pytest.mark.parametrize(
    ("listed", "is_left"),
    [
        ("layer.proj", True),
        ("layer", True),
        ("proj", True),
        ("*proj", True),
        ("layer.*", True),
        ("re:.*proj$", True),
        ("re:proj", False),
        ("lay", False),
        ("roj", False),
        ("layer.proj.more", False),
    ],
)
def test_modules_that_are_not_converted(tmp_path: Path, listed: str, is_left: bool) -> None:
    """By the lists of transformers and modelopt and the expressions of compressed-tensors."""
    config = {"quant_method": "fp8", "modules_to_not_convert": [listed]}
    parts = make("fp8_block", 128, 256)
    if is_left:
        refused(tmp_path, parts, config, "not quantized")
    else:
        write(tmp_path, named(parts), config)


def test_one_of_several_patterns(tmp_path: Path) -> None:
    config = {"quant_method": "fp8", "modules_to_not_convert": ["a*", "*b", "re:c", "lay*"]}
    refused(tmp_path, make("fp8_block", 128, 256), config, "not quantized")


def test_sparse_weights_that_are_stored_densely(tmp_path: Path) -> None:
    """As older llm-compressor states them."""
    parts, sparse = make("int4", 128, 256), {"format": "dense", "global_sparsity": 0.1}
    config = KINDS["int4"].config | {"sparsity_config": sparse}
    opened = write(tmp_path / "good", named(parts), config)
    assert [weight.format for weight in opened.weights.values()] == ["int4"]
    config = KINDS["int4"].config | {"sparsity_config": {"format": "sparse-bitmask"}}
    refused(tmp_path / "bad", parts, config, r"sparsity_config\.format: 'dense' was expected")


def test_groups_of_compressed_tensors_by_name(tmp_path: Path) -> None:
    """Experts in int4 and the rest in FP8, the general group first."""
    int4, fp8 = (KINDS[k].config["config_groups"]["group_0"] for k in ("int4", "fp8_channel"))
    groups = {"all": fp8, "experts": int4 | {"targets": ["re:.*experts.*"]}}
    config = KINDS["int4"].config | {"config_groups": groups, "format": "mixed-precision"}
    inner = make("int4", 128, 256)
    tensors = named(make("fp8_channel", 128, 256)) | named(inner, "mlp.experts.0.up.weight")
    opened = write(tmp_path, tensors, config)
    assert {w.format for w in opened.weights.values()} == {"fp8", "int4"}
    with pytest.raises(FormatError, match=r"stored as int4, config\.json says that it is fp8"):
        write(tmp_path / "bad", named(inner), config)


def test_an_expert_that_is_plain_against_the_config(tmp_path: Path) -> None:
    weights = checkpoints.tensors()
    tensors = quantized.quantize(KINDS["fp8_block"], weights)
    for suffix in ("", "_scale_inv"):
        del tensors[EXPERT + suffix]
    value = checkpoints.config(quantization_config=KINDS["fp8_block"].config)
    args = {"weights": tensors | {EXPERT: weights[EXPERT]}}
    checkpoints.write_checkpoint(tmp_path / "bad", config_value=value, **args)
    with pytest.raises(FormatError, match=f"{EXPERT} is BF16, config.json's quantization_config"):
        find_experts(open_checkpoint(tmp_path / "bad"))
    listed = {"modules_to_not_convert": [EXPERT.removesuffix(".weight")]}
    value["quantization_config"] = {**value["quantization_config"], **listed}
    checkpoints.write_checkpoint(tmp_path / "good", config_value=value, **args)
    opened = open_checkpoint(tmp_path / "good")
    counts = source_formats(opened, find_experts(opened))
    assert counts.experts == {"fp8": 23, "BF16": 1}
    assert counts.carried == {"fp8": 8}
