"""Which weights a checkpoint's tensors make up, and in which formats they are.

A weight's format follows from the tensors that are there, and has to be the one that config.json
states; codes without their scales are refused.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from qsrt_pack.source.formats import FORMATS, Format, Tensors, Weight, scale_shape
from qsrt_pack.source.quantization import Quantization, Scheme
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.tensorfile import DTYPE_BITS, TensorEntry

_PER_ELEMENT = {"F8_E4M3": 1, "F4": 1, "U8": 2, "I32": 8}  # weights in an element of codes
# Of activations and caches; they say nothing of a weight and go with the format.
_OF_ACTIVATIONS = re.compile(r"(.+)\.(input_scale|activation_scale|input_global_scale)")
_OF_CACHES = re.compile(r".+\.[kv]_scale")
# Parts that are some weight's; left over, they belong to a format that is not read.
_OF_WEIGHTS = re.compile(
    r".+(\.weight_(g_idx|global_scale|scale|scale_2|scale_inv|scales|shape|zero_point)"
    r"|_proj_scales|\.pre_quant_scale)"
)


def find_weights(folder: Path, tensors: Tensors, quantization: Quantization) -> dict[str, Weight]:
    """All weights by name, from headers alone; FormatError names the tensor that lacks another.

    Left out are scales of a key-value cache.
    """
    weights: dict[str, Weight] = {}
    for name, (shard, entry) in tensors.items():
        where = f"{folder}/{shard}: tensor {name}"
        fits = [(f, w) for f in FORMATS if (w := _weight_name(f, name, entry.dtype, tensors))]
        if len(fits) > 1:
            suffixes = " and ".join(form.parts["scales"][0] for form, _ in fits)
            raise FormatError(f"{where} has scales of two formats: {suffixes}")
        for form, weight in fits:
            weights[weight] = _weight(form, weight, tensors, quantization, where)
    is_quantized = bool(weights) or quantization.method is not None
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
        elif not (is_quantized and _OF_CACHES.fullmatch(name)):
            weights[name] = _plain(folder, tensors, name)
    return weights


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
    entries = {role: tensors[part][1] for role, part in parts.items() if part in tensors}
    scheme = quantization.scheme(name)
    if quantization.method is None:
        scheme = Scheme((form.name,))
    if scheme is None or form.name not in scheme.formats:
        said = "is not quantized" if scheme is None else f"is {' or '.join(scheme.formats)}"
        raise FormatError(f"{where} is stored as {form.name}, config.json says that it {said}")
    if scheme.has_zero_points not in (None, "zero_points" in entries):
        verb = "lacks" if scheme.has_zero_points else "has"
        raise FormatError(f"{where} {verb} {name}_zero_point, against config.json")
    for role, entry in entries.items():
        if entry.dtype not in form.parts[role][1]:
            raise FormatError(
                f"{where}: {parts[role]} is {entry.dtype}, expected {form.parts[role][1][0]}"
            )
    parts = {role: parts[role] for role in entries}
    weight = Weight(form.name, _shape(form, entries["codes"], where), parts)
    weight = replace(weight, block=_block(form, weight, entries["scales"], scheme, where))
    _check_parts(weight, entries, where)
    return weight


def _shape(form: Format, codes: TensorEntry, where: str) -> tuple[int, ...]:
    """[..., out, in] of the weight that some codes are of."""
    shape = codes.shape
    if form.parts["codes"][0] == "_blocks":  # bytes of a group are an axis of their own
        if len(shape) < 3 or 2 * shape[-1] != form.group:
            raise FormatError(f"{where} has shape {list(shape)}, expected [out, groups, 16]")
        shape = (*shape[:-2], shape[-2] * shape[-1])
    if len(shape) not in (2, 3) or not math.prod(shape):
        raise FormatError(f"{where} has shape {list(shape)}, no matrix of {form.name} codes")
    shape = (*shape[:-1], shape[-1] * _PER_ELEMENT[codes.dtype])
    if form.group and shape[-1] % form.group:
        raise FormatError(
            f"{where} has rows of {shape[-1]} weights, which are no groups of {form.group}"
        )
    return shape


def _block(
    form: Format,
    weight: Weight,
    scales: TensorEntry,
    scheme: Scheme,
    where: str,
) -> tuple[int, int]:
    """Rows and columns that share a scale, as the shape of the scales bears out."""
    rows, columns = weight.shape[-2:]
    if form.group:
        choices = [(1, form.group)]
    elif scheme.block is not None:
        choices = [scheme.block]
    elif form.name == "int4":
        choices = [(1, max(1, columns // max(1, *scales.shape[-1:], 1)))]
    else:
        choices = [(rows, columns), (1, columns), (1, 32), (128, 128)]
    for block in choices:
        if _trimmed(scales.shape) == _trimmed(scale_shape(weight.shape, block)):
            return block
    raise FormatError(
        f"{where} has shape {list(weight.shape)}, {weight.parts['scales']} has "
        f"{list(scales.shape)}, expected {list(scale_shape(weight.shape, choices[-1]))}"
    )


def _check_parts(weight: Weight, entries: Mapping[str, TensorEntry], where: str) -> None:
    """Refuse parts beside codes and scales that have another shape than the weight's asks for."""
    lead, groups = weight.shape[:-2], scale_shape(weight.shape, weight.block)[-1]
    expected = {
        "factor": ((), lead),
        "divisor": ((), lead),
        "shape": ((len(weight.shape),),),
        "zero_points": ((*lead, -(-weight.shape[-2] // 8), groups),),
    }
    for role, shapes in expected.items():
        if role in entries and _trimmed(entries[role].shape) not in map(_trimmed, shapes):
            raise FormatError(
                f"{where}: {weight.parts[role]} has shape {list(entries[role].shape)}, "
                f"expected {list(shapes[-1])}"
            )


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
