"""Which tensors of a checkpoint are routed experts, found by the table and checked."""

import re
from dataclasses import replace
from typing import Any

from qsrt_pack.source.checkpoint import Checkpoint
from qsrt_pack.source.config import (
    ACTIVATION_KEYS,
    MAX_LAYERS,
    MODEL_PREFIX,
    RoutedExperts,
    check_levels,
    described_experts,
    find_architecture,
    nextn_count,
)
from qsrt_pack.source.dtypes import PLAIN
from qsrt_pack.source.formats import FORMATS
from qsrt_pack.source.naming import MATRICES, MTP_PREFIX, Naming
from qsrt_pack.source.quantization import read_quantization
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.manifest import (
    Documents,
    activations,
    geometry_of,
    layers_of,
    text_config,
    true_sizes_of,
)

READABLE = (*PLAIN, *dict.fromkeys(form.name for form in FORMATS))
_QUANTIZED = "this quantization is not read"
_UNSUPPORTED = {  # keys that would change what experts compute or how they are stored, where set
    "swiglu_limit": "clamped activations are not packed",
    "expert_bias": "experts with a bias are not packed",
    "mlp_bias": "experts with a bias are not packed",
    "first_k_dense_replace": "this architecture is not known to have it",
    "quantization": _QUANTIZED,
    "compression_config": _QUANTIZED,
    "transformers_weights": "its file is not read",
}
PREFIXES = (MODEL_PREFIX, "model.language_model.", "language_model.model.")
_EXPERT = re.compile(r"(?:^|\.)(?:experts|block_sparse_moe\.(?:in|out)put_linear)\.")


def find_experts(checkpoint: Checkpoint) -> RoutedExperts:
    """Find the routed experts; FormatError names the layer, expert and tensor of any doubt."""
    where = f"{checkpoint.path}/config.json"
    if not any(map(_is_expert, checkpoint.weights)):
        raise FormatError(
            f"{checkpoint.path} has no routed experts: no tensor has a name that those have"
        )
    check_levels(checkpoint.config, where)
    _check_supported(checkpoint, where)
    experts = described_experts(checkpoint.config, where)
    experts = replace(experts, naming=_find_naming(checkpoint, experts))
    nextn = _check_names(checkpoint, experts, nextn_count(text_config(checkpoint.config), where))
    experts = replace(experts, layers=experts.layers + nextn)
    _check_tensors(checkpoint, experts)
    _check_routers(checkpoint, experts)
    return experts


def packed_experts(documents: Documents, where: str) -> RoutedExperts:
    """The experts of a package of ours; FormatError if its config.json describes others."""
    experts = described_experts(documents.config, where)
    manifest = documents.manifest
    count, layers = experts.naming.count, layers_of(manifest)
    naming = _packed_naming(experts, manifest["expert_tensors"], where)
    limit = _limit(naming, nextn_count(text_config(documents.config), where))
    if layers[-1] >= limit:
        raise FormatError(f"{where} counts {limit} layers, layer {layers[-1]} is packed")
    for what, described, packed in (
        ("layers with experts", list(experts.layers), [n for n in layers if n < count]),
        ("sizes of the experts", experts.true_sizes, true_sizes_of(manifest)),
        ("experts of a layer", experts.geometry.experts, geometry_of(manifest).experts),
        ("experts a token goes to", experts.topk, manifest["geometry"]["topk"]),
    ):
        if described != packed:
            raise FormatError(f"{where}: {what} are {described!s:.200}, packed are {packed!s:.200}")
    for layer in layers:
        used = set(activations(manifest, experts.activation, layer))
        if used - set(experts.architecture.activations):
            raise FormatError(
                f"{where}: {experts.model_type} has no experts with {max(used)} (layer {layer})"
            )
    return replace(experts, layers=tuple(layers), naming=naming)


def _packed_naming(experts: RoutedExperts, stated: dict[str, Any], where: str) -> Naming:
    """How the manifest says that the source named its experts."""
    layouts = {layout.name: layout for layout in experts.architecture.layouts}
    found = {}
    for key in ("layout", "mtp_layout"):
        if stated[key] not in (*layouts, None):
            raise FormatError(
                f"{where}: {experts.model_type} has its experts {' or '.join(layouts)}; "
                f"expert_tensors.{key} of the manifest is {stated[key]!r}"
            )
        found[key] = layouts.get(stated[key])
    return Naming(prefix=stated["prefix"], count=experts.naming.count, **found)


def carried_tensors(
    checkpoint: Checkpoint, experts: RoutedExperts, carried_as: str = "bf16"
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape of every tensor that is not a routed expert's, as it is written.

    carried_as: bf16, quantized weights decoded; or stored, every tensor as it is.
    """
    routed = experts.stored()
    if carried_as == "stored":
        left = {part for name in routed for part in checkpoint.weights[name].tensors}
        entries = {name: entry for name, (_, entry) in checkpoint.tensors.items()}
        return {name: (e.dtype, e.shape) for name, e in entries.items() if name not in left}
    weights = checkpoint.weights.items()
    return {name: weight.written for name, weight in weights if name not in routed}


def outer_names(checkpoint: Checkpoint, experts: RoutedExperts) -> list[str]:
    """The tensors that lie in no layer, none of next-token prediction either."""
    naming = experts.naming
    names = [name for name in checkpoint.weights if naming.parse(name) is None]
    return [name for name in names if not name.startswith(MTP_PREFIX)]


def one_layer_changes(experts: RoutedExperts, layer: int) -> dict[str, Any]:
    """What config.json of one layer alone says besides the layer's share of its lists."""
    rule, dense = experts.architecture.layers, layer not in experts.layers
    changes = {rule.first: int(dense), rule.last: 0, rule.dense: [0] if dense else []}
    changes |= {rule.step: 1, rule.listed: [] if dense else [0]}
    return {key: value for key, value in changes.items() if key is not None}


def _is_expert(name: str) -> bool:
    return _EXPERT.search(name) is not None


def _check_supported(checkpoint: Checkpoint, where: str) -> None:
    """Refuse by name what packed experts cannot compute, and what is not read."""
    config = text_config(checkpoint.config)
    for name in filter(_is_expert, checkpoint.weights):
        if name.endswith(("_bias", ".bias")):
            raise FormatError(
                f"{checkpoint.path}: tensor {name:.200} is a bias of experts, which packed experts "
                "do not have"
            )
    for key in ACTIVATION_KEYS:
        if config.get(key) not in (None, "silu"):
            raise FormatError(
                f"{where}: {key} is {config[key]!r:.99}; packed experts compute "
                "down(silu(gate x) * up x)"
            )
    found = find_architecture(checkpoint.config)
    known = found[1].keys() if found is not None else ()
    for key, reason in _UNSUPPORTED.items():
        if key not in known and config.get(key) not in (None, False, 0):
            raise FormatError(
                f"{where}: {key} is set; {reason}, experts are plain ones of {', '.join(READABLE)}"
            )


def _find_naming(checkpoint: Checkpoint, experts: RoutedExperts) -> Naming:
    names = [name for name in checkpoint.weights if _is_expert(name)]
    apart = [name for name in names if name.startswith(MTP_PREFIX)]
    inside = [name for name in names if not name.startswith(MTP_PREFIX)]
    layouts, count = experts.architecture.layouts, experts.naming.count
    usual = [Naming(layout, prefix, count) for prefix in PREFIXES for layout in layouts]
    naming = _choose(checkpoint, experts, usual, inside or names)
    if not apart:
        return naming
    return _choose(
        checkpoint, experts, [replace(naming, mtp_layout=layout) for layout in layouts], apart
    )


def _choose(
    checkpoint: Checkpoint, experts: RoutedExperts, candidates: list[Naming], names: list[str]
) -> Naming:
    """The naming of the first expert tensor that one has; of two that name alike, by its shape."""
    for name in names:
        named = [naming for naming in candidates if naming.expert_of(name) is not None]
        if named:
            fitting = [naming for naming in named if _fits(checkpoint, experts, naming, name)]
            return (fitting or named)[0]
    raise _unknown_layout(checkpoint, experts, names[0])


def _fits(checkpoint: Checkpoint, experts: RoutedExperts, naming: Naming, name: str) -> bool:
    """Whether the tensors of a layer's first expert have the shapes of a naming.

    name: of a tensor of the layer.
    """
    experts = replace(experts, naming=naming)
    layer, _ = naming.parse(name) or (0, "")
    for matrix in MATRICES:
        tensor = experts.weight(layer, 0, matrix).tensor
        if tensor not in checkpoint.weights:
            return False
        if checkpoint.weights[tensor].shape != experts.stored_shape(layer, matrix):
            return False
    return True


def _unknown_layout(checkpoint: Checkpoint, experts: RoutedExperts, name: str) -> FormatError:
    layouts = " or ".join(layout.gate for layout in experts.architecture.layouts)
    return FormatError(
        f"{checkpoint.path_of(checkpoint.weights[name])}: tensor {name:.200} is in a layout that "
        f"{experts.model_type} is not read in; expected model.layers.L.{layouts}"
    )


def _check_names(
    checkpoint: Checkpoint, experts: RoutedExperts, nextn: int | None
) -> tuple[int, ...]:
    """Every expert tensor is an expected one, else it is named and refused.

    nextn: the layers of next-token prediction that config.json counts. They have the numbers after
    the others; named apart, as many as there are will do where it counts none.
    Returns those that have experts.
    """
    naming, layers, found = experts.naming, set(experts.layers), set()
    for name, weight in checkpoint.weights.items():
        where = f"{checkpoint.path_of(weight)}: tensor {name:.200}"
        layer, _ = naming.parse(name) or (None, "")
        limit = _limit(naming, nextn)
        if layer is not None and (layer >= limit or not name.startswith(naming.path(layer))):
            raise FormatError(
                f"{where} is of layer {layer}, config.json counts {naming.count} and "
                f"{nextn or 0} of next-token prediction"
            )
        if not _is_expert(name):
            continue
        expert = naming.expert_of(name)
        if layer is None or expert is None:
            raise _unknown_layout(checkpoint, experts, name)
        if layer < naming.count and layer not in layers:
            raise FormatError(
                f"{where} is an expert of layer {layer}, config.json has experts in "
                f"{len(layers)} layers, {experts.layers[0]} to {experts.layers[-1]}"
            )
        if expert >= experts.geometry.experts:
            raise FormatError(
                f"{where} is expert {expert} of layer {layer}, "
                f"config.json says {experts.geometry.experts} experts"
            )
        if layer >= naming.count:
            found.add(layer)
    return tuple(sorted(found))


def _limit(naming: Naming, nextn: int | None) -> int:
    """The number that all layers are below. nextn: as for _check_names."""
    if naming.mtp_layout is not None and nextn is None:
        return naming.count + MAX_LAYERS
    return naming.count + (nextn or 0)


def _check_routers(checkpoint: Checkpoint, experts: RoutedExperts) -> None:
    shape = (experts.geometry.experts, experts.true_sizes.hidden)
    for layer in experts.layers:
        name = experts.naming.path(layer) + experts.architecture.router
        if name not in checkpoint.weights:
            raise FormatError(f"{checkpoint.path}: router {name} is missing (layer {layer})")
        weight = checkpoint.weights[name]
        if weight.shape != shape:
            raise FormatError(
                f"{checkpoint.path_of(weight)}: router {name} has shape {list(weight.shape)}, "
                f"expected {list(shape)}"
            )


def _check_tensors(checkpoint: Checkpoint, experts: RoutedExperts) -> None:
    said = read_quantization(checkpoint.config, f"{checkpoint.path}/config.json")
    for layer, expert, matrix, place in experts.weights():
        name, shape = place.tensor, experts.stored_shape(layer, matrix)
        if name not in checkpoint.weights:
            what = {"w1": "gate", "w3": "up", "w2": "down"}[matrix]
            raise FormatError(
                f"{checkpoint.path}: tensor {name} is missing "
                f"(layer {layer}, expert {expert}, {what})"
            )
        weight = checkpoint.weights[name]
        where = f"{checkpoint.path_of(weight)}: tensor {name}"
        if weight.shape != shape:
            raise FormatError(f"{where} has shape {list(weight.shape)}, expected {list(shape)}")
        if weight.format not in READABLE:
            raise FormatError(f"{where} is {weight.format}; convert reads {', '.join(READABLE)}")
        scheme = said.scheme(name)
        if weight.is_plain and scheme is not None:
            raise FormatError(
                f"{where} is {weight.format}, config.json's quantization_config says "
                f"{' or '.join(scheme.formats)}"
            )
