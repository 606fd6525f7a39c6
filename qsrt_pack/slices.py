"""What is kept of a source shard that is removed: its carried tensors, and where all of its lay."""

import itertools
import json
from collections.abc import Collection
from pathlib import Path

from qsrt_pack.assemble.shards import file_pieces
from qsrt_runtime.format import paths
from qsrt_runtime.format.tensorfile import Header, TensorEntry, header_bytes, layout, read_header

_SOURCE = "source"  # in the metadata: {tensor: [dtype, shape, start, end]} of the whole shard


def write_slice(
    path: Path, shard: Path, tensors: dict[str, TensorEntry], carried: Collection[str]
) -> str:
    """Copy some tensors of a shard as they are stored, durably; returns the SHA-256 of the copy.

    tensors: all of the shard's.   carried: names of those to copy, and of other shards' tensors.
    """
    kept = {name: entry for name, entry in tensors.items() if name in carried}
    lay = {name: [e.dtype, e.shape, e.start, e.end] for name, e in tensors.items()}
    specs = {name: (entry.dtype, entry.shape) for name, entry in kept.items()}
    header = header_bytes({_SOURCE: json.dumps(lay)}, layout(specs))
    copies = (file_pieces(shard, entry.start, entry.end) for entry in kept.values())
    paths.make_folder(path.parent)
    paths.write_pieces(path, itertools.chain([header], *copies))
    return paths.sha256_file(path)


def shard_header(path: Path) -> Header:
    """The tensors of the shard that a slice, which has the digest it was written with, is of."""
    lay = json.loads(read_header(path).metadata[_SOURCE])
    tensors = {n: TensorEntry(kind, tuple(shape), *ends) for n, (kind, shape, *ends) in lay.items()}
    return Header(path, {}, tensors)


def is_whole(path: Path, digest: str) -> bool:
    """Whether a slice is there as it was written."""
    return path.is_file() and paths.sha256_file(path) == digest
