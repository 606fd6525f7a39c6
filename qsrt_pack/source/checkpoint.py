"""Open a Hugging Face checkpoint folder strictly, and read it one tensor at a time.

Opening reads config, index and every shard's header, and no tensor. Nothing is executed or
unpickled.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from qsrt_pack.source import formats, quantization
from qsrt_pack.source.formats import Weight
from qsrt_pack.source.weights import find_weights
from qsrt_runtime.format import paths, schema, tensorfile
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.manifest import CHECKSUMS, CONFIG, INDEX, MANIFEST, MARKER
from qsrt_runtime.format.tensorfile import Header, TensorEntry, read_header

SINGLE = "model.safetensors"
_NUMBERED = re.compile(r"^(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.safetensors$")
# Weights in other formats, code, and files that a package writes anew.
_NOT_CARRIED = re.compile(
    paths.WEIGHTS_OR_CODE.pattern
    + r"|\.partial$|\.index\.json$|^config\.json$|^hf_quant_config\.json$|^README\.md$",
    re.IGNORECASE,
)
NOTHING: Mapping[str, Header] = MappingProxyType({})
ReadHeader = Callable[[str], Header]  # of a shard by its name
_PACKAGE_FILES = {MANIFEST, MARKER, CHECKSUMS}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose headers have been read.

    tensors: name -> (shard, where it lies).   weights: what they decode to, by the names of an
    unquantized checkpoint.   shards: relative names.   carried: side files that
    a package copies.   left_out: files that are neither weights of this checkpoint nor carried;
    hidden files and folders are not looked at.   shards_at: the folder of the shards, which need
    not all be there at once.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, tuple[str, TensorEntry]]
    weights: dict[str, Weight]
    shards: tuple[str, ...]
    carried: tuple[str, ...]
    left_out: tuple[str, ...]
    shards_at: Path

    @property
    def model_config(self) -> dict[str, Any]:
        """config.json of the decoded checkpoint."""
        return quantization.without(self.config)

    @property
    def quantization_config(self) -> dict[str, Any] | None:
        """What config.json says of quantized weights."""
        return quantization.stated(self.config)

    def path_of(self, weight: Weight) -> Path:
        """The shard in which a weight's codes are."""
        return self.shards_at / self.tensors[weight.parts["codes"]][0]

    @property
    def shard_bytes(self) -> dict[str, int]:
        """The size of each shard; tensors cover one to its end."""
        sizes = dict.fromkeys(self.shards, 0)
        for shard, entry in self.tensors.values():
            sizes[shard] = max(sizes[shard], entry.end)
        return sizes


def open_checkpoint(
    path: Path, elsewhere: Mapping[str, Header] = NOTHING, shards_at: Path | None = None
) -> Checkpoint:
    """Read config, index and shard headers of a local folder; FormatError on any doubt.

    elsewhere: headers of shards that need not be in the folder.   shards_at: where shards are or
    will be, by default the folder.
    """
    if not path.is_dir():
        raise FormatError(
            f"{path} is not a folder; give a local checkpoint folder (download it first)"
        )
    path = path.resolve()
    files = sorted({*paths.files_below(path), *elsewhere})
    files = [n for n in files if not re.search(r"(^|/)\.", n)]
    tops = [name.split("/")[0] for name in files]
    found = [n for n in tops if n in _PACKAGE_FILES or n.startswith("qsrt-layer-")]
    if found:
        raise FormatError(f"{path} holds {found[0]}: it is a package already, not a checkpoint")
    if CONFIG not in files:
        raise FormatError(f"{path / CONFIG} is missing; this is no Hugging Face checkpoint folder")
    paths.regular_file(path / CONFIG, path)
    config = schema.read(path / CONFIG)
    if not isinstance(config, dict):
        raise FormatError(f"{path / CONFIG} is a JSON {type(config).__name__}, not an object")
    schema.require_json(config, str(path / CONFIG))
    header = partial(_shard_header, path, elsewhere)
    indexed = INDEX in files
    tensors = _indexed(path, header) if indexed else _without_index(path, files, header)
    said = quantization.read_quantization(config, str(path / CONFIG))
    weights = find_weights(path, tensors, said)
    shards = tuple(sorted({shard for shard, _ in tensors.values()}))
    own = {CONFIG, INDEX, *shards}
    carried = tuple(n for n in files if n not in own and not _NOT_CARRIED.search(n))
    for name in carried:
        paths.relative_name(name, str(path))
        paths.regular_file(path / name, path)
    left_out = tuple(n for n in files if n not in own and _NOT_CARRIED.search(n))
    place = shards_at or path
    return Checkpoint(path, config, tensors, weights, shards, carried, left_out, place)


def read_tensor(checkpoint: Checkpoint, name: str, index: int | None = None) -> torch.Tensor:
    """One tensor as stored, or one index of its leading axis, and nothing else of it."""
    shard, entry = checkpoint.tensors[name]
    part = entry if index is None else entry.at(index)
    return tensorfile.read_tensor(checkpoint.shards_at / shard, part)


def read_weight(
    checkpoint: Checkpoint,
    name: str,
    index: int | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """A weight by its logical name as float32, decoded; see formats.read_weight."""
    weight = checkpoint.weights[name]
    return formats.read_weight(checkpoint.shards_at, checkpoint.tensors, weight, index, device)


def check_finite(checkpoint: Checkpoint, name: str, index: int | None = None) -> None:
    """Refuse a weight, or an index of a stack, with a NaN or an infinity, naming the first."""
    weight = checkpoint.weights[name]
    formats.check_finite(checkpoint.shards_at, checkpoint.tensors, weight, name, index)


def source_stamp(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Size, inode and times of config, index and the shards that are there.

    Equal while nobody writes to them.
    """
    stamps = {}
    for name in _source_names(checkpoint):
        path = (checkpoint.shards_at if name in checkpoint.shards else checkpoint.path) / name
        if path.exists():
            stat = path.stat()
            stamps[name] = (stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)
    return stamps


def digest_files(
    checkpoint: Checkpoint,
    advance: Callable[[int], None] | None = None,
    known: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """SHA-256 of config, index and shards by name: what `source_sha256` is taken over.

    known: of shards that are not read for it.
    """
    names = [name for name in _source_names(checkpoint) if name not in known]
    return paths.sha256_files(checkpoint.path, names, advance) | dict(known)


def digest_small_files(checkpoint: Checkpoint, stated: dict[str, str]) -> dict[str, str]:
    """digest_files without reading a shard: of each, what is stated of it, or `not read`.

    Differs from `stated` where config, index or the shards' names do.
    """
    digests = {name: stated.get(name, "not read") for name in checkpoint.shards}
    small = [name for name in _source_names(checkpoint) if name not in digests]
    return digests | {name: paths.sha256_file(checkpoint.path / name) for name in small}


def _shard_header(path: Path, elsewhere: Mapping[str, Header], shard: str) -> Header:
    if shard in elsewhere:
        return elsewhere[shard]
    paths.regular_file(path / shard, path)
    return read_header(path / shard)


def _source_names(checkpoint: Checkpoint) -> list[str]:
    index = [INDEX] if (checkpoint.path / INDEX).exists() else []
    return sorted([CONFIG, *index, *checkpoint.shards])


def _indexed(path: Path, header: ReadHeader) -> dict[str, tuple[str, TensorEntry]]:
    where = path / INDEX
    paths.regular_file(where, path)
    value = schema.read(where)
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weight_map, dict):
        raise FormatError(f"{where} has no weight_map object")
    headers: dict[str, Header] = {}
    for tensor, shard in weight_map.items():
        paths.relative_name(shard, f"{where}: weight_map of {tensor}")
        if shard not in headers:
            headers[shard] = header(shard)
        if tensor not in headers[shard].tensors:
            raise FormatError(f"{where}: {shard} does not hold tensor {tensor}")
    for shard, found in headers.items():
        for tensor in found.tensors:
            if weight_map.get(tensor) != shard:
                raise FormatError(
                    f"{path / shard} holds tensor {tensor}, which {INDEX} "
                    f"places in {weight_map.get(tensor, 'no shard')}"
                )
    return {tensor: (s, headers[s].tensors[tensor]) for tensor, s in weight_map.items()}


def _without_index(
    path: Path, files: list[str], header: ReadHeader
) -> dict[str, tuple[str, TensorEntry]]:
    shards = [SINGLE] if SINGLE in files else _numbered_shards(path, files)
    tensors: dict[str, tuple[str, TensorEntry]] = {}
    for shard in shards:
        for name, entry in header(shard).tensors.items():
            if name in tensors:
                raise FormatError(f"{path}: {tensors[name][0]} and {shard} both hold tensor {name}")
            tensors[name] = (shard, entry)
    return tensors


def _numbered_shards(path: Path, files: list[str]) -> list[str]:
    matches = [m for m in map(_NUMBERED.match, files) if m and "/" not in m.string]
    if not matches:
        raise FormatError(_no_weights(path, files))
    sets = {(m["stem"], m["count"]) for m in matches}
    if len(sets) > 1:
        raise FormatError(f"{path}: shards of {len(sets)} different sets and no {INDEX}")
    ((stem, count),) = sets
    shards = [f"{stem}-{i:05d}-of-{count}.safetensors" for i in range(1, int(count) + 1)]
    missing = sorted(set(shards) - set(files))
    if missing:
        raise FormatError(f"{path / missing[0]} is missing (and there is no {INDEX})")
    return shards


def _no_weights(path: Path, files: list[str]) -> str:
    pickles = [n for n in files if re.search(r"\.(bin|pt|pth|ckpt|pkl)$", n)]
    if pickles:
        return (
            f"{path} has its weights only as {pickles[0]}, a pickle, which is never opened; "
            "save it as safetensors first (transformers: model.save_pretrained(folder))"
        )
    return f"{path} has neither {INDEX} nor {SINGLE} nor numbered shards"
