"""Everything that validate says of a package, and every damage that it names."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import checkpoints
import pytest

from qsrt_pack.validate import validate
from qsrt_runtime import load_package
from qsrt_runtime.format import paths, schema
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.format.package import seal
from qsrt_runtime.format.tensorfile import read_header

GEOMETRY = Geometry(checkpoints.HIDDEN, checkpoints.INTERMEDIATE, checkpoints.EXPERTS)
LAYER_0, LAYER_1 = "qsrt-layer-000.safetensors", "qsrt-layer-001.safetensors"
SHARD = "model-00001-of-00001.safetensors"
ALL_FILES = (
    *(".gitattributes", "MANIFEST.sha256", "QSRT_COMPLETE.json", "config.json", SHARD),
    *("generation_config.json", "model.safetensors.index.json", "qsrt-manifest.json"),
    *("qsrt-layer-000.json", "qsrt-layer-001.json", LAYER_0, LAYER_1),
)
# A loader reads no side file and no base tensor: those are the model's own.
NOT_LOADED = (".gitattributes", "generation_config.json", SHARD)


def run(package: Path, deep: bool = False) -> dict:
    return validate(package, deep=deep, show_progress=False)


def refused(package: Path, message: str, *, loader: bool = True) -> None:
    """By validate, and by the loader unless told."""
    with pytest.raises(FormatError, match=message):
        run(package)
    if loader:
        with pytest.raises(FormatError, match=message):
            load_package(package)


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def redo_checksums(package: Path, layer: int) -> None:
    """As one who damages a layer file on purpose would."""
    file = package / f"qsrt-layer-{layer:03d}.safetensors"
    facts = {"bytes": file.stat().st_size, "sha256": paths.sha256_file(file)}
    manifest, evidence = package / "qsrt-manifest.json", file.with_suffix(".json")
    checkpoints.edit_json(manifest, lambda value: value["layers"][str(layer)].update(facts))
    stated = {f"safetensors_{key}": value for key, value in facts.items()}
    checkpoints.edit_json(evidence, lambda value: value.update(stated))
    seal(package)


def overwrite(file: Path, tensor: str, offset: int, data: bytes) -> None:
    """Write into a tensor of a safetensors file."""
    entry = read_header(file).tensors[tensor]
    with file.open("r+b") as stream:
        stream.seek(entry.start + offset)
        stream.write(data)


@pytest.mark.parametrize("deep", [False, True])
def test_a_good_package_is_valid(clean_package: Path, deep: bool) -> None:
    report = run(clean_package, deep)
    schema.check(report, "report", "report")
    listed = [name for name in ALL_FILES if name not in ("MANIFEST.sha256", "QSRT_COMPLETE.json")]
    layer_bytes = sum((clean_package / name).stat().st_size for name in (LAYER_0, LAYER_1))
    assert report == {
        "schema": "qsrt_report_v1",
        "kind": "validate",
        "package": str(clean_package),
        "seal_sha256": paths.sha256_file(clean_package / "QSRT_COMPLETE.json"),
        "deep": deep,
        "files": len(listed),
        "bytes": sum((clean_package / name).stat().st_size for name in listed),
        "layers": 2,
        "experts": 8,
        "expert_weights": 8 * 3 * 128 * 256,
        "bits_per_expert_weight": 8 * layer_bytes / (8 * 3 * 128 * 256),
    }


def test_redone_checksums_alone_are_valid(package: Path) -> None:
    redo_checksums(package, 1)
    run(package, deep=True)
    load_package(package)


def test_a_published_package_is_valid(golden: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(golden / "publication", tmp_path / "publication")
    report = run(folder, deep=True)
    assert report["layers"] == 1
    flip(folder / "qsrt-layer-005.safetensors", -5000)
    refused(folder, r"qsrt-layer-005\.safetensors is damaged")


@pytest.mark.parametrize("name", ALL_FILES)
@pytest.mark.parametrize("place", ["start", "middle", "end"])
def test_pk_5_a_flipped_bit_is_found_in_every_file(package: Path, name: str, place: str) -> None:
    size = (package / name).stat().st_size
    flip(package / name, {"start": 0, "middle": size // 2, "end": size - 1}[place], bit=1)
    refused(package, name.removesuffix(".json"), loader=name not in NOT_LOADED)


def test_pk_5_no_byte_of_the_marker_is_free(package: Path) -> None:
    marker = package / "QSRT_COMPLETE.json"
    data = marker.read_bytes()
    for position in range(0, len(data), 7):
        for bit in (0, 5):
            flip(marker, position, bit)
            with pytest.raises(FormatError):
                load_package(package)
            marker.write_bytes(data)
    load_package(package)


def test_pk_5_swapped_layers(package: Path) -> None:
    spare = package.parent / "spare"
    (package / LAYER_0).rename(spare)
    (package / LAYER_1).rename(package / LAYER_0)
    spare.rename(package / LAYER_1)
    refused(package, f"{LAYER_0} is damaged")
    redo_checksums(package, 0)
    redo_checksums(package, 1)
    refused(package, f"{LAYER_0}: layer is 1, qsrt-manifest.json says 0")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda lines: lines[1:], "is not in MANIFEST.sha256"),
        (lambda lines: [*lines, lines[0]], "must not list"),
        (lambda lines: [lines[0][1:], *lines[1:]], "line 1 is not `<64 hex>"),
        (lambda lines: [lines[0].upper(), *lines[1:]], "line 1 is not `<64 hex>"),
        (lambda lines: [*lines, f"{'0' * 64}  missing.json"], "missing.json is missing"),
        (lambda lines: [*lines, f"{'0' * 64}  ../x"], "is not a plain relative path"),
        (lambda lines: [*lines, f"{'0' * 64}  QSRT_COMPLETE.json"], "must not list"),
        (lambda lines: [n for n in lines if "config.json" not in n], "does not list config.json"),
    ],
)
def test_pk_5_a_list_of_checksums_that_is_wrong(
    package: Path, edit: Callable[[list[str]], list[str]], message: str
) -> None:
    listing = package / "MANIFEST.sha256"
    listing.write_text("".join(f"{n}\n" for n in edit(listing.read_text().splitlines())))
    refused(package, r"MANIFEST\.sha256 is damaged")
    digest = {"checksum_manifest_sha256": paths.sha256_file(listing)}
    checkpoints.edit_json(package / "QSRT_COMPLETE.json", lambda value: value.update(digest))
    refused(package, message)


@pytest.mark.parametrize("name", ALL_FILES)
def test_pk_4d_a_missing_file_is_named(package: Path, name: str) -> None:
    (package / name).unlink()
    refused(package, f"{name}.*(missing|not a package)|has no {name}")


def test_pk_4d_an_empty_or_extra_file_is_named(package: Path) -> None:
    (package / "notes.txt").write_text("")
    refused(package, r"notes\.txt is not in MANIFEST\.sha256")
    (package / "notes.txt").unlink()
    (package / LAYER_1).write_bytes(b"")
    refused(package, r"(has 0 bytes.*layers\.1\.bytes|layers\.1\.bytes.*the file has 0)")


def test_a_folder_that_is_no_package(clean_checkpoint: Path, package: Path) -> None:
    refused(package.parent / "none", "is not a folder")
    refused(clean_checkpoint, r"has no QSRT_COMPLETE\.json")
    link = package.parent / "link"
    link.symlink_to(package)
    refused(link, "is not a folder but a link")


NAN, INFINITY = b"\x00\x7e", b"\x00\x7c"  # float16, little-endian
TRELLIS_BYTES = 3 * GEOMETRY.trellis_bytes


@pytest.mark.parametrize("value", [NAN, INFINITY])
@pytest.mark.parametrize(
    ("tensor", "offset"),
    [
        ("_qsrt_shared_scale_section", 0),
        ("_qsrt_shared_scale_section", 2 * (3 * 4 * 128 - 1)),
        ("qsrt_atoms", TRELLIS_BYTES),
        ("qsrt_atoms", GEOMETRY.bundle_bytes * 4 - 2),
        ("qsrt_atoms", 7 * GEOMETRY.slot_stride(4) + TRELLIS_BYTES + 64),
    ],
)
def test_qn_5c_a_scale_that_is_not_finite(
    package: Path, tensor: str, offset: int, value: bytes
) -> None:
    overwrite(package / LAYER_1, tensor, offset, value)
    redo_checksums(package, 1)
    refused(package, f"{LAYER_1}: {tensor} holds a .*scale that is not finite")


@pytest.mark.parametrize(
    ("tensor", "offset", "data", "message"),
    [
        ("_qsrt_format_section", 2, b"\x20", "expert 2: rate mode R2 needs 4 records"),
        ("_qsrt_format_section", 2, b"\x30", "expert 2: format byte 0x30"),
        ("_qsrt_format_section", 2, b"\xff", "X4T"),
        ("_qsrt_format_section", 4, b"\1", "padding that is not zero"),
        ("_qsrt_shared_scale_section", 2 * 3 * 4 * 128, b"\1", "padding that is not zero"),
        ("qsrt_atoms", GEOMETRY.bundle_bytes * 4, b"\1", "padding that is not zero"),
    ],
)
def test_sections_are_checked_though_checksums_fit(
    package: Path, tensor: str, offset: int, data: bytes, message: str
) -> None:
    overwrite(package / LAYER_1, tensor, offset, data)
    redo_checksums(package, 1)
    refused(package, message)


def test_evidence_modes_are_those_of_the_layer(package: Path) -> None:
    overwrite(package / LAYER_1, "_qsrt_format_section", 2, b"\x10")
    redo_checksums(package, 1)
    refused(package, r"qsrt-layer-001\.json: expert 2 is not R0")


@pytest.mark.parametrize(
    ("order", "message"),
    [("AAAA", "is no order of 64 groups"), ("%%%%", "low_to_high"), ("", "low_to_high")],
)
def test_evidence_holds_an_order_of_channels(package: Path, order: str, message: str) -> None:
    checkpoints.edit_json(
        package / "qsrt-layer-001.json",
        lambda value: value["experts"][3].update(low_to_high=order),
    )
    seal(package)
    refused(package, rf"qsrt-layer-001\.json.*{message}", loader=False)


def reseal_base(package: Path) -> None:
    """Seal again with the digest over index and base shards redone, as a forger would."""
    names = [p.name for p in package.glob("model*") if p.is_file()]
    digest = schema.digest({name: paths.sha256_file(package / name) for name in names})
    checkpoints.edit_json(
        package / "qsrt-manifest.json",
        lambda value: value["base_model"].update(manifest_sha256=digest),
    )
    seal(package)


def test_base_bytes_are_bound_by_the_manifest(package: Path) -> None:
    shard = package / "model-00001-of-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    seal(package)
    refused(package, "base_model.manifest_sha256 is not that of")


@pytest.mark.parametrize("name", ["model.safetensors", "sub/x.safetensors", "qsrt-layer-007.json"])
def test_weights_beside_the_packages_own_are_refused(package: Path, name: str) -> None:
    (package / name).parent.mkdir(exist_ok=True)
    (package / name).write_bytes(b"x")
    seal(package)
    refused(package, "is neither a layer file nor in")


def test_a_config_of_other_experts_is_refused(package: Path) -> None:
    checkpoints.edit_json(package / "config.json", lambda v: v.update(num_hidden_layers=3))
    seal(package)
    refused(package, r"layers with experts are \[0, 1, 2\], packed are \[0, 1\]", loader=False)


def test_an_index_that_does_not_fit_its_shards(package: Path) -> None:
    index = package / "model.safetensors.index.json"
    checkpoints.edit_json(index, lambda value: value["weight_map"].pop("lm_head.weight"))
    reseal_base(package)
    refused(package, "tensor lm_head.weight is in model-00001-of-00001.safetensors but not in")


def test_deep_decodes_every_expert(package: Path) -> None:
    run(package, deep=True)
    evidence = package / "qsrt-layer-001.json"
    checkpoints.edit_json(evidence, lambda v: v["experts"][1]["rms"].update(w3=0.06))
    seal(package)
    run(package)
    with pytest.raises(FormatError, match=rf"{LAYER_1}: expert 1 w3 decodes to a root mean square"):
        run(package, deep=True)


def test_the_report_quotes_the_seal(package: Path) -> None:
    before = run(package)["seal_sha256"]
    (package / "notes.txt").write_text("one more side file")
    seal(package)
    report = run(package)
    assert report["seal_sha256"] != before
    assert report["files"] == len(ALL_FILES) - 1
    assert json.loads(json.dumps(report)) == report
