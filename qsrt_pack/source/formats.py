"""The formats of a checkpoint's weights: which tensors one is stored in, what these decode to.

A weight has the name that it would have unquantized; the tensors that it is stored in have that
name and a suffix.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from qsrt_pack.source.dtypes import (
    PLAIN,
    e2m1_to_float32,
    e8m0_to_float32,
    int4_to_float32,
    to_float32,
)
from qsrt_runtime.format import tensorfile
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.tensorfile import TensorEntry

Tensors = Mapping[str, tuple[str, TensorEntry]]  # name -> (shard, where it lies)


@dataclass(frozen=True)
class Format:
    """How a weight [..., out, in] is stored.

    parts: role -> (suffix, dtypes). Roles: codes; scales, of a block of weights each; factor and
    divisor, of the scales; shape, the numbers out and in; zero_points, of a block each.
    group: weights along in that share a scale; None where config.json or the shape says it.
    """

    name: str
    parts: Mapping[str, tuple[str, tuple[str, ...]]]
    group: int | None = None

    def required(self) -> list[str]:
        return [role for role in self.parts if role != "zero_points"]


_E4M3, _U8, _E8M0 = ("F8_E4M3",), ("U8",), ("F8_E8M0", "U8")
FORMATS = (
    Format("fp8", {"codes": ("", _E4M3), "scales": ("_scale_inv", PLAIN + _E8M0)}),
    Format("fp8", {"codes": ("", _E4M3), "scales": ("_scale", PLAIN + _E8M0)}),
    Format("mxfp4", {"codes": ("", ("F4",)), "scales": ("_scale", _E8M0)}, 32),
    Format("mxfp4", {"codes": ("", ("F4",)), "scales": ("_scale_inv", _E8M0)}, 32),
    Format("mxfp4", {"codes": ("_blocks", _U8), "scales": ("_scales", _E8M0)}, 32),
    Format("mxfp4", {"codes": ("_packed", _U8), "scales": ("_scale", _E8M0)}, 32),
    Format(
        "nvfp4",  # as modelopt writes it
        {"codes": ("", _U8), "scales": ("_scale", _E4M3), "factor": ("_scale_2", ("F32",))},
        16,
    ),
    Format(
        "nvfp4",  # as compressed-tensors writes it
        {
            "codes": ("_packed", _U8),
            "scales": ("_scale", _E4M3),
            "divisor": ("_global_scale", ("F32",)),
        },
        16,
    ),
    Format(
        "int4",
        {
            "codes": ("_packed", ("I32",)),
            "scales": ("_scale", PLAIN),
            "shape": ("_shape", ("I64", "I32")),
            "zero_points": ("_zero_point", ("I32",)),
        },
    ),
)


@dataclass(frozen=True)
class Weight:
    """A weight, or any other tensor, by its name in an unquantized checkpoint.

    format: a name in FORMATS, or the dtype of a tensor that is stored plainly.
    shape: [..., out, in] of the weight.   parts: role -> name of a tensor; of a plain one its own,
    as codes.   others: tensors that go with the weight and say nothing of it.
    block: rows and columns that share a scale.
    """

    format: str
    shape: tuple[int, ...]
    parts: Mapping[str, str]
    block: tuple[int, int] = (1, 1)
    others: tuple[str, ...] = field(default=())

    @property
    def is_plain(self) -> bool:
        return len(self.parts) == 1

    @property
    def written(self) -> tuple[str, tuple[int, ...]]:
        """dtype and shape in a checkpoint without quantization."""
        return self.format if self.is_plain else "BF16", self.shape

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of all tensors that go with the weight."""
        return (*self.parts.values(), *self.others)


def read_weight(
    folder: Path,
    tensors: Tensors,
    weight: Weight,
    index: int | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """A weight as float32 [..., out, in] on a device; of a plain tensor in its own shape.

    index: of a stack, or of a plain tensor, only this one of the leading axis.
    The device does not change a bit.
    """
    parts = _read_parts(folder, tensors, weight, index)
    shape = weight.shape if index is None else weight.shape[1:]
    return _decode(weight, {role: part.to(device) for role, part in parts.items()}, shape)


def check_finite(
    folder: Path, tensors: Tensors, weight: Weight, name: str, index: int | None = None
) -> None:
    """Refuse a weight with a NaN or an infinity in a part or its value, naming the position."""
    if index is None and len(weight.shape) > 2:  # one in memory at a time
        for each in range(weight.shape[0]):
            check_finite(folder, tensors, weight, name, each)
        return
    parts = _read_parts(folder, tensors, weight, index)
    for role, part in parts.items():
        values = e8m0_to_float32(part) if _is_e8m0(role, part) else part
        if values.dtype.is_floating_point:
            where = f"{folder / tensors[weight.parts[role]][0]}: tensor {weight.parts[role]}"
            _refuse_infinite(values, f"{where} holds", index)
    if not weight.is_plain:
        shape = weight.shape if index is None else weight.shape[1:]
        where = f"{folder / tensors[weight.parts['codes']][0]}: weight {name}"
        _refuse_infinite(_decode(weight, parts, shape), f"{where} decodes to", index)


def _refuse_infinite(values: torch.Tensor, what: str, index: int | None) -> None:
    bad = ~torch.isfinite(to_float32(values))
    if bad.any():
        position = bad.nonzero()[0].tolist()
        value = to_float32(values)[tuple(position)].item()
        whole = position if index is None else [index, *position]
        raise FormatError(f"{what} {value} at {whole}; expected finite weights")


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """How many blocks a weight [..., out, in] has: [..., rows of them, columns]."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def _read_parts(
    folder: Path, tensors: Tensors, weight: Weight, index: int | None
) -> dict[str, torch.Tensor]:
    """The parts as stored, those of four bits and E8M0 as bytes; index: of one of a stack.

    A part that states the shape is compared and left out.
    """
    parts = {}
    for role, name in weight.parts.items():
        shard, entry = tensors[name]
        if role == "shape":
            _check_stated_shape(folder / shard, name, entry, weight)
            continue
        if index is not None and entry.shape[:1] == weight.shape[:1]:
            entry = entry.at(index)
        if entry.dtype == "F4":
            entry = replace(entry, dtype="U8", shape=(*entry.shape[:-1], entry.shape[-1] // 2))
        if entry.dtype == "F8_E8M0":
            entry = replace(entry, dtype="U8")
        parts[role] = tensorfile.read_tensor(folder / shard, entry)
    return parts


def _check_stated_shape(path: Path, name: str, entry: TensorEntry, weight: Weight) -> None:
    found = tensorfile.read_tensor(path, entry).tolist()
    if found != list(weight.shape):
        raise FormatError(
            f"{path}: tensor {name} holds {found}, the codes are those of {list(weight.shape)}"
        )


def _is_e8m0(role: str, part: torch.Tensor) -> bool:
    return role == "scales" and part.dtype == torch.uint8


def _decode(
    weight: Weight, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]
) -> torch.Tensor:
    """Values times scales in float32 [..., out, in]; a scale of scales is applied to these first.

    That is the order of modelopt and of compressed-tensors.
    """
    if weight.is_plain:
        return to_float32(parts["codes"])
    values = _code_values(parts["codes"]).reshape(shape)
    scales = parts["scales"]
    scales = e8m0_to_float32(scales) if _is_e8m0("scales", scales) else to_float32(scales)
    scales = scales.reshape(scale_shape(shape, weight.block))
    of_all = (*[-1] * (len(shape) - 2), 1, 1)  # one number, or one for each of a stack
    if "factor" in parts:
        scales = scales * parts["factor"].reshape(of_all)
    if "divisor" in parts:
        scales = scales / parts["divisor"].reshape(of_all)
    if "zero_points" in parts:  # packed along out
        points = int4_to_float32(parts["zero_points"].mT).mT[..., : shape[-2], :]
        values -= _expanded(points, shape, weight.block)
    return values.mul_(_expanded(scales, shape, weight.block))


def _code_values(codes: torch.Tensor) -> torch.Tensor:
    if codes.dtype == torch.uint8:
        return e2m1_to_float32(codes)
    return int4_to_float32(codes) if codes.dtype == torch.int32 else to_float32(codes)


def _expanded(scales: torch.Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> torch.Tensor:
    """Scales of blocks -> of every weight; the last block of an axis may be cut short."""
    rows = scales.repeat_interleave(block[0], -2)[..., : shape[-2], :]
    return rows.repeat_interleave(block[1], -1)[..., : shape[-1]]
