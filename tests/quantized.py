"""Weights in the quantized formats of checkpoints, from random codes."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import checkpoints
import pytest
import torch
from safetensors.torch import save_file

from qsrt_pack.source.checkpoint import Checkpoint, open_checkpoint
from qsrt_runtime.format.errors import FormatError

NAME = "layer.proj.weight"
Parts = dict[str, torch.Tensor]  # suffix of the weight's name -> tensor
BLOCK = (128, 128)
GROUP = 32  # of int4


def _bytes(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def _e4m3(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Every finite number of float8_e4m3fn, of either sign."""
    codes = _bytes(generator, *shape)
    return codes.where((codes & 127) != 127, codes - 1).view(torch.float8_e4m3fn)


def _scales(generator: torch.Generator, *shape: int, size: float) -> torch.Tensor:
    return size * (0.5 + torch.rand(shape, generator=generator))


def _exponents(generator: torch.Generator, *shape: int, size: int) -> torch.Tensor:
    """Bytes of E8M0 around 2 ** size."""
    low = 127 + size - 2
    return torch.randint(low, low + 5, shape, dtype=torch.uint8, generator=generator)


def fp8_block(generator: torch.Generator, out: int, wide: int) -> Parts:
    shape = (ceil(out / BLOCK[0]), ceil(wide / BLOCK[1]))
    return {
        "": _e4m3(generator, out, wide),
        "_scale_inv": _scales(generator, *shape, size=3e-4),
    }


def fp8_ue8m0(generator: torch.Generator, out: int, wide: int) -> Parts:
    shape = (ceil(out / BLOCK[0]), ceil(wide / BLOCK[1]))
    exponents = _exponents(generator, *shape, size=-12)
    return {"": _e4m3(generator, out, wide), "_scale_inv": exponents.view(torch.float8_e8m0fnu)}


def fp8_tensor(generator: torch.Generator, out: int, wide: int) -> Parts:
    return {
        "": _e4m3(generator, out, wide),
        "_scale": _scales(generator, size=3e-4),
    }


def fp8_channel(generator: torch.Generator, out: int, wide: int) -> Parts:
    scales = _scales(generator, out, 1, size=3e-4).to(torch.bfloat16)
    return {"": _e4m3(generator, out, wide), "_scale": scales}


def mxfp4_blocks(generator: torch.Generator, out: int, wide: int) -> Parts:
    return {
        "_blocks": _bytes(generator, out, wide // 32, 16),
        "_scales": _exponents(generator, out, wide // 32, size=-6),
    }


def mxfp4_f4(generator: torch.Generator, out: int, wide: int) -> Parts:
    exponents = _exponents(generator, out, wide // 32, size=-6)
    return {
        "": _bytes(generator, out, wide // 2).view(torch.float4_e2m1fn_x2),
        "_scale": exponents.view(torch.float8_e8m0fnu),
    }


def mxfp4_packed(generator: torch.Generator, out: int, wide: int) -> Parts:
    return {
        "_packed": _bytes(generator, out, wide // 2),
        "_scale": _exponents(generator, out, wide // 32, size=-6),
    }


def nvfp4_modelopt(generator: torch.Generator, out: int, wide: int) -> Parts:
    return {
        "": _bytes(generator, out, wide // 2),
        "_scale": _e4m3(generator, out, wide // 16).float().abs().to(torch.float8_e4m3fn),
        "_scale_2": _scales(generator, size=3e-4),
    }


def nvfp4_packed(generator: torch.Generator, out: int, wide: int) -> Parts:
    parts = nvfp4_modelopt(generator, out, wide)
    divisor = 1 / parts["_scale_2"]
    return {"_packed": parts[""], "_scale": parts["_scale"], "_global_scale": divisor[None]}


def _words(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)


def int4(generator: torch.Generator, out: int, wide: int) -> Parts:
    return {
        "_packed": _words(generator, out, wide // 8),
        "_scale": _scales(generator, out, wide // GROUP, size=0.01).to(torch.bfloat16),
        "_shape": torch.tensor([out, wide]),
    }


def int4_asymmetric(generator: torch.Generator, out: int, wide: int) -> Parts:
    points = _words(generator, ceil(out / 8), wide // GROUP)
    return {**int4(generator, out, wide), "_zero_point": points}


def _packed_config(form: str, **weights: object) -> dict:
    """quantization_config as compressed-tensors writes it."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": group},
    }


@dataclass(frozen=True)
class Kind:
    """make: the parts of a weight [out, in].   name: of the format.   config: what states it."""

    make: Callable[[torch.Generator, int, int], Parts]
    name: str
    config: dict


_FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "modules_to_not_convert": ["lm_head"],
}
_CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}
_GROUP4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
_MX4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
_NV4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
KINDS = {
    "fp8_block": Kind(fp8_block, "fp8", _FP8 | {"weight_block_size": list(BLOCK)}),
    "fp8_ue8m0": Kind(
        fp8_ue8m0, "fp8", _FP8 | {"weight_block_size": list(BLOCK), "scale_fmt": "ue8m0"}
    ),
    "fp8_tensor": Kind(fp8_tensor, "fp8", _FP8 | {"weight_block_size": None}),
    "fp8_channel": Kind(fp8_channel, "fp8", _packed_config("float-quantized", **_CHANNEL)),
    "mxfp4_blocks": Kind(
        mxfp4_blocks, "mxfp4", {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    ),
    "mxfp4_f4": Kind(mxfp4_f4, "mxfp4", _FP8 | {"expert_dtype": "fp4"}),
    "mxfp4_packed": Kind(mxfp4_packed, "mxfp4", _packed_config("mxfp4-pack-quantized", **_MX4)),
    "nvfp4_modelopt": Kind(
        nvfp4_modelopt,
        "nvfp4",
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.gate"]},
    ),
    "nvfp4_packed": Kind(nvfp4_packed, "nvfp4", _packed_config("nvfp4-pack-quantized", **_NV4)),
    "int4": Kind(int4, "int4", _packed_config("pack-quantized", **_GROUP4)),
    "int4_asymmetric": Kind(
        int4_asymmetric, "int4", _packed_config("pack-quantized", **_GROUP4 | {"symmetric": False})
    ),
}


def is_quantized(name: str) -> bool:
    """Whether a Linear's weight, but for the router and the head."""
    return name.endswith("_proj.weight")


def quantize(kind: Kind, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint in a format: random codes in place of the linear weights."""
    generator, tensors = torch.Generator().manual_seed(1), {}
    for name, weight in weights.items():
        if is_quantized(name):
            parts = kind.make(generator, *weight.shape)
            tensors |= {name + suffix: part for suffix, part in parts.items()}
        else:
            tensors[name] = weight
    return tensors


def write_checkpoint(path: Path, kind: Kind, **options: object) -> Path:
    """checkpoints.write_checkpoint in a format. options: its own."""
    weights = options.pop("weights", None) or checkpoints.tensors()
    config = checkpoints.config(quantization_config=kind.config)
    weights = quantize(kind, weights)
    return checkpoints.write_checkpoint(path, config_value=config, weights=weights, **options)


def make(kind: str, out: int, wide: int) -> Parts:
    """The parts of a weight by the name of its kind."""
    return KINDS[kind].make(torch.Generator().manual_seed(out), out, wide)


def named(parts: Parts, name: str = NAME) -> dict[str, torch.Tensor]:
    return {name + suffix: part for suffix, part in parts.items()}


def write(folder: Path, tensors: dict[str, torch.Tensor], config: object = None) -> Checkpoint:
    """A checkpoint of these tensors alone, opened. config: its quantization_config."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    value = {} if config is None else {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(value))
    return open_checkpoint(folder)


def refused(folder: Path, parts: Parts, config: object, message: str) -> None:
    """The weight of these parts is refused with a message."""
    with pytest.raises(FormatError, match=message):
        write(folder, named(parts), config)


def stack(each: list[Parts]) -> Parts:
    """The parts of several weights on a leading axis."""
    raw = torch.uint8  # there is no stack of the narrow dtypes
    stacked = {
        suffix: torch.stack([parts[suffix].view(raw) for parts in each]).view(part.dtype)
        if part.dtype.itemsize == 1
        else torch.stack([parts[suffix] for parts in each])
        for suffix, part in each[0].items()
    }
    if "_shape" in stacked:
        stacked["_shape"] = torch.tensor([len(each), *each[0]["_shape"].tolist()])
    return stacked
