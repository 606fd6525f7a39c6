"""Everything that can be said of a package without its source."""

from pathlib import Path
from typing import Any

import torch

from qsrt_pack.progress import bar
from qsrt_runtime.format import decode, schema
from qsrt_runtime.format import manifest as manifests
from qsrt_runtime.format.container import Layer, read_layer, unpack_expert
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.package import (
    Package,
    check_base,
    open_package,
    read_evidence,
    verify_file,
)


def validate(path: Path, *, deep: bool = False, show_progress: bool = True) -> dict[str, Any]:
    """Check a package whole and return its report; FormatError names the first thing wrong.

    Schemas, cross-field rules, every checksum, structure, padding, finite scales; deep: also
    decodes every expert and refuses values that are not finite.
    """
    package = open_package(path)
    sizes = {name: (path / name).stat().st_size for name in package.digests}
    with bar("checksums", sum(sizes.values()), "B", show_progress) as advance:
        for name in package.digests:
            verify_file(package, name, advance)
    check_base(package)
    geometry = package.geometry
    with bar("layers", len(package.layers) * geometry.experts, "experts", show_progress) as advance:
        for number in package.layers:
            layer = _check_layer(package, number)
            if deep:
                _decode_layer(layer, path / package.layer_name(number), advance)
    experts = len(package.layers) * geometry.experts
    report = {
        "schema": "qsrt_report_v1",
        "kind": "validate",
        "package": str(path),
        "seal_sha256": package.seal_sha256,
        "deep": deep,
        "files": len(package.digests),
        "bytes": sum(sizes.values()),
        "layers": len(package.layers),
        "experts": experts,
        "expert_weights": experts * geometry.weights_per_expert,
        "bits_per_expert_weight": bits_per_expert_weight(package),
    }
    schema.check(report, "report", "report")
    return report


def bits_per_expert_weight(package: Package) -> float:
    """Bits of the layer files, scales, padding and headers included, for each expert weight."""
    entries = package.documents.manifest["layers"].values()
    weights = package.geometry.weights_per_expert * package.geometry.experts * len(entries)
    return 8 * sum(entry["bytes"] for entry in entries) / weights


def _check_layer(package: Package, number: int) -> Layer:
    path = package.path / package.layer_name(number)
    layer = read_layer(path)  # its checksum has been verified
    manifests.check_layer(layer, number, package.documents, str(path))
    evidence = read_evidence(package, number)
    if package.documents.is_ours:
        manifests.check_evidence_modes(evidence, layer, package.evidence_name(number))
    return layer


def _decode_layer(layer: Layer, path: Path, advance: Any) -> None:
    for expert in range(layer.geometry.experts):
        for matrix, weight in decode.dense_expert(unpack_expert(layer, expert)).items():
            if not torch.isfinite(weight).all():
                raise FormatError(f"{path}: expert {expert} {matrix} decodes to non-finite values")
        advance(1)
