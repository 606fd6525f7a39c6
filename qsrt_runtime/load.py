"""load_package: from a sealed directory to layers ready to run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qsrt_runtime.format import manifest as manifests
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.format.package import (
    Package,
    check_base,
    open_package,
    read_evidence,
    read_package_layer,
)
from qsrt_runtime.weights import LayerWeights


@dataclass(frozen=True)
class LoadedPackage:
    """A package in memory.

    path: its folder.   config: the model's config.json.   geometry: sizes of every layer's
    experts.   topk: experts a token goes to.   layers: by layer index of the checkpoint.
    seal_sha256: the digest that binds every byte of the package.
    """

    path: Path
    config: dict[str, Any]
    geometry: Geometry
    topk: int
    layers: dict[int, LayerWeights]
    seal_sha256: str


def load_package(path: str | Path) -> LoadedPackage:
    """Load the packed experts of a local package.

    The seal, every document, and every byte of the layer files are checked first; FormatError
    names the file and the field that is wrong. The base shards are checked by name and header,
    not read.
    """
    package = open_package(Path(path))
    check_base(package)
    layers = {layer: _load_layer(package, layer) for layer in package.layers}
    return LoadedPackage(
        path=package.path,
        config=package.documents.config,
        geometry=package.geometry,
        topk=package.documents.manifest["geometry"]["topk"],
        layers=layers,
        seal_sha256=package.seal_sha256,
    )


def _load_layer(package: Package, layer: int) -> LayerWeights:
    evidence = read_evidence(package, layer)
    stored = read_package_layer(package, layer)
    if package.documents.is_ours:
        manifests.check_evidence_modes(
            evidence, stored, package.encoder_settings, package.evidence_name(layer)
        )
    hidden_act = package.documents.config.get("hidden_act")
    return LayerWeights(
        stored=stored,
        activations=tuple(manifests.activations(package.documents.manifest, hidden_act, layer)),
        situ_beta=manifests.SITU_BETA,
        situ_linear_beta=manifests.SITU_LINEAR_BETA,
    )
