"""Open, seal and check a whole package directory."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qsrt_runtime.format import manifest as manifests
from qsrt_runtime.format import paths, schema
from qsrt_runtime.format.container import Layer, read_layer
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.evidence import check_evidence, check_evidence_experts
from qsrt_runtime.format.geometry import Geometry, TrueSizes
from qsrt_runtime.format.manifest import (
    CHECKSUMS,
    CONFIG,
    INDEX,
    MANIFEST,
    MARKER,
    OF_PUSH,
    REQUIRED_FILES,
    Documents,
)
from qsrt_runtime.format.tensorfile import read_header


@dataclass(frozen=True)
class Package:
    """A sealed directory whose documents agree; its large files are not read yet.

    digests: SHA-256 of every listed file by relative name.   seal_sha256: of QSRT_COMPLETE.json,
    the one digest to quote, since it binds all others.
    """

    path: Path
    documents: Documents
    digests: dict[str, str]
    seal_sha256: str

    @property
    def geometry(self) -> Geometry:
        return manifests.geometry_of(self.documents.manifest)

    @property
    def true_sizes(self) -> TrueSizes:
        return manifests.true_sizes_of(self.documents.manifest)

    @property
    def layers(self) -> list[int]:
        return manifests.layers_of(self.documents.manifest)

    @property
    def encoder_settings(self) -> dict[str, Any]:
        """What decided the bytes of the layer files; stated by our own packages."""
        return self.documents.manifest["producer"]["encoder"]["settings"]

    @property
    def side_files(self) -> list[str]:
        """Listed files that are neither weights nor of the format, nor written for the Hub."""
        own = {MANIFEST, CONFIG, INDEX, *OF_PUSH}
        own |= {self.layer_name(n) for n in self.layers}
        own |= {self.evidence_name(n) for n in self.layers}
        own |= set(self.documents.index["weight_map"].values())
        return sorted(set(self.digests) - own)

    def layer_name(self, layer: int) -> str:
        """The listed name of a layer file."""
        return self.documents.manifest["layers"][str(layer)]["qsrt_atoms"]

    def evidence_name(self, layer: int) -> str:
        """The listed name of an evidence file."""
        return self.documents.manifest["layers"][str(layer)]["evidence"]


def open_package(path: Path) -> Package:
    """Open a package: seal, file list, documents and their agreement.

    Checks the digest of every JSON document, and that the files are exactly the listed ones;
    the digests of large files are checked when they are read (`read_package_layer`,
    `verify_file`). Raises FormatError naming the file and the field.
    """
    if path.is_symlink():
        raise FormatError(f"{path} is not a folder but a link; name the folder itself")
    if not path.is_dir():
        raise FormatError(f"{path} is not a folder")
    found = paths.files_below(path)
    if MARKER not in found:
        raise FormatError(
            f"{path} has no {MARKER}: it is not a package, or one that was not finished"
        )
    for name in found:
        paths.regular_file(path / name, path)
    marker = schema.read(path / MARKER, "complete")
    digests = _read_checksums(path, marker["checksum_manifest_sha256"])
    _check_listing(path, set(found), set(digests))
    for name, stated in (
        (MANIFEST, marker["package_manifest_sha256"]),
        (INDEX, marker["model_index_sha256"]),
    ):
        if digests[name] != stated:
            raise FormatError(f"{path / MARKER}: its digest of {name} is not the one listed")
    documents = _read_documents(path, digests, marker)
    manifests.check_documents(documents, str(path))
    if documents.is_ours:
        _check_own_files(path, documents, digests)
    package = Package(path, documents, digests, paths.sha256_file(path / MARKER))
    _check_layer_entries(package)
    return package


def verify_file(package: Package, name: str) -> None:
    """Refuse a listed file whose bytes do not have the listed digest."""
    _check_digest(package, name, paths.sha256_file(package.path / name))


def verify_files(
    package: Package, names: Iterable[str], advance: Callable[[int], None] | None = None
) -> None:
    """Refuse the first of these listed files whose bytes do not have the listed digest.

    advance is called with the bytes read since last time, from several threads.
    """
    for name, found in paths.sha256_files(package.path, names, advance).items():
        _check_digest(package, name, found)


def _check_digest(package: Package, name: str, found: str) -> None:
    if found != package.digests[name]:
        raise FormatError(
            f"{package.path / name} is damaged: SHA-256 {found}, {CHECKSUMS} says "
            f"{package.digests[name]}; copy it again"
        )


def read_package_layer(package: Package, layer: int) -> Layer:
    """Read one layer file whose bytes are the sealed ones and whose header fits the manifest."""
    verify_file(package, package.layer_name(layer))
    path = package.path / package.layer_name(layer)
    content = read_layer(path)
    manifests.check_layer(content, layer, package.documents, str(path))
    return content


def read_evidence(package: Package, layer: int) -> dict[str, Any]:
    """Read one evidence file and check it against the manifest."""
    verify_file(package, package.evidence_name(layer))
    path = package.path / package.evidence_name(layer)
    kind = "evidence" if package.documents.is_ours else "published-evidence"
    evidence = schema.read(path, kind)
    check_evidence(evidence, layer, package.documents, str(path))
    return evidence


def read_checked_layer(
    package: Package, number: int, slots: range | None = None
) -> tuple[Layer, dict[str, Any]]:
    """A layer file, whole or a run of its slots, and its evidence, which fit each other.

    The evidence is verified by digest, the layer file is not.
    """
    path = package.path / package.layer_name(number)
    layer = read_layer(path, slots)
    manifests.check_layer(layer, number, package.documents, str(path))
    evidence = read_evidence(package, number)
    if package.documents.is_ours:
        manifest, name = package.documents.manifest, package.evidence_name(number)
        check_evidence_experts(evidence, layer, manifest, name)
    return layer, evidence


def check_base(package: Package) -> None:
    """Refuse an index that does not place every tensor of every base shard, or not their size."""
    weight_map = package.documents.index["weight_map"]
    where = package.path / INDEX
    size = 0
    for name in sorted(set(weight_map.values())):
        if name not in package.digests:
            raise FormatError(f"{where}: shard {name} is not in the package")
        header = read_header(package.path / name)
        listed = {tensor for tensor, shard in weight_map.items() if shard == name}
        for tensor in sorted(listed ^ set(header.tensors)):
            here, there = (name, INDEX) if tensor in listed else (INDEX, name)
            raise FormatError(f"{where}: tensor {tensor} is in {there} but not in {here}")
        size += sum(entry.end - entry.start for entry in header.tensors.values())
    stated = package.documents.index.get("metadata", {}).get("total_size", size)
    if package.documents.is_ours and stated != size:
        raise FormatError(f"{where}: metadata.total_size is {stated}, the tensors take {size}")


def seal(folder: Path, known: dict[str, str] | None = None) -> None:
    """Write MANIFEST.sha256 and, last, the marker of a folder whose documents are in place.

    known: digests of files that need not be read for them.
    """
    manifest = schema.read(folder / MANIFEST)
    names = [n for n in paths.files_below(folder) if n not in (CHECKSUMS, MARKER)]
    known = known or {}
    digests = known | paths.sha256_files(folder, [n for n in names if n not in known])
    listing = "".join(f"{digests[name]}  {name}\n" for name in sorted(names))
    paths.write_file(folder / CHECKSUMS, listing.encode())
    marker = {
        "schema": "kquant_qsrt_complete_v2",
        "package_manifest_sha256": digests[MANIFEST],
        "checksum_manifest_sha256": paths.sha256_file(folder / CHECKSUMS),
        "model_index_sha256": digests[INDEX],
        "source": {
            "kind": manifest["source"]["source_kind"],
            "sha256": manifest["source"]["source_sha256"],
        },
        "base_manifest_sha256": manifest["base_model"]["manifest_sha256"],
        "producer_fingerprint": manifest["producer"]["fingerprint"],
        "encoder_fingerprint": manifest["producer"]["encoder"]["fingerprint"],
    }
    schema.check(marker, "complete", str(folder / MARKER))
    manifests.check_documents(_read_documents(folder, digests, marker), str(folder))
    paths.write_file(folder / MARKER, schema.dump(marker))


def _read_checksums(path: Path, expected: str) -> dict[str, str]:
    where = path / CHECKSUMS
    paths.regular_file(where, path)
    data = paths.read_document(where)
    if hashlib.sha256(data).hexdigest() != expected:
        raise FormatError(f"{where} is damaged: its SHA-256 is not the one in {MARKER}")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise FormatError(f"{where} is not UTF-8 text") from None
    digests: dict[str, str] = {}
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        digest, separator, name = line.partition("  ")
        if len(digest) != 64 or set(digest) - set("0123456789abcdef") or not separator:
            raise FormatError(f"{where}: line {number} is not `<64 hex>  <name>`")
        relative_name = paths.relative_name(name, f"{where}: line {number}")
        if relative_name in digests or relative_name in (CHECKSUMS, MARKER):
            raise FormatError(f"{where}: line {number} must not list {relative_name} (again)")
        digests[relative_name] = digest
    for name in REQUIRED_FILES:
        if name not in digests:
            raise FormatError(f"{where} does not list {name}")
    return digests


def _check_listing(path: Path, found: set[str], listed: set[str]) -> None:
    missing, extra = listed - found, found - listed - {CHECKSUMS, MARKER}
    if missing:
        raise FormatError(f"{path / min(missing)} is missing, {CHECKSUMS} lists it")
    if extra:
        raise FormatError(f"{path / min(extra)} is not in {CHECKSUMS}")


def _read_documents(path: Path, digests: dict[str, str], marker: dict[str, Any]) -> Documents:
    for name in REQUIRED_FILES:
        if paths.sha256_file(path / name) != digests[name]:
            raise FormatError(f"{path / name} is damaged: its SHA-256 is not the listed one")
    manifest = schema.read(path / MANIFEST)
    prefix = "" if manifests.is_ours(manifest) else "published-"
    schema.check(manifest, f"{prefix}manifest", str(path / MANIFEST))
    config = schema.read(path / CONFIG)
    where = f"{path / CONFIG}: quantization_config"
    if not isinstance(config, dict) or "quantization_config" not in config:
        raise FormatError(f"{where} is missing")
    schema.check(config["quantization_config"], f"{prefix}descriptor", where)
    schema.require_json(config, str(path / CONFIG))
    return Documents(config, manifest, marker, schema.read(path / INDEX, f"{prefix}index"))


def _check_own_files(path: Path, documents: Documents, digests: dict[str, str]) -> None:
    """Our packages hold no weights but base shards and layer files, each bound by its digest."""
    shards = set(documents.index["weight_map"].values())
    entries = documents.manifest["layers"].values()
    layers = {entry[field] for entry in entries for field in ("qsrt_atoms", "evidence")}
    if shards & layers:
        raise FormatError(f"{path / INDEX}: {min(shards & layers)} is a layer file, not a shard")
    for name in sorted(set(digests) - shards - layers):
        if paths.WEIGHTS_OR_CODE.search(name) or name.startswith("qsrt-layer-"):
            raise FormatError(f"{path / name} is neither a layer file nor in {INDEX}")
    base = {name: digests.get(name) for name in {INDEX, *shards}}
    if schema.digest(base) != documents.manifest["base_model"]["manifest_sha256"]:
        raise FormatError(
            f"{path / MANIFEST}: base_model.manifest_sha256 is not that of {INDEX} and its shards"
        )


def _check_layer_entries(package: Package) -> None:
    """Each layer's two files are listed, with the size and digest that the manifest states."""
    for key, entry in package.documents.manifest["layers"].items():
        where = f"{package.path / MANIFEST}: layers.{key}"
        for field in ("qsrt_atoms", "evidence"):
            if entry[field] not in package.digests:
                raise FormatError(f"{where}.{field}: {entry[field]} is not in {CHECKSUMS}")
        if package.digests[entry["qsrt_atoms"]] != entry["sha256"]:
            raise FormatError(f"{where}.sha256 is not the one in {CHECKSUMS}")
        size = (package.path / entry["qsrt_atoms"]).stat().st_size
        if size != entry["bytes"]:
            raise FormatError(
                f"{package.path / entry['qsrt_atoms']} has {size} bytes, in {MANIFEST} "
                f"layers.{key}.bytes is {entry['bytes']}; copy it again"
            )
