"""Fixtures of the runtime's tests: coded experts from random words, seals redone, a Hub cache."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qsrt_runtime.format import schema
from qsrt_runtime.format.atom import Expert, Matrix
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.format.rates import stored_bits

MANIFEST, INDEX = "qsrt-manifest.json", "model.safetensors.index.json"
CHECKSUMS, MARKER = "MANIFEST.sha256", "QSRT_COMPLETE.json"


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _random_expert(geometry: Geometry, mode13: int, mode2: int, seed: int = 0) -> Expert:
    generator = torch.Generator().manual_seed(seed)

    def records(mode: int) -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.randint(
                -(1 << 15),
                1 << 15,
                (8, geometry.hidden_tiles, 16 * bits),
                dtype=torch.int16,
                generator=generator,
            )
            for bits in stored_bits(mode, geometry.records)
        )

    def vector(count: int) -> torch.Tensor:
        return torch.randn(count, generator=generator).to(torch.float16)

    hidden, intermediate = geometry.hidden, geometry.intermediate
    return Expert(
        w1=Matrix(records(mode13), vector(hidden), vector(intermediate)),
        w3=Matrix(records(mode13), vector(hidden), vector(intermediate)),
        w2=Matrix(records(mode2), vector(intermediate), vector(hidden)),
        mode13=mode13,
        mode2=mode2,
    )


def _reseal(folder: Path) -> None:
    manifest_path = folder / MANIFEST
    manifest = json.loads(manifest_path.read_bytes())
    for entry in manifest["layers"].values():
        path = folder / str(entry["qsrt_atoms"])
        if path.is_file():
            entry["sha256"], entry["bytes"] = _sha256(path), path.stat().st_size
    base = {INDEX: _sha256(folder / INDEX)}
    for name in json.loads((folder / INDEX).read_bytes())["weight_map"].values():
        base[name] = _sha256(folder / name) if (folder / name).is_file() else None
    manifest["base_model"]["manifest_sha256"] = schema.digest(base)
    manifest_path.write_text(json.dumps(manifest))
    _reseal_listing(folder, same_base=True)


def _reseal_listing(folder: Path, same_base: bool = False) -> None:
    names = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
    names = sorted(set(names) - {CHECKSUMS, MARKER})
    (folder / CHECKSUMS).write_text("".join(f"{_sha256(folder / n)}  {n}\n" for n in names))
    marker = json.loads((folder / MARKER).read_bytes())
    marker["checksum_manifest_sha256"] = _sha256(folder / CHECKSUMS)
    marker["package_manifest_sha256"] = _sha256(folder / MANIFEST)
    manifest = json.loads((folder / MANIFEST).read_bytes())
    if same_base:
        marker["base_manifest_sha256"] = manifest["base_model"]["manifest_sha256"]
    marker["model_index_sha256"] = _sha256(folder / INDEX)
    (folder / MARKER).write_text(json.dumps(marker))


@pytest.fixture(scope="session")
def random_expert() -> Callable[..., Expert]:
    """random_expert(geometry, mode13, mode2, seed=0): every word and scale drawn."""
    return _random_expert


@pytest.fixture(scope="session")
def reseal_listing() -> Callable[[Path], None]:
    """reseal_listing(folder): redo MANIFEST.sha256 and the marker's three digests, unchecked."""
    return _reseal_listing


@pytest.fixture(scope="session")
def reseal() -> Callable[[Path], None]:
    """reseal(folder): sizes and digests of layer files and base in the manifest too."""
    return _reseal


@pytest.fixture
def publication(golden: Path, tmp_path: Path) -> Path:
    """A copy of the golden publication to damage."""
    return shutil.copytree(golden / "publication", tmp_path / "publication")


@pytest.fixture
def hub_snapshot(tmp_path: Path) -> Callable[[Path], Path]:
    """hub_snapshot(folder): the folder as a Hub cache holds it, every file a link into blobs."""

    def build(folder: Path) -> Path:
        cache = tmp_path / "models--owner--name"
        snapshot, blobs = cache / "snapshots" / ("0123abcd" * 5), cache / "blobs"
        blobs.mkdir(parents=True)
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            link = snapshot / path.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, blobs / _sha256(path))
            link.symlink_to(os.path.relpath(blobs / _sha256(path), link.parent))
        return snapshot

    return build
