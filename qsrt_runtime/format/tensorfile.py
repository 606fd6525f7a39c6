"""Safetensors headers, read strictly and written byte for byte.

The safetensors library names neither the file nor the tensor in its errors and orders metadata
at random, so headers are ours.
"""

import ctypes
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qsrt_runtime.format import schema
from qsrt_runtime.format.errors import FormatError

MAX_HEADER = 100_000_000
DTYPE_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8},
    **{"U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32},
    **{"U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
    **{"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
}
_TORCH_DTYPES = {
    **{"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16},
    **{"I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F32": torch.float32, "F64": torch.float64, "U16": torch.uint16, "U32": torch.uint32},
    **{"U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_LFS = b"version https://git-lfs"


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor's bytes lie: [start, end) counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def at(self, index: int) -> "TensorEntry":
        """The same of one index of the leading axis; its items fill whole bytes."""
        size = (self.end - self.start) // self.shape[0]
        start = self.start + index * size
        return TensorEntry(self.dtype, self.shape[1:], start, start + size)


@dataclass(frozen=True)
class Header:
    """A safetensors file's header. tensors: in file order."""

    path: Path
    metadata: dict[str, str]
    tensors: dict[str, TensorEntry]


def read_header(path: Path) -> Header:
    """Read and check a header; the tensors cover the file without gap or overlap.

    Raises FormatError naming the file and the tensor.
    """
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise FormatError(f"{path} is not a regular file")
        with path.open("rb") as file:
            start = file.read(len(_LFS))
            if start == _LFS:
                raise FormatError(
                    f"{path} is a Git LFS pointer, not the file itself; fetch it (git lfs pull)"
                )
            if size < 8:
                raise FormatError(f"{path} is truncated: {size} bytes; copy it again")
            length = _header_length(path, start[:8], size)
            file.seek(8)
            text = file.read(length)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    value = schema.parse(text, f"{path}: header")
    if not isinstance(value, dict):
        raise FormatError(f"{path}: the header is a JSON {type(value).__name__}, not an object")
    return parse_header(path, value, 8 + length, size)


def parse_header(path: Path, value: dict[str, Any], start: int, size: int) -> Header:
    """Check a header's JSON object as read_header does.

    start: of the data, counted from the start of the file.   size: of the file, in bytes.
    """
    metadata = value.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError(f"{path}: __metadata__ is not an object of strings")
    tensors = {name: _entry(path, name, entry, start) for name, entry in value.items()}
    position = start
    in_order = sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end))
    for name, entry in in_order:
        if entry.start != position:
            what = "overlaps the one before" if entry.start < position else "leaves a gap before"
            raise FormatError(
                f"{path}: tensor {name} {what}: it starts at byte {entry.start - start} of the "
                f"data, expected {position - start}"
            )
        position = entry.end
    if position > size:
        raise FormatError(
            f"{path} is truncated: its tensors end at byte {position}, the file has {size} "
            f"(tensor {in_order[-1][0]} is cut); copy it again"
        )
    if position < size:
        raise FormatError(f"{path}: {size - position} bytes follow the last tensor")
    return Header(path, metadata, dict(in_order))


def layout(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, dict[str, Any]]:
    """Header entries of tensors {name: (dtype, shape)} that lie one after another."""
    entries, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = offset + tensor_bytes(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    return entries


def header_bytes(metadata: dict[str, str], entries: dict[str, dict[str, Any]]) -> bytes:
    """Length word and JSON: metadata keys sorted, entries in order, padded to a multiple of 8."""
    value = {"__metadata__": dict(sorted(metadata.items())), **entries}
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor, rounded up for dtypes narrower than a byte."""
    return -(-math.prod(shape) * DTYPE_BITS[dtype] // 8)


def read_tensor(path: Path, entry: TensorEntry) -> torch.Tensor:
    """One tensor of a file whose header has been read.

    Reads just its bytes: the library would map the whole file and parse its header again.
    """
    if entry.dtype not in _TORCH_DTYPES:
        raise FormatError(f"{path}: {entry.dtype} is not a dtype that torch reads")
    data = bytearray(entry.end - entry.start)
    with path.open("rb") as file:
        file.seek(entry.start)
        if file.readinto(data) != len(data):
            raise FormatError(f"{path} ended before byte {entry.end}; it changed since it was read")
    if not data:
        return torch.empty(entry.shape, dtype=_TORCH_DTYPES[entry.dtype])
    return torch.frombuffer(data, dtype=_TORCH_DTYPES[entry.dtype]).view(entry.shape)


def tensor_data(tensor: torch.Tensor) -> bytes:
    """A CPU tensor's bytes as they are stored."""
    tensor = tensor.contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _header_length(path: Path, start: bytes, size: int) -> int:
    """What the first 8 bytes say, which lies inside the file."""
    length = int.from_bytes(start, "little")
    if length > MAX_HEADER:  # text of any kind, for example
        raise FormatError(f"{path} is not a safetensors file: it begins with {start!r}")
    if 8 + length > size:
        raise FormatError(
            f"{path} is truncated: its header ends at byte {8 + length}, the file has {size}; "
            "copy it again"
        )
    return length


def _entry(path: Path, name: str, entry: Any, start: int) -> TensorEntry:
    where = f"{path}: tensor {name}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{where}: its entry is not {{dtype, shape, data_offsets}}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise FormatError(f"{where}: unknown dtype {dtype!r}")
    if not _are_sizes(shape):
        raise FormatError(f"{where}: shape {shape!r} is not a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(f"{where}: data_offsets {offsets!r} is not [start, end]")
    if _CONTROL.search(name):
        raise FormatError(f"{path}: tensor name {name!r} holds control characters")
    if math.prod(max(1, size) for size in shape) >= 2**63:
        raise FormatError(f"{where}: shape {shape} is too large")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8 or offsets[1] - offsets[0] != bits // 8:
        raise FormatError(
            f"{where}: {offsets[1] - offsets[0]} bytes stored, "
            f"shape {shape} of {dtype} takes {bits} bits"
        )
    return TensorEntry(dtype, tuple(shape), start + offsets[0], start + offsets[1])


def _are_sizes(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= 32
        and all(type(n) is int and 0 <= n < 2**63 for n in value)
    )
