"""Quantized weights: each format decoded bit for bit as the library that writes it does."""

import math
from pathlib import Path

import pytest
import quantized
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.entrypoints.convert.converters import FP8BlockDequantizer
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize
from quantized import KINDS, NAME, Parts, make, named, write
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from qsrt_pack.source.checkpoint import check_finite, read_weight
from qsrt_runtime.format.errors import FormatError

SHAPES = [(200, 320), (7, 32), (1, 32), (384, 256)]


def compressed(parts: Parts, config: dict) -> torch.Tensor:
    """By compressed-tensors' own decompression, in float32 where it takes its dtype of scales."""
    (scheme,) = QuantizationConfig.model_validate(config).config_groups.values()
    state = {f"weight{suffix}": part for suffix, part in parts.items()}
    if state["weight_scale"].dtype != torch.uint8:
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


_CONFIG = KINDS["fp8_channel"].config
_MXFP8 = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}
_MXFP8 |= {"symmetric": True, "scale_dtype": "torch.uint8"}
_BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}


@pytest.mark.parametrize(
    ("form", "weights", "scales"),
    [
        ("float-quantized", _BLOCKS, torch.linspace(0.001, 0.01, 6).view(2, 3)),
        (
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "tensor"},
            torch.tensor([0.7]),
        ),
        ("mxfp8-quantized", _MXFP8, torch.arange(110, 120, dtype=torch.uint8).repeat(200, 1)),
    ],
)
def test_other_scales_of_fp8(
    tmp_path: Path, form: str, weights: dict, scales: torch.Tensor
) -> None:
    """Blocks, tensors and groups of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights}
    config = _CONFIG | {"format": form, "config_groups": {"group_0": group}}
    parts = {"": make("fp8_channel", 200, 320)[""], "_scale": scales}
    found = read_weight(write(tmp_path, named(parts), config), NAME)
    assert torch.equal(found, compressed(parts, config))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_by_the_name_of_block_scales(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """As transformers writes FP8 without blocks."""
    parts = make("fp8_tensor", 200, 320)
    scale = parts.pop("_scale")
    config = {"quant_method": "fp8", "weight_block_size": None}
    opened = write(tmp_path, named(parts | {"_scale_inv": scale.reshape(shape)}), config)
    expected = reference("fp8_tensor", {**parts, "_scale": scale})
    assert torch.equal(read_weight(opened, NAME), expected)


@pytest.mark.parametrize("kind", ["fp8_block", "fp8_channel", "fp8_tensor"])
def test_a_block_size_that_is_not_stated_is_that_of_the_scales(tmp_path: Path, kind: str) -> None:
    """transformers would take blocks of 128 x 128, vLLM one scale a tensor."""
    parts = make(kind, 200, 320)
    found = read_weight(write(tmp_path, named(parts), {"quant_method": "fp8"}), NAME)
    assert torch.equal(found, reference(kind, parts))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_device_changes_no_bit(tmp_path: Path, kind: str) -> None:
    opened = write(tmp_path, named(make(kind, 384, 256)), KINDS[kind].config)
    found = read_weight(opened, NAME, device=torch.device("cuda"))
    assert found.is_cuda
    assert torch.equal(found.cpu().view(torch.int32), read_weight(opened, NAME).view(torch.int32))


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
    stack = quantized.stack(each)
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
