"""PK-3: a good package, one field of its manifest changed and every checksum redone."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from packages import write_package

from qsrt_pack.validate import validate
from qsrt_runtime import load_package
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import TrueSizes


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def forge(package: Path, text: str) -> None:
    """Write the manifest and redo the list of checksums and the marker's digests."""
    (package / "qsrt-manifest.json").write_text(text)
    marker = package / "QSRT_COMPLETE.json"
    listing = package / "MANIFEST.sha256"
    files = [path for path in sorted(package.iterdir()) if path not in (marker, listing)]
    listing.write_text("".join(f"{sha256(path)}  {path.name}\n" for path in files))
    value = json.loads(marker.read_text())
    value["package_manifest_sha256"] = sha256(package / "qsrt-manifest.json")
    value["checksum_manifest_sha256"] = sha256(listing)
    marker.write_text(json.dumps(value))


def refuse(package: Path, message: str) -> None:
    for read in (lambda: validate(package, show_progress=False), lambda: load_package(package)):
        with pytest.raises(FormatError, match=message):
            read()


def put(*path: str, to: object) -> Callable[[dict], None]:
    def edit(manifest: dict) -> None:
        for key in path[:-1]:
            manifest = manifest[key]
        manifest[path[-1]] = to

    return edit


def test_redone_checksums_alone_are_accepted(package: Path) -> None:
    forge(package, (package / "qsrt-manifest.json").read_text() + "\n")
    validate(package, show_progress=False)
    load_package(package)


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        (put("geometry", "experts_per_layer", to=5), "experts_per_layer|expert_count"),
        (put("layers", "0", "expert_count", to=5), "layers.0.expert_count"),
        (put("geometry", "intermediate_size", to=512), "intermediate|slots"),
        (put("geometry", "hidden_size", to=256), "hidden|layers.0.bytes"),
        (put("geometry", "atom_slots", to=16), "atom_slots"),
        (put("geometry", "atoms_per_expert", to=96), "atoms_per_expert"),
        (put("geometry", "layers", to=[0, 0]), "geometry.layers"),
        (put("geometry", "layers", to=[0, 2]), "geometry.layers"),
        (put("layers", "0", "bytes", to=4096), "bytes"),
        (put("layers", "0", "sha256", to=64 * "0"), "layers.0.sha256"),
        (put("layers", "1", "qsrt_atoms", to="qsrt-layer-000.safetensors"), "layers.1"),
        (put("layers", "0", "activation", "default", to="gelu"), "activation"),
        (put("layers", "0", "activation", "experts", to={"7": "situ"}), "activation"),
        (put("geometry", "true_hidden_size", to=4096), "true_hidden_size"),
        (put("producer", "encoder", "settings", "modes", to="all"), "fingerprint"),
        (put("codebook", to="other"), "codebook"),
        (put("version", to=2), "version"),
        (put("surprise", to=1), "surprise"),
        (lambda manifest: manifest.pop("geometry"), "geometry"),
    ],
)
def test_pk_3a_a_changed_field_is_named(
    package: Path, edit: Callable[[dict], object], field: str
) -> None:
    manifest = json.loads((package / "qsrt-manifest.json").read_text())
    edit(manifest)
    forge(package, json.dumps(manifest))
    refuse(package, field)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"true_hidden_size": 129}, "true_hidden_size is 129, which is stored as 256"),
        ({"true_intermediate_size": 257}, "true_intermediate_size is 257, which is stored as 512"),
        ({"true_hidden_size": 128, "true_intermediate_size": 256}, "though nothing is padded"),
        ({"true_hidden_size": 95}, "hidden_size is 96"),
        ({"true_intermediate_size": 199}, "moe_intermediate_size is 200"),
        ({"true_intermediate_size": None}, "true_intermediate_size"),
        ({"true_hidden_size": 0}, "true_hidden_size"),
        ({"true_hidden_size": None, "true_intermediate_size": None}, "hidden_size is 96"),
    ],
)
def test_pk_3a_true_sizes(tmp_path: Path, changes: dict, message: str) -> None:
    sizes = TrueSizes(96, 200)
    folder = write_package(tmp_path / "p", sizes.padded(2), true_sizes=sizes)
    value = json.loads((folder / "qsrt-manifest.json").read_text())
    fields = {**value["geometry"], **changes}
    value["geometry"] = {key: item for key, item in fields.items() if item is not None}
    forge(folder, json.dumps(value))
    refuse(folder, message)


@pytest.mark.parametrize("number", ["-1", "1e999", "1.5", '"4"', "true", str(2**63), "NaN"])
@pytest.mark.parametrize("field", ["experts_per_layer", "hidden_size", "topk"])
def test_pk_3b_numbers_that_are_none(package: Path, number: str, field: str) -> None:
    manifest = json.loads((package / "qsrt-manifest.json").read_text())
    manifest["geometry"][field] = "NUMBER"
    forge(package, json.dumps(manifest).replace('"NUMBER"', number))
    refuse(package, field)


def test_pk_3b_nested_too_deep(package: Path) -> None:
    forge(package, '{"a":' * 10_000 + "1" + "}" * 10_000)
    refuse(package, "nested too deep")
