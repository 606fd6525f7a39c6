"""Fixtures of the format's tests: a tiny layer file, and everything that reads a package."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import edit_json

from qsrt_runtime.format import atom, container, paths
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.format.package import (
    Package,
    check_base,
    open_package,
    read_evidence,
    read_package_layer,
    verify_file,
)

TINY = Geometry(hidden=128, intermediate=256, experts=2)  # 8 slots of 12,288 bytes
CHECKSUMS, MARKER = "MANIFEST.sha256", "QSRT_COMPLETE.json"


@pytest.fixture(scope="session")
def tiny_experts(random_expert: Callable[..., atom.Expert]) -> list[atom.Expert]:
    return [random_expert(TINY, 0, 1, seed=0), random_expert(TINY, 1, 0, seed=1)]


@pytest.fixture(scope="session")
def tiny_layer(tiny_experts: list[atom.Expert], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a good layer file, layer 3, of these two experts."""
    path = tmp_path_factory.mktemp("layer") / "layer.safetensors"
    with container.LayerWriter(path, TINY, 3, "5" * 64, "e" * 64) as writer:
        for expert, coded in enumerate(tiny_experts):
            writer.write_expert(expert, coded)
    return path.read_bytes()


@pytest.fixture
def damaged_layer(tiny_layer: bytes, tmp_path: Path) -> Callable[..., Path]:
    """damaged_layer(edit, flips): the tiny layer file, its header edited and bytes replaced.

    edit changes the header in place; flips: {(tensor, byte offset): value}.
    """

    def build(
        edit: Callable[[dict], object] = lambda header: None,
        flips: dict[tuple[str, int], int] | None = None,
    ) -> Path:
        length = int.from_bytes(tiny_layer[:8], "little")
        header, data = json.loads(tiny_layer[8 : 8 + length]), bytearray(tiny_layer[8 + length :])
        for (name, offset), value in (flips or {}).items():
            start, end = header[name]["data_offsets"]
            data[start + offset if offset >= 0 else end + offset] = value
        edit(header)
        text = json.dumps(header).encode()
        path = tmp_path / "damaged.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        return path

    return build


def _read_all(folder: Path) -> Package:
    package = open_package(folder)
    check_base(package)
    for layer in package.layers:
        read_evidence(package, layer)
        read_package_layer(package, layer)
    for name in package.digests:
        verify_file(package, name)
    return package


@pytest.fixture(scope="session")
def read_all() -> Callable[[Path], Package]:
    """read_all(folder): all that a package's readers check, then every listed file's digest."""
    return _read_all


@pytest.fixture(scope="session")
def refused() -> Callable[..., None]:
    """refused(folder, *parts): one of those checks fails and says each part."""

    def check(folder: Path, *parts: str) -> None:
        with pytest.raises(FormatError) as caught:
            _read_all(folder)
        for part in parts:
            assert part in str(caught.value)

    return check


@pytest.fixture(scope="session")
def relist() -> Callable[[Path, Callable[[str], str]], None]:
    """relist(folder, edit): edit the text of MANIFEST.sha256, redo the marker's digest of it."""

    def apply(folder: Path, edit: Callable[[str], str]) -> None:
        path = folder / CHECKSUMS
        path.write_bytes(edit(path.read_text()).encode("utf-8", "surrogateescape"))
        digest = paths.sha256_file(path)
        edit_json(folder / MARKER, lambda marker: marker.update(checksum_manifest_sha256=digest))

    return apply
