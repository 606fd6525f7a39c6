"""load_package: from a sealed directory to layers ready to run."""

import logging
import operator
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from qsrt_runtime import verified
from qsrt_runtime.expansion import check_expand, expanded
from qsrt_runtime.format import manifest as manifests
from qsrt_runtime.format.container import layer_place
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import (
    ROTATION_MULTIPLIER,
    SLOTS_PER_PAIR,
    Geometry,
    TrueSizes,
    align,
    extent,
)
from qsrt_runtime.format.package import (
    Package,
    check_base,
    open_package,
    read_checked_layer,
    verify_files,
)
from qsrt_runtime.hub import local_folder
from qsrt_runtime.staging import Staging
from qsrt_runtime.weights import LayerWeights, with_traits

VERIFY = ("once", "always", "structure")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedPackage:
    """A package in memory, or a rank's share of it.

    path: its folder.   config: the model's config.json.   geometry: sizes of every layer's
    experts as stored, whole.   true_sizes: as the model has them; rows are of that hidden size.
    topk: experts a token goes to.   layers: by layer index of the checkpoint.
    expert_map: [E] int32 on the device, what moe_forward takes where not all experts are loaded:
    the layers' own id of each, -1 for one that is not there; None where all are.
    seal_sha256: the digest that binds every byte of the package.
    verify_s, load_s: seconds for checking the files and for bringing the layers to the device.
    load_bytes: bytes read for that.   held_bytes: those that the layers have in memory, which are
    more where they are expanded.
    """

    path: Path
    config: dict[str, Any]
    geometry: Geometry
    true_sizes: TrueSizes
    topk: int
    layers: dict[int, LayerWeights]
    expert_map: torch.Tensor | None
    seal_sha256: str
    verify_s: float
    load_s: float
    load_bytes: int
    held_bytes: int


def load_package(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    rank: int = 0,
    world_size: int = 1,
    experts: range | None = None,
    layers: Iterable[int] | None = None,
    verify: str = "once",
    expand: str | None = None,
) -> LoadedPackage:
    """Load the packed experts of a package onto a device, never a dense one.

    path: a local folder, or OWNER/NAME[@REVISION] on the Hub, downloaded into its cache if need be.
    device: "cpu" or a CUDA device.   rank, world_size: load only the slots of this rank's pairs
    of every expert (consecutive shares; the first ranks have one more); the ranks' outputs add
    up to the whole.   experts: load these alone, of step 1, by default all; moe_forward then wants
    `expert_map`, and the outputs of ranges that are all experts together add up to the whole.
    layers: the layers to load, by default all.
    verify: "once" reads and checks every file of the package unless that was done before and no
    file changed size, time or inode since; "always" does not remember; "structure" checks the
    documents, the headers and the small sections, and trusts the slabs.
    expand: None keeps what is stored, about 3 bits a weight; "e4m3" decodes it once to the E4M3
    labels it stands for, 8 bits a weight and the same values, one layer after another, so that
    beside what is kept there is room for one packed layer.
    Raises FormatError naming the file and the field that is wrong, ValueError or TypeError for
    arguments, HubError where the Hub does not give the package.
    """
    target = checked_device(device)
    check_expand(expand)
    package = open_package(local_folder(path))
    wanted = _wanted_layers(package, layers)
    slots = owned_slots(package.geometry, rank, world_size)
    experts = _wanted_experts(package.geometry, experts)
    start = time.perf_counter()
    before = verify_package(package, verify)
    verify_s = time.perf_counter() - start
    start = time.perf_counter()
    load = _load_packed if expand is None else _load_expanded
    loaded, load_bytes = load(package, wanted, target, slots, experts)
    check_unchanged(package, before)
    load_s = time.perf_counter() - start
    held_bytes = sum(stored_bytes(weights) for weights in loaded.values())
    logger.info("%s: %d bytes in %.2f s, checks %.2f s", path, load_bytes, load_s, verify_s)
    if expand is not None:
        logger.info("%s: expanded to %d bytes", path, held_bytes)
    return LoadedPackage(
        path=package.path,
        config=package.documents.config,
        geometry=package.geometry,
        true_sizes=package.true_sizes,
        topk=package.documents.manifest["geometry"]["topk"],
        layers=loaded,
        expert_map=expert_map(package.geometry, experts, target),
        seal_sha256=package.seal_sha256,
        verify_s=verify_s,
        load_s=load_s,
        load_bytes=load_bytes,
        held_bytes=held_bytes,
    )


def _load_packed(
    package: Package, wanted: list[int], device: torch.device, slots: range, experts: range
) -> tuple[dict[int, LayerWeights], int]:
    """The layers as stored, all read at once, and the bytes read."""
    with Staging(device) as staging:
        read = [load_layer(package, layer, staging, slots, experts) for layer in wanted]
    loaded = with_traits(read)  # once their sections are there
    return dict(zip(wanted, loaded, strict=True)), sum(map(stored_bytes, loaded))


def _load_expanded(
    package: Package, wanted: list[int], device: torch.device, slots: range, experts: range
) -> tuple[dict[int, LayerWeights], int]:
    """The layers expanded, read one after another, and the bytes read."""
    loaded, load_bytes = {}, 0
    for layer in wanted:
        packed, size = _load_packed(package, [layer], device, slots, experts)
        load_bytes += size
        loaded[layer] = expanded(packed.pop(layer))
    return loaded, load_bytes


def verify_package(package: Package, verify: str) -> str:
    """Check an opened package as `load_package` says; returns verified.fingerprint from before."""
    if verify not in VERIFY:
        raise ValueError(f"verify is {verify!r}, expected one of {VERIFY}")
    before = verified.fingerprint(package)
    if verify != "once":
        _check_files(package, verify)
    elif not verified.was_verified(package, before):
        with verified.one_at_a_time(package):  # other ranks wait, and find the stamp
            if not verified.was_verified(package, before):
                _check_files(package, verify)
                verified.remember(package, before)
    return before


def check_unchanged(package: Package, before: str) -> None:
    """Refuse a package whose files are not as they were when `verify_package` saw them."""
    if verified.fingerprint(package) != before:
        raise FormatError(f"{package.path} was changed while it was read; load it again")


def _check_files(package: Package, verify: str) -> None:
    check_base(package)
    if verify != "structure":
        verify_files(package, sorted(package.digests))
    slots = range(0) if verify == "structure" else None
    with torch.device("cpu"):  # the caller may have another default
        for layer in package.layers:  # most of it is Python, so no threads
            read_checked_layer(package, layer, slots)


def load_layer(
    package: Package,
    layer: int,
    staging: Staging,
    slots: range | None = None,
    experts: range | None = None,
) -> LayerWeights:
    """Bring one layer's slots and experts, by default all, to a device; nothing else is read.

    The package has been verified. The tensors are filled when the staging ends.
    """
    whole = package.geometry
    place = layer_place(package.path / package.layer_name(layer))
    slots = range(whole.slots) if slots is None else slots
    experts = range(whole.experts) if experts is None else experts
    codes = staging.read(place.path, place.sections + experts.start, len(experts))
    first, rows = (experts.start, len(experts)) if place.scale_rows > 1 else (0, 1)
    scales = staging.read_rows(
        place.path,
        place.sections + align(whole.experts) + 2 * whole.hidden * first,
        3,
        2 * whole.hidden * rows,
        2 * whole.hidden * place.scale_rows,
    )
    has_all = len(experts) == whole.experts
    atoms = staging.read_rows(
        place.path,
        place.slab + slots.start * place.stride + experts.start * whole.bundle_bytes,
        len(slots),
        place.stride if has_all else len(experts) * whole.bundle_bytes,
        place.stride,
    )
    return LayerWeights(
        # Expert e of these stands where expert e of this layer does:
        layer=layer + ROTATION_MULTIPLIER * experts.start,
        geometry=replace(whole, experts=len(experts)),
        slots=slots,
        format_codes=codes,
        shared_scales=scales.view(torch.float16).view(3, rows, whole.hidden),
        atoms=atoms,
        activations=_activations(package, layer, experts).to(staging.device),
        hidden_padding=whole.hidden - package.true_sizes.hidden,
    )


def _activations(package: Package, layer: int, experts: range) -> torch.Tensor:
    """[len(experts)] uint8, each one's place in ACTIVATIONS, on the CPU."""
    hidden_act = manifests.text_config(package.documents.config).get("hidden_act")
    names = manifests.activations(package.documents.manifest, hidden_act, layer)
    places = [manifests.ACTIVATIONS.index(names[expert]) for expert in experts]
    return torch.tensor(places, dtype=torch.uint8, device="cpu")


def expert_map(geometry: Geometry, experts: range, device: torch.device) -> torch.Tensor | None:
    """[E] int32: the place in a range of each of a layer's experts, or -1; None for all."""
    if len(experts) == geometry.experts:
        return None
    places = torch.full((geometry.experts,), -1, dtype=torch.int32, device=device)
    places[experts.start : experts.stop] = torch.arange(len(experts), device=device)
    return places


def owned_slots(geometry: Geometry, rank: int, world_size: int) -> range:
    """The slots of a rank's pairs; whole pairs, since a Hadamard block lies inside one.

    Raises ValueError where ranks would have none.
    """
    rank, world_size = _integer(rank, "rank"), _integer(world_size, "world_size")
    if not 1 <= world_size <= geometry.pairs:
        raise ValueError(
            f"world_size is {world_size}; experts of {geometry.intermediate} channels have "
            f"{geometry.pairs} pairs, of which each rank owns at least one"
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}, expected 0..{world_size - 1}")
    pairs = extent(geometry.pairs, world_size, rank)
    return range(SLOTS_PER_PAIR * pairs.start, SLOTS_PER_PAIR * pairs.stop)


def _wanted_experts(geometry: Geometry, experts: range | None) -> range:
    if experts is None:
        return range(geometry.experts)
    if not isinstance(experts, range):
        raise TypeError(f"experts is {experts!r}, expected a range, as range(0, 2)")
    if experts.step != 1 or not 0 <= experts.start < experts.stop <= geometry.experts:
        raise ValueError(
            f"experts is {experts}, expected some, of step 1, of {range(geometry.experts)}"
        )
    return experts


def _wanted_layers(package: Package, layers: Iterable[int] | None) -> list[int]:
    if layers is None:
        return package.layers
    if not isinstance(layers, Iterable):
        raise TypeError(f"layers is {layers!r}, expected several numbers, as [{layers!r}]")
    wanted = sorted({_integer(layer, "a layer") for layer in layers})
    for layer in wanted:
        if layer not in package.layers:
            raise ValueError(f"layer {layer} is not one of the packed layers {package.layers}")
    return wanted


def _integer(value: Any, name: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, expected an integer") from None


def checked_device(device: str | torch.device) -> torch.device:
    """The device with its index, once it is known to be there."""
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device is {device!r}, expected cpu, cuda or cuda:N") from None
    if target.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if target.type != "cuda" or not count:
        raise ValueError(f"device is {target}, expected cpu or one of {count} CUDA devices")
    index = torch.cuda.current_device() if target.index is None else target.index
    if index >= count:
        raise ValueError(f"device is {target}, expected cpu or one of {count} CUDA devices")
    return torch.device("cuda", index)


def stored_bytes(weights: LayerWeights) -> int:
    """Bytes of a layer in memory: of a packed one, those that were read from its file."""
    parts = (weights.atoms, weights.format_codes, weights.shared_scales, weights.labels)
    return sum(part.nbytes for part in parts if part is not None)
