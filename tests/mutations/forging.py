"""Redo checksums after a change, as a forger would."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qsrt_runtime.format import schema

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
LISTING, MANIFEST, MARKER = "MANIFEST.sha256", "qsrt-manifest.json", "QSRT_COMPLETE.json"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _edit(path: Path, edit: Callable[[dict], object]) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def reseal_listing(folder: Path, text: str) -> None:
    """Write MANIFEST.sha256 and its digest in the marker."""
    (folder / LISTING).write_text(text)
    digest = sha256(folder / LISTING)
    _edit(folder / MARKER, lambda marker: marker.update(checksum_manifest_sha256=digest))


def redo_checksums(folder: Path, changed: str) -> None:
    """The list of checksums and the marker; a changed marker stays as it was made."""
    if changed == MARKER:
        return
    if changed == INDEX:
        bind_index(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in files]
    lines = [f"{sha256(folder / n)}  {n}\n" for n in names if n not in (LISTING, MARKER)]
    digests = {
        "package_manifest_sha256": sha256(folder / MANIFEST),
        "model_index_sha256": sha256(folder / INDEX),
    }
    _edit(folder / MARKER, lambda marker: marker.update(digests))
    reseal_listing(folder, "".join(lines))


def bind_index(folder: Path) -> None:
    """The digest over index and shards, in manifest and marker."""
    shards = [path.name for path in folder.glob("model*.safetensors")]
    digest = schema.digest({name: sha256(folder / name) for name in [INDEX, *shards]})
    _edit(folder / MANIFEST, lambda m: m["base_model"].update(manifest_sha256=digest))
    _edit(folder / MARKER, lambda m: m.update(base_manifest_sha256=digest))


def bind_base(folder: Path) -> None:
    bind_index(folder)
    redo_checksums(folder, "a shard")


def bind_layer(folder: Path, layer: str, evidence: str) -> None:
    """Size and digest of a layer file, in its evidence and the manifest."""
    size, digest = (folder / layer).stat().st_size, sha256(folder / layer)
    _edit(
        folder / evidence,
        lambda e: e.update(safetensors_bytes=size, safetensors_sha256=digest),
    )
    _edit(folder / MANIFEST, lambda m: m["layers"]["0"].update(bytes=size, sha256=digest))
    redo_checksums(folder, layer)


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """A safetensors header and where the data starts."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), 8 + length


def edit_header(path: Path, edit: Callable[[dict], object]) -> None:
    """Change a header; of the same length, if blanks at its end allow it."""
    header, start = read_header(path)
    data = path.read_bytes()[start:]
    edit(header)
    text = json.dumps(header, separators=(",", ":")).encode().ljust(start - 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
