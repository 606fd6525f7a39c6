"""Which tensors make up a weight, and every doubt refused by the tensor's name."""

import itertools
import json
from pathlib import Path

import checkpoints
import pytest
import quantized
import torch
from quantized import KINDS, NAME, make, named, refused, write
from safetensors.torch import load_file

from qsrt_pack.source.checkpoint import check_finite, open_checkpoint, read_weight
from qsrt_pack.source.models import carried_tensors, find_experts
from qsrt_runtime.format.errors import FormatError

EXPERT = checkpoints.expert_key(1, 2, "up_proj")


@pytest.mark.parametrize("kind", KINDS)
def test_cv_4c_every_part_has_to_be_there(tmp_path: Path, kind: str) -> None:
    parts = make(kind, 128, 256)
    codes = next(iter(parts))
    for number, missing in enumerate(parts):
        left = {suffix: part for suffix, part in parts.items() if suffix != missing}
        message = rf"tensor {NAME}{codes} (is|lacks) .*{NAME}{missing}"
        if missing == codes:
            message = rf"tensor {NAME}_\w+ is part of no weight"
        refused(tmp_path / str(number), left, KINDS[kind].config, message)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_another_shape(tmp_path: Path, kind: str) -> None:
    parts = make(kind, 256, 256)
    scales = next(s for s in ("_scale_inv", "_scales", "_scale") if s in parts)
    for number, change in enumerate([(3, 1), (2, 3)]):
        bad = torch.ones(change).to(torch.float32)
        dtype = parts[scales].dtype
        bad = bad.to(dtype) if dtype != torch.uint8 else torch.full(change, 127, dtype=dtype)
        refused(
            tmp_path / str(number),
            parts | {scales: bad},
            KINDS[kind].config,
            rf"{NAME}\S* has shape \[256, 256\], {NAME}{scales} has .*expected|no groups",
        )


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


@pytest.mark.parametrize(
    ("kind", "suffix"), [("nvfp4_modelopt", "_scale_2"), ("nvfp4_packed", "_global_scale")]
)
def test_one_scale_of_scales_for_each_matrix(tmp_path: Path, kind: str, suffix: str) -> None:
    parts = make(kind, 128, 256) | {suffix: torch.ones(2)}
    refused(tmp_path, parts, KINDS[kind].config, rf"weight{suffix} has shape \[2\], expected \[\]")


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        (f"{NAME}_scale", torch.float32, "has scales of two formats"),
        (f"{NAME}_g_idx", torch.int32, "weight_g_idx is part of no weight"),
        ("layer.proj.pre_quant_scale", torch.float32, "pre_quant_scale is part of no weight"),
        ("other.weight_scale_inv", torch.float32, "weight_scale_inv is part of no weight"),
        ("other.up_proj_scales", torch.float32, "up_proj_scales is part of no weight"),
        ("other.weight", torch.int8, "other.weight is I8, codes that convert does not read"),
        (
            "other.weight",
            torch.uint8,
            r"is U8 and without its scale, .*other\.weight_scale",
        ),
    ],
)
def test_a_tensor_without_a_place(
    tmp_path: Path, name: str, dtype: torch.dtype, message: str
) -> None:
    """One that would change weights, or be taken for one."""
    tensors = named(make("fp8_block", 128, 256)) | {name: torch.ones(1, dtype=dtype)}
    with pytest.raises(FormatError, match=message):
        write(tmp_path, tensors)


def test_a_weight_that_is_there_twice(tmp_path: Path) -> None:
    more = {"": torch.ones(128, 256)}
    refused(tmp_path, make("int4", 128, 256) | more, KINDS["int4"].config, "is stored twice")


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
    unsaid = write(tmp_path / "unsaid", named(make("nvfp4_modelopt", 128, 256)) | more)
    assert set(unsaid.weights) == set(opened.weights)
    plain = write(tmp_path / "plain", {"layer.attn.k_scale": torch.ones(())})
    assert set(plain.weights) == {"layer.attn.k_scale"}


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
