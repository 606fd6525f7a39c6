"""Quantized weights: each format decoded bit for bit as the library that writes it does."""

import itertools
import json
import math
from pathlib import Path

import checkpoints
import pytest
import quantized
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.entrypoints.convert.converters import FP8BlockDequantizer
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize
from quantized import KINDS, Parts
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from qsrt_pack.source.checkpoint import Checkpoint, check_finite, open_checkpoint, read_weight
from qsrt_pack.source.models import carried_tensors, find_experts, source_formats
from qsrt_runtime.format.errors import FormatError

NAME = "layer.proj.weight"
EXPERT = checkpoints.expert_key(1, 2, "up_proj")
SHAPES = [(200, 320), (7, 32), (1, 32), (384, 256)]


def compressed(parts: Parts, config: dict) -> torch.Tensor:
    """By compressed-tensors' own decompression, in float32 where it takes its dtype of scales."""
    (scheme,) = QuantizationConfig.model_validate(config).config_groups.values()
    state = {f"weight{suffix}": part for suffix, part in parts.items()}
    if scheme.weights.type == "int" or scheme.weights.num_bits == 8:
        state["weight_scale"] = state["weight_scale"].float()
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    return compressor.decompress(state, scheme)["weight"].float()


def fp4_groups(codes: torch.Tensor, scales: torch.Tensor, **options: object) -> torch.Tensor:
    """By compressed-tensors' own unpacking and dequantization, in float32."""
    args = QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True
    )
    rows, columns = codes.shape
    values = unpack_fp4_from_uint8(codes, rows, 2 * columns, torch.float32)
    return dequantize(values, scales, args=args, dtype=torch.float32, **options)


def reference(kind: str, parts: Parts) -> torch.Tensor:
    config = KINDS[kind].config
    if kind in ("fp8_block", "fp8_ue8m0"):
        state = {f"a.weight{suffix}": part for suffix, part in parts.items()}
        return FP8BlockDequantizer(dtype=torch.float32).process(state)["a.weight"]
    if kind == "fp8_tensor":
        scales = parts["_scale"][None, None]
        return Fp8Dequantize(None)._dequantize_one(parts[""], scales, torch.float32)
    if kind == "mxfp4_blocks":
        stack = (parts["_blocks"][None], parts["_scales"][None])
        return convert_moe_packed_tensors(*stack, dtype=torch.float32)[0].T
    if kind == "mxfp4_f4":
        codes = parts[""].view(torch.int8)
        return Fp8Dequantize(None)._dequantize_one(codes, parts["_scale"], torch.float32)
    if kind == "nvfp4_modelopt":
        return fp4_groups(parts[""], parts["_scale"].float() * parts["_scale_2"])
    if kind == "nvfp4_packed":
        scales = parts["_scale"].float()
        return fp4_groups(parts["_packed"], scales, global_scale=parts["_global_scale"])
    return compressed(parts, config)


def write(folder: Path, tensors: dict[str, torch.Tensor], config: dict | None = None) -> Checkpoint:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    value = {} if config is None else {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(value))
    return open_checkpoint(folder)


def named(parts: Parts, name: str = NAME) -> dict[str, torch.Tensor]:
    return {name + suffix: part for suffix, part in parts.items()}


def make(kind: str, out: int, wide: int) -> Parts:
    return KINDS[kind].make(torch.Generator().manual_seed(out), out, wide)


@pytest.mark.parametrize(("out", "wide"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_decoded_bit_for_bit(tmp_path: Path, kind: str, out: int, wide: int) -> None:
    parts = make(kind, out, wide)
    opened = write(tmp_path, named(parts), KINDS[kind].config)
    assert list(opened.weights) == [NAME]
    weight = opened.weights[NAME]
    assert (weight.format, weight.shape) == (KINDS[kind].name, (out, wide))
    check_finite(opened, NAME)
    found, expected = read_weight(opened, NAME), reference(kind, parts)
    assert found.dtype == torch.float32
    assert torch.equal(found.view(torch.int32), expected.contiguous().view(torch.int32))
    assert found.abs().sum() > 0


def test_zero_points_of_fewer_rows_than_a_word_holds(tmp_path: Path) -> None:
    """Five rows of thirteen; compressed-tensors cannot unpack a single word of several groups."""
    parts, config = make("int4_asymmetric", 13, 96), KINDS["int4_asymmetric"].config
    few = {s: part[:1] if s == "_zero_point" else part[:5] for s, part in parts.items()}
    few["_shape"] = torch.tensor([5, 96])
    found = read_weight(write(tmp_path, named(few), config), NAME)
    assert torch.equal(found, reference("int4_asymmetric", parts)[:5])


@pytest.mark.parametrize("kind", [k for k in KINDS if KINDS[k].name != "int4"])
def test_a_format_that_its_tensors_show_needs_no_config(tmp_path: Path, kind: str) -> None:
    parts = make(kind, 256, 384)
    found = read_weight(write(tmp_path, named(parts)), NAME)
    assert torch.equal(found, reference(kind, parts))


@pytest.mark.parametrize("kind", KINDS)
def test_one_of_a_stack(tmp_path: Path, kind: str) -> None:
    """Weights on a leading axis, one of which is read alone."""
    generator = torch.Generator().manual_seed(0)
    each = [KINDS[kind].make(generator, 128, 256) for _ in range(3)]
    raw = torch.uint8  # there is no stack of the narrow dtypes
    stack = {
        suffix: torch.stack([p[suffix].view(raw) for p in each]).view(part.dtype)
        if part.dtype.itemsize == 1
        else torch.stack([p[suffix] for p in each])
        for suffix, part in each[0].items()
    }
    if "_shape" in stack:
        stack["_shape"] = torch.tensor([3, 128, 256])
    opened = write(tmp_path, named(stack, "experts.up"), KINDS[kind].config)
    assert opened.weights["experts.up"].shape == (3, 128, 256)
    check_finite(opened, "experts.up")
    whole = read_weight(opened, "experts.up")
    for index, parts in enumerate(each):
        expected = reference(kind, parts)
        assert torch.equal(read_weight(opened, "experts.up", index=index), expected)
        assert torch.equal(whole[index], expected)


def test_every_number_of_the_narrow_dtypes(tmp_path: Path) -> None:
    """All 256 exponents and all 16 codes, as their definitions give them."""
    exponents = torch.arange(256, dtype=torch.uint8)[:, None]
    codes = torch.arange(16, dtype=torch.uint8)
    blocks = (codes | codes.flip(0) << 4).repeat(256, 1, 1)
    opened = write(tmp_path, named({"_blocks": blocks, "_scales": exponents}))
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    numbers = [*magnitudes, *(-m for m in magnitudes)]
    row = [n for pair in zip(numbers, reversed(numbers), strict=True) for n in pair]
    found = read_weight(opened, NAME)
    for byte in range(255):
        # ldexp by torch.tensor of doubles: what is past float32 is infinite
        expected = torch.tensor([math.ldexp(n, byte - 127) for n in row], dtype=torch.float64)
        assert torch.equal(found[byte], expected.float())
    assert found[255].isnan().all()


def test_plain_tensors_are_as_they_were(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6).view(3, 2).bfloat16(), "b": torch.ones(()), "c": torch.ones(0)}
    opened = write(tmp_path, tensors)
    assert [opened.weights[name].format for name in "abc"] == ["BF16", "F32", "F32"]
    assert torch.equal(read_weight(opened, "a"), tensors["a"].float())
    assert torch.equal(read_weight(opened, "a", index=1), tensors["a"][1].float())


def fits(folder: Path, parts: Parts, config: dict | None, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        write(folder, named(parts), config)


@pytest.mark.parametrize("kind", KINDS)
def test_cv_4c_every_part_has_to_be_there(tmp_path: Path, kind: str) -> None:
    parts = make(kind, 128, 256)
    codes = next(iter(parts))
    for number, missing in enumerate(parts):
        left = {suffix: part for suffix, part in parts.items() if suffix != missing}
        message = rf"tensor {NAME}{codes} (is|lacks) .*{NAME}{missing}"
        if missing == codes:
            message = rf"tensor {NAME}_\w+ is part of no weight"
        fits(tmp_path / str(number), left, KINDS[kind].config, message)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_another_shape(tmp_path: Path, kind: str) -> None:
    parts = make(kind, 256, 256)
    scales = next(s for s in ("_scale_inv", "_scales", "_scale") if s in parts)
    for number, change in enumerate([(3, 1), (2, 3)]):
        bad = torch.ones(change).to(torch.float32)
        dtype = parts[scales].dtype
        bad = bad.to(dtype) if dtype != torch.uint8 else torch.full(change, 127, dtype=dtype)
        fits(
            tmp_path / str(number),
            parts | {scales: bad},
            KINDS[kind].config,
            rf"{NAME}\S* has shape \[256, 256\], {NAME}{scales} has .*expected|no groups",
        )


@pytest.mark.parametrize(
    ("kind", "suffix", "value", "message"),
    [
        ("fp8_block", "", 0x7F, r"tensor layer\.proj\.weight holds nan at \[3, 5\]"),
        ("fp8_channel", "", 0xFF, r"tensor layer\.proj\.weight holds nan at \[3, 5\]"),
        ("mxfp4_f4", "_scale", 255, r"weight_scale holds nan at \[3, 5\]"),  # ST-5b
        ("mxfp4_blocks", "_scales", 255, r"weight_scales holds nan at \[3, 5\]"),
        ("mxfp4_packed", "_scale", 255, r"weight_scale holds nan at \[3, 5\]"),
        ("nvfp4_packed", "_scale", 0x7F, r"weight_scale holds nan at \[3, 5\]"),
        ("nvfp4_modelopt", "_scale_2", math.inf, r"weight_scale_2 holds inf at \[\]"),
        ("nvfp4_packed", "_global_scale", math.inf, r"weight_global_scale holds inf at \[0\]"),
        ("nvfp4_packed", "_global_scale", 0.0, r"weight layer\.proj\.weight decodes to"),
        ("fp8_block", "_scale_inv", math.nan, r"weight_scale_inv holds nan at \[1, 2\]"),
        ("fp8_tensor", "_scale", 3e38, r"weight layer\.proj\.weight decodes to -?inf at"),
        ("int4", "_scale", math.inf, r"weight_scale holds inf at \[3, 5\]"),
    ],
)
def test_qn_5a_codes_and_scales_that_are_not_finite(
    tmp_path: Path, kind: str, suffix: str, value: float, message: str
) -> None:
    parts = make(kind, 256, 384)
    part = parts[suffix].clone()
    flat = part.view(torch.uint8) if isinstance(value, int) else part
    place = {"_scale_inv": (1, 2), "_scale_2": (), "_global_scale": (0,)}.get(suffix, (3, 5))
    flat[() if part.ndim == 0 else place] = value
    opened = write(tmp_path, named(parts | {suffix: part}), KINDS[kind].config)
    with pytest.raises(FormatError, match=message):
        check_finite(opened, NAME)


def test_st_5c_an_odd_last_dimension(tmp_path: Path) -> None:
    """Of an F4 tensor; only an even number of rows makes it whole bytes."""
    header = {
        NAME: {"dtype": "F4", "shape": [256, 255], "data_offsets": [0, 32640]},
        f"{NAME}_scale": {"dtype": "F8_E8M0", "shape": [256, 8], "data_offsets": [32640, 34688]},
    }
    text = json.dumps(header).encode()
    file = len(text).to_bytes(8, "little") + text + bytes(34688)
    (tmp_path / "model.safetensors").write_bytes(file)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        FormatError, match=rf"tensor {NAME} has rows of 255 weights, .*groups of 32"
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("shape", "points", "message"),
    [
        ([128, 248], None, r"weight_shape holds \[128, 248\], the codes are those of \[128, 256\]"),
        (None, (16, 7), r"weight_zero_point has shape \[16, 7\], expected \[16, 8\]"),
        (None, (1, 1), r"weight_zero_point has shape \[1, 1\], expected \[16, 8\]"),
    ],
)
def test_parts_of_int4_that_do_not_fit(
    tmp_path: Path, shape: list[int] | None, points: tuple[int, int] | None, message: str
) -> None:
    parts = make("int4_asymmetric", 128, 256)
    if shape is not None:
        parts["_shape"] = torch.tensor(shape)
    if points is not None:
        parts["_zero_point"] = torch.zeros(points, dtype=torch.int32)
    with pytest.raises(FormatError, match=message):
        check_finite(write(tmp_path, named(parts), KINDS["int4_asymmetric"].config), NAME)


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
            {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
            "'W4A16_AWQ' is not one of",
        ),
        ("int4", changed("int4", num_bits=8), "weights of 8 bits, type int"),
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
    fits(tmp_path / "bad", parts, config, message)


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        (f"{NAME}_scale", torch.float32, "has scales of two formats"),
        (f"{NAME}_g_idx", torch.int32, "weight_g_idx is part of no weight"),
        ("layer.proj.pre_quant_scale", torch.float32, "pre_quant_scale is part of no weight"),
        ("other.weight_scale_inv", torch.float32, "other.weight_scale_inv is part of no weight"),
    ],
)
def test_a_tensor_that_would_change_weights(
    tmp_path: Path, name: str, dtype: torch.dtype, message: str
) -> None:
    fits(
        tmp_path,
        make("fp8_block", 128, 256) | {name.removeprefix(NAME): torch.ones(1, dtype=dtype)},
        None,
        message,
    ) if name.startswith(NAME) else _refused_with(tmp_path, {name: torch.ones(1)}, message)


def _refused_with(folder: Path, more: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        write(folder, named(make("fp8_block", 128, 256)) | more)


def test_a_weight_that_is_there_twice(tmp_path: Path) -> None:
    more = {"": torch.ones(128, 256)}
    fits(tmp_path, make("int4", 128, 256) | more, KINDS["int4"].config, "is stored twice")


def test_scales_of_activations_and_caches_go_with_the_format(tmp_path: Path) -> None:
    more = {
        "layer.proj.input_scale": torch.ones(()),
        "layer.attn.k_scale": torch.ones(()),
        "layer.proj.bias": torch.ones(128),
        "layer.norm.scale": torch.ones(128),
    }
    kind = KINDS["nvfp4_modelopt"]
    opened = write(tmp_path, named(make("nvfp4_modelopt", 128, 256)) | more, kind.config)
    assert set(opened.weights) == {NAME, "layer.proj.bias", "layer.norm.scale"}
    assert opened.weights[NAME].others == ("layer.proj.input_scale",)
    plain = write(tmp_path / "plain", {"layer.attn.k_scale": torch.ones(())})
    assert set(plain.weights) == {"layer.attn.k_scale"}


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
        fits(tmp_path, parts, config, "not quantized")
    else:
        write(tmp_path, named(parts), config)


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


@pytest.mark.parametrize("kind", ["fp8_block", "nvfp4_modelopt"])
def test_cv_4b_a_scale_in_another_shard(tmp_path: Path, kind: str) -> None:
    weights = quantized.quantize(KINDS[kind], checkpoints.tensors())
    scales = {name: 2 for name in weights if "weight_scale" in name}
    assert scales
    options = {"shard_of": dict.fromkeys(weights, 1) | scales}
    apart = quantized.write_checkpoint(tmp_path / "apart", KINDS[kind], **options)
    whole = quantized.write_checkpoint(tmp_path / "whole", KINDS[kind], shards=1)
    apart, whole = open_checkpoint(apart), open_checkpoint(whole)
    assert find_experts(apart) == find_experts(whole)
    for name in apart.weights:
        assert torch.equal(read_weight(apart, name), read_weight(whole, name))


def test_cv_4c_an_expert_without_its_scale(tmp_path: Path) -> None:
    weights = quantized.quantize(KINDS["fp8_block"], checkpoints.tensors())
    del weights[f"{EXPERT}_scale_inv"]
    config = checkpoints.config(quantization_config=KINDS["fp8_block"].config)
    checkpoints.write_checkpoint(tmp_path / "m", config_value=config, weights=weights)
    message = f"{EXPERT} is F8_E4M3 and without its scale, which would be {EXPERT}_scale_inv"
    with pytest.raises(FormatError, match=message):
        open_checkpoint(tmp_path / "m")


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
    value["quantization_config"]["modules_to_not_convert"] = [EXPERT.removesuffix(".weight")]
    checkpoints.write_checkpoint(tmp_path / "good", config_value=value, **args)
    opened = open_checkpoint(tmp_path / "good")
    counts = source_formats(opened, find_experts(opened))
    assert counts.experts == {"fp8": 23, "BF16": 1}
    assert counts.carried == {"fp8": 8}


def test_carried_tensors_decoded_or_as_stored(tmp_path: Path) -> None:
    opened = open_checkpoint(quantized.write_checkpoint(tmp_path / "m", KINDS["int4"]))
    experts = find_experts(opened)
    plain = checkpoints.write_checkpoint(tmp_path / "plain")
    assert carried_tensors(opened, experts) == carried_tensors(open_checkpoint(plain), experts)
    stored = carried_tensors(opened, experts, "stored")
    files = [load_file(path) for path in opened.path.glob("*.safetensors")]
    names = set(itertools.chain(*files))
    assert stored.keys() == {name for name in names if ".experts." not in name}
    assert stored["model.layers.0.self_attn.q_proj.weight_packed"] == ("I32", (128, 16))


def test_hf_quant_config_is_not_carried(tmp_path: Path) -> None:
    folder = quantized.write_checkpoint(tmp_path / "m", KINDS["nvfp4_modelopt"])
    (folder / "hf_quant_config.json").write_text("{}")
    assert open_checkpoint(folder).left_out == ("hf_quant_config.json",)
