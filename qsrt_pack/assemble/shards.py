"""Write safetensors shards of bounded size, one tensor at a time."""

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from qsrt_runtime.format import paths
from qsrt_runtime.format.tensorfile import DTYPE_BITS, header_bytes, layout, tensor_bytes

MAX_SHARD_BYTES = 5_000_000_000
_CHUNK = 1 << 24

Spec = tuple[str, tuple[int, ...]]  # dtype and shape


def plan_shards(tensors: dict[str, Spec], max_bytes: int = MAX_SHARD_BYTES) -> list[list[str]]:
    """Names of each shard: in the order of names, a new shard where one more would be too much.

    A tensor above the limit gets a shard of its own. No tensors make no shard.
    """
    shards: list[list[str]] = []
    size = 0
    for name in sorted(tensors):
        more = tensor_bytes(*tensors[name])
        if not shards or size + more > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += more
    return shards


def write_shards(
    folder: Path,
    tensors: dict[str, Spec],
    payload: Callable[[str], Iterable[bytes]],
    max_bytes: int = MAX_SHARD_BYTES,
) -> dict[str, Any]:
    """Write model-XXXXX-of-YYYYY.safetensors files and return their index.

    payload: a tensor's name -> its bytes in pieces.
    """
    shards = plan_shards(tensors, max_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / file, {name: tensors[name] for name in names}, payload)
        weight_map |= dict.fromkeys(names, file)
    total = sum(tensor_bytes(*spec) for spec in tensors.values())
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def file_pieces(path: Path, start: int, end: int) -> Iterable[bytes]:
    """The bytes [start, end) of a file in pieces."""
    with path.open("rb") as file:
        file.seek(start)
        while start < end:
            piece = file.read(min(_CHUNK, end - start))
            if not piece:
                raise OSError(f"{path} ended at byte {start}, expected {end}")
            start += len(piece)
            yield piece


def _write_shard(
    path: Path, tensors: dict[str, Spec], payload: Callable[[str], Iterable[bytes]]
) -> None:
    # Wide dtypes first, so that every tensor is aligned to its element.
    order = sorted(tensors, key=lambda name: (-DTYPE_BITS[tensors[name][0]], name))
    header = header_bytes({"format": "pt"}, layout({name: tensors[name] for name in order}))
    pieces = (piece for name in order for piece in payload(name))
    paths.write_pieces(path, itertools.chain([header], pieces))
