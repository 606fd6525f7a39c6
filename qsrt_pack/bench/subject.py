"""What is measured: layers of a package, or made ones, and what they decode to."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qsrt_pack.bench.layers import (
    DenseLayer,
    copied,
    dense_layer,
    layers_in_turn,
    random_layer,
)
from qsrt_pack.bench.machine import Machine
from qsrt_pack.bench.shapes import Shape
from qsrt_pack.evaluation import content_sha256
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.package import open_package
from qsrt_runtime.load import load_package
from qsrt_runtime.weights import LayerWeights

_OF_PACKAGES = ("package", "seal_sha256", "content_sha256", "load")
USABLE = 0.9  # of the free memory; the rest is for graphs, what torch keeps, and fragments


@dataclass(frozen=True)
class Subject:
    """What is measured. layers: packed, gone through in turn.   facts: of the report."""

    shape: Shape
    layers: list[LayerWeights]
    facts: dict[str, Any]


def made(shape: Shape, machine: Machine) -> Subject:
    """Copies of a layer of random words."""
    count = layers_in_turn(shape, machine.l2_bytes)
    _require(count * shape.packed_bytes, machine, f"{count} packed layers of these sizes take")
    layers = copied([random_layer(shape.geometry, machine.device)], count)
    return Subject(shape, layers, dict.fromkeys(_OF_PACKAGES))


def loaded_from(path: Path, machine: Machine) -> Subject:
    """A package's first layers, or copies of them. All are loaded for the time that it takes."""
    package = open_package(path)
    topk = package.documents.manifest["geometry"]["topk"]
    shape = Shape(package.geometry, package.true_sizes, topk)
    count = layers_in_turn(shape, machine.l2_bytes)
    numbers = package.layers
    _require(count * shape.packed_bytes, machine, f"{count} of its layers take")
    if len(numbers) * shape.packed_bytes > USABLE * machine.free_bytes():
        numbers = numbers[:count]
    loaded = load_package(path, device=machine.device, layers=numbers)
    load = {
        "layers": len(loaded.layers),
        "bytes": loaded.load_bytes,
        "seconds": loaded.load_s,
        "verify_seconds": loaded.verify_s,
    }
    layers = copied(list(loaded.layers.values()), count)
    digests = (loaded.seal_sha256, content_sha256(package))
    facts = dict(zip(_OF_PACKAGES, (str(path), *digests, load), strict=True))
    return Subject(shape, layers, facts)


def _require(needed: int, machine: Machine, what: str) -> None:
    free = USABLE * machine.free_bytes()
    if needed > free:
        raise FormatError(
            f"{what} {gigabytes(needed)} of memory, and {machine.name} has {gigabytes(free)} free; "
            "use one with more, or smaller sizes"
        )


def dense_layers(
    subject: Subject, machine: Machine, dtype: torch.dtype
) -> tuple[list[DenseLayer], str | None]:
    """The layers that the packed ones decode to; without them, why not."""
    needed = len(subject.layers) * subject.shape.dense_bytes
    free = USABLE * machine.free_bytes()
    if needed > free:
        return [], f"their weights take {gigabytes(needed)} of memory, {gigabytes(free)} are free"
    if any(layer.activations.any() for layer in subject.layers):
        return [], "the experts have another activation than SiLU"
    decoded: dict[int, DenseLayer] = {}
    found = []
    for layer in subject.layers:
        known = decoded.get(layer.layer)
        if known is None:
            known = decoded[layer.layer] = dense_layer(layer, subject.shape.sizes, dtype)
            found.append(known)
        else:
            found.append(DenseLayer(known.w13.clone(), known.w2.clone()))
    return found, None


def gigabytes(size: float) -> str:
    """As text."""
    return f"{size / 1e9:.2f} GB"
