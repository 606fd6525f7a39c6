"""Everything that can be said of a package without its source."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from qsrt_pack.encode.ordered import root_mean_square
from qsrt_pack.progress import bar
from qsrt_pack.source.models import packed_experts
from qsrt_runtime.format import decode, schema
from qsrt_runtime.format import manifest as manifests
from qsrt_runtime.format.container import Layer
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.package import (
    Package,
    check_base,
    open_package,
    read_checked_layer,
    verify_file,
)
from qsrt_runtime.format.slab import unpack_expert

_RMS_TOLERANCE = 1e-6


def validate(path: Path, *, deep: bool = False, show_progress: bool = True) -> dict[str, Any]:
    """Check a package whole and return its report; FormatError names the first thing wrong.

    Schemas, cross-field rules, every checksum, structure, padding, finite scales, and for a
    known architecture that config.json describes the packed experts; deep: also decodes every
    expert and compares the root mean square of each matrix with the recorded one.
    """
    package = open_package(path)
    sizes = {name: (path / name).stat().st_size for name in package.digests}
    with bar("checksums", sum(sizes.values()), "B", show_progress) as advance:
        for name in package.digests:
            verify_file(package, name, advance)
    check_base(package)
    if package.documents.is_ours:
        packed_experts(package.documents, str(path / manifests.CONFIG))
    geometry = package.geometry
    with bar("layers", len(package.layers) * geometry.experts, "experts", show_progress) as advance:
        for number in package.layers:
            layer, evidence = read_checked_layer(package, number)
            if deep:
                _decode_layer(layer, evidence, path / package.layer_name(number), advance)
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
        "expert_weights": experts * package.true_sizes.weights_per_expert,
        "bits_per_expert_weight": bits_per_expert_weight(package),
    }
    schema.check(report, "report", "report")
    return report


def bits_per_expert_weight(package: Package) -> float:
    """Bits of the layer files, scales, padding and headers included, for each source weight."""
    entries = package.documents.manifest["layers"].values()
    weights = package.true_sizes.weights_per_expert * package.geometry.experts * len(entries)
    return 8 * sum(entry["bytes"] for entry in entries) / weights


def _decode_layer(
    layer: Layer, evidence: dict[str, Any], path: Path, advance: Callable[[int], None]
) -> None:
    """Decode every expert. Packages made elsewhere record nothing to compare with."""
    recorded = {item["expert"]: item for item in evidence.get("experts", [])}
    for expert in range(layer.geometry.experts):
        decoded = decode.dense_expert(unpack_expert(layer, expert))
        item = recorded.get(expert, {"rms": {}, "zero_matrices": []})
        for matrix, expected in item["rms"].items():
            found = root_mean_square(decoded[matrix])
            zero = matrix in item["zero_matrices"]
            if not abs(found - expected) <= _RMS_TOLERANCE * expected or zero == (found > 0):
                raise FormatError(
                    f"{path}: expert {expert} {matrix} decodes to a root mean square of "
                    f"{found:.6g}, its evidence says {expected:.6g}{', all zero' * zero}"
                )
        advance(1)
