"""The formats of a checkpoint's weights: which tensors make up one, and what they decode to.

A weight has the name that it would have unquantized; the tensors that it is stored in have that
name and a suffix. Which format it is in follows from the tensors that are there.
"""

import math
import re
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
from qsrt_pack.source.quantization import Quantization, Scheme
from qsrt_runtime.format import tensorfile
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.tensorfile import DTYPE_BITS, TensorEntry

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
_PER_ELEMENT = {"F8_E4M3": 1, "F4": 1, "U8": 2, "I32": 8}  # weights in an element of codes
# Of activations and caches; they say nothing of a weight and go with the format.
_OF_ACTIVATIONS = re.compile(r"(.+)\.(input_scale|activation_scale|input_global_scale)")
_OF_CACHES = re.compile(r".+\.[kv]_scale")
_OF_WEIGHTS = re.compile(
    r".+(\.weight_(g_idx|global_scale|scale|scale_2|scale_inv|scales|shape|zero_point)"
    r"|_proj_scales|\.pre_quant_scale)"
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


def find_weights(folder: Path, tensors: Tensors, quantization: Quantization) -> dict[str, Weight]:
    """All weights by name, from headers alone; FormatError names the tensor that lacks another.

    Left out are scales of a key-value cache.
    """
    weights: dict[str, Weight] = {}
    for name, (shard, entry) in tensors.items():
        where = f"{folder / shard}: tensor {name}"
        fits = [(f, w) for f in FORMATS if (w := _weight_name(f, name, entry.dtype, tensors))]
        if len(fits) > 1:
            suffixes = " and ".join(form.parts["scales"][0] for form, _ in fits)
            raise FormatError(f"{where} has scales of two formats: {suffixes}")
        for form, weight in fits:
            weights[weight] = _weight(form, weight, tensors, quantization, where)
    modules = {name.removesuffix(".weight"): name for name in weights if name.endswith(".weight")}
    taken = {part for weight in weights.values() for part in weight.parts.values()}
    left = [name for name in tensors if name not in taken]
    for name in sorted(left, key=lambda name: _OF_WEIGHTS.fullmatch(name) is not None):
        match = _OF_ACTIVATIONS.fullmatch(name)
        if name in weights:
            form = weights[name].format
            raise FormatError(f"{folder}: {name} is stored twice, plainly and as {form}")
        if match and match[1] in modules:
            weight = weights[modules[match[1]]]
            weights[modules[match[1]]] = replace(weight, others=(*weight.others, name))
        elif quantization.method is None or not _OF_CACHES.fullmatch(name):
            weights[name] = _plain(folder, tensors, name)
    return weights


def read_weight(
    folder: Path,
    tensors: Tensors,
    weight: Weight,
    *,
    index: int | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """A weight as float32 [..., out, in] on a device; of a plain tensor in its own shape.

    index: only this one of the leading axis. The device does not change a bit.
    """
    parts = _read_parts(folder, tensors, weight, index)
    shape = weight.shape if index is None else weight.shape[1:]
    return _decode(weight, {role: part.to(device) for role, part in parts.items()}, shape)


def check_finite(folder: Path, tensors: Tensors, weight: Weight, name: str) -> None:
    """Refuse a weight with a NaN or an infinity in a part or its value, naming the position."""
    stack = range(weight.shape[0]) if len(weight.shape) > 2 else (None,)
    for index in stack:
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


def _weight_name(form: Format, codes: str, dtype: str, tensors: Tensors) -> str | None:
    """The weight whose codes in this format a tensor is, None if it is not."""
    suffix, dtypes = form.parts["codes"]
    if dtype not in dtypes or not codes.endswith(suffix):
        return None
    name = codes.removesuffix(suffix)
    found = [
        name + form.parts[role][0] in tensors
        and tensors[name + form.parts[role][0]][1].dtype in form.parts[role][1]
        for role in form.required()
    ]
    return name if all(found) else None


def _weight(
    form: Format, name: str, tensors: Tensors, quantization: Quantization, where: str
) -> Weight:
    """A weight whose parts are there and fit each other and config.json."""
    parts = {role: name + suffix for role, (suffix, _) in form.parts.items()}
    parts = {role: part for role, part in parts.items() if part in tensors}
    scheme = quantization.scheme(name)
    if quantization.method is None:
        scheme = Scheme((form.name,))
    if scheme is None or form.name not in scheme.formats:
        said = "is not quantized" if scheme is None else f"is {' or '.join(scheme.formats)}"
        raise FormatError(f"{where} is stored as {form.name}, config.json says that it {said}")
    if scheme.has_zero_points not in (None, "zero_points" in parts):
        verb = "lacks" if scheme.has_zero_points else "has"
        raise FormatError(f"{where} {verb} {name}_zero_point, against config.json")
    entries = {role: tensors[part][1] for role, part in parts.items()}
    weight = Weight(form.name, _shape(form, entries["codes"], where), parts)
    return replace(weight, block=_block(form, weight, entries, scheme, where))


def _shape(form: Format, codes: TensorEntry, where: str) -> tuple[int, ...]:
    shape, groups = codes.shape, ()
    if form.parts["codes"][0] == "_blocks" and shape:  # a group is an axis of its own
        *shape, groups = shape
        if groups * 2 != form.group:
            raise FormatError(f"{where} has shape {list(codes.shape)}, expected [.., 16]")
        shape[-1:] = [size * groups for size in shape[-1:]]
    if len(shape) not in (2, 3) or not math.prod(shape):
        raise FormatError(
            f"{where} has shape {list(codes.shape)}, which is no matrix of {form.name} codes"
        )
    shape = (*shape[:-1], shape[-1] * _PER_ELEMENT[codes.dtype])
    if form.group and shape[-1] % form.group:
        raise FormatError(
            f"{where} has rows of {shape[-1]} weights, which are no groups of {form.group}"
        )
    return shape


def _block(
    form: Format,
    weight: Weight,
    entries: Mapping[str, TensorEntry],
    scheme: Scheme,
    where: str,
) -> tuple[int, int]:
    """Rows and columns that share a scale, as the shapes of the parts bear out."""
    rows, columns = weight.shape[-2:]
    scales = entries["scales"]
    if form.group:
        choices = [(1, form.group)]
    elif scheme.block is not None:
        choices = [scheme.block]
    elif form.name == "int4":
        choices = [(1, columns // max(1, scales.shape[-1] if scales.shape else 1))]
    else:
        choices = [(rows, columns), (1, columns), (1, 32), (128, 128)]
    for block in choices:
        expected = _scale_shape(weight.shape, block)
        if _trimmed(scales.shape) == _trimmed(expected):
            break
    else:
        raise FormatError(
            f"{where} has shape {list(weight.shape)}, {weight.parts['scales']} has "
            f"{list(scales.shape)}, expected {list(_scale_shape(weight.shape, choices[-1]))}"
        )
    lead = weight.shape[:-2]
    others = {
        "factor": ((), lead),
        "divisor": ((), lead),
        "shape": ((len(weight.shape),),),
        "zero_points": ((*lead, -(-rows // 8), columns // block[1]),),
    }
    for role, entry in entries.items():
        if role in others and _trimmed(entry.shape) not in map(_trimmed, others[role]):
            raise FormatError(
                f"{where}: {weight.parts[role]} has shape {list(entry.shape)}, "
                f"expected {list(others[role][-1])}"
            )
    return block


def _scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without ones at its end, which one writer keeps and another leaves out."""
    return shape if shape[-1:] != (1,) else _trimmed(shape[:-1])


def _plain(folder: Path, tensors: Tensors, name: str) -> Weight:
    """A tensor that is stored as it is; refuses codes and parts of a format that is not read."""
    shard, entry = tensors[name]
    where = f"{folder / shard}: tensor {name}"
    if _OF_WEIGHTS.fullmatch(name):
        raise FormatError(f"{where} is part of no weight in a format that convert reads")
    is_narrow = DTYPE_BITS[entry.dtype] <= 8 and entry.dtype[0] == "F"
    is_integer = entry.dtype in ("U8", "I8", "I32")
    if is_narrow or (is_integer and name.endswith((".weight", "_packed", "_blocks"))):
        raise FormatError(f"{where} is {entry.dtype}{_lacking(name, entry.dtype)}")
    return Weight(entry.dtype, entry.shape, {"codes": name})


def _lacking(name: str, dtype: str) -> str:
    """What would have made codes a weight."""
    wanted = []
    for form in FORMATS:
        suffix, dtypes = form.parts["codes"]
        if dtype in dtypes and name.endswith(suffix):
            stem = name.removesuffix(suffix)
            rest = [form.parts[role] for role in form.required()[1:]]
            wanted.append(" with ".join(f"{stem}{end} ({'/'.join(kind)})" for end, kind in rest))
    if not wanted:
        return ", codes that convert does not read"
    return f" and without its scale, which would be {' or '.join(dict.fromkeys(wanted))}"


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
            entry = _one_of_stack(entry, index)
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


def _one_of_stack(entry: TensorEntry, index: int) -> TensorEntry:
    size = (entry.end - entry.start) // entry.shape[0]
    start = entry.start + index * size
    return replace(entry, shape=entry.shape[1:], start=start, end=start + size)


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
    scales = scales.reshape(_scale_shape(shape, weight.block))
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
