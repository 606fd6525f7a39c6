"""Which tensors of a checkpoint are routed experts: a table by architecture, and its checks."""

import re
from dataclasses import dataclass
from typing import Any

from qsrt_pack.source.checkpoint import Checkpoint
from qsrt_pack.source.dtypes import READABLE
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.format.manifest import Documents, geometry_of, layers_of


@dataclass(frozen=True)
class Architecture:
    """How one family names its experts. Keys are those of config.json.

    expert_key: template of an expert weight's name.   parts: the name of w1, w3 and w2 in it.
    sparse_step, dense_layers: keys of the rule that leaves layers dense, where the family has it:
    layer l has experts if (l + 1) % sparse_step == 0 and l is not among dense_layers.
    """

    expert_key: str
    parts: dict[str, str]
    intermediate: str
    activations: tuple[str, ...] = ("silu",)
    sparse_step: str | None = None
    dense_layers: str | None = None


_LLAMA_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
ARCHITECTURES = {
    "qwen3_moe": Architecture(
        expert_key="model.layers.{layer}.mlp.experts.{expert}.{part}.weight",
        parts=_LLAMA_PARTS,
        intermediate="moe_intermediate_size",
        sparse_step="decoder_sparse_step",
        dense_layers="mlp_only_layers",
    ),
    "mixtral": Architecture(
        expert_key="model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight",
        parts={"w1": "w1", "w3": "w3", "w2": "w2"},
        intermediate="intermediate_size",
    ),
}
# Keys of config.json for the number of experts; transformers 5 renames the first on saving.
_EXPERT_COUNTS = ("num_experts", "num_local_experts")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class RoutedExperts:
    """The routed experts of a checkpoint, every expected tensor present and of the right shape."""

    model_type: str
    architecture: Architecture
    geometry: Geometry
    layers: tuple[int, ...]
    topk: int
    activation: str

    def tensor_name(self, layer: int, expert: int, matrix: str) -> str:
        """The checkpoint's name of w1, w3 or w2 of one expert."""
        part = self.architecture.parts[matrix]
        return self.architecture.expert_key.format(layer=layer, expert=expert, part=part)

    def tensor_names(self) -> list[str]:
        """All expert tensors by layer, expert and matrix."""
        return [
            self.tensor_name(layer, expert, matrix)
            for layer in self.layers
            for expert in range(self.geometry.experts)
            for matrix in self.architecture.parts
        ]


def find_experts(checkpoint: Checkpoint) -> RoutedExperts:
    """Find the routed experts; FormatError names the layer, expert and tensor of any doubt."""
    where = f"{checkpoint.path}/config.json"
    if not any(".experts." in name for name in checkpoint.tensors):
        raise FormatError(f"{checkpoint.path} has no routed experts: no tensor is named .experts.")
    if checkpoint.config.get("quantization_config") is not None:
        raise FormatError(
            f"{where}: quantization_config is set; convert reads unquantized weights "
            f"({', '.join(READABLE)})"
        )
    experts = described_experts(checkpoint.config, where)
    _check_names(checkpoint, experts)
    _check_tensors(checkpoint, experts)
    return experts


def described_experts(config: dict[str, Any], where: str) -> RoutedExperts:
    """The routed experts that a config.json describes, whatever the files hold."""
    model_type = config.get("model_type")
    architecture = ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    if architecture is None:
        raise FormatError(
            f"{where}: model_type {model_type!r} is not one of {sorted(ARCHITECTURES)}"
        )
    activation = config.get("hidden_act")
    if activation not in architecture.activations:
        raise FormatError(
            f"{where}: hidden_act is {activation!r}, expected one of {architecture.activations}"
        )
    experts = RoutedExperts(
        model_type=model_type,
        architecture=architecture,
        geometry=Geometry(
            hidden=_size(config, "hidden_size", where),
            intermediate=_size(config, architecture.intermediate, where),
            experts=_expert_count(config, where),
        ),
        layers=_expected_layers(config, architecture, where),
        topk=_size(config, "num_experts_per_tok", where),
        activation=activation,
    )
    if experts.topk > experts.geometry.experts:
        raise FormatError(
            f"{where}: num_experts_per_tok is {experts.topk}, more than "
            f"the {experts.geometry.experts} experts"
        )
    return experts


def check_package_config(documents: Documents, where: str) -> None:
    """Refuse a package whose config.json describes other experts than were packed."""
    experts = described_experts(documents.config, where)
    manifest = documents.manifest
    for what, described, packed in (
        ("layers with experts", list(experts.layers), layers_of(manifest)),
        ("sizes of the experts", experts.geometry, geometry_of(manifest)),
        ("experts a token goes to", experts.topk, manifest["geometry"]["topk"]),
    ):
        if described != packed:
            raise FormatError(f"{where}: {what} are {described}, packed are {packed}")


def carried_tensors(
    checkpoint: Checkpoint, experts: RoutedExperts
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape of every tensor that is not a routed expert's."""
    routed = set(experts.tensor_names())
    return {
        name: (entry.dtype, entry.shape)
        for name, (_, entry) in checkpoint.tensors.items()
        if name not in routed
    }


def _size(config: dict[str, Any], key: str, where: str) -> int:
    value = config.get(key)
    if type(value) is not int or not 0 < value < 2**31:
        raise FormatError(f"{where}: {key} is {value!r}, expected a positive integer")
    return value


def _expert_count(config: dict[str, Any], where: str) -> int:
    keys = [key for key in _EXPERT_COUNTS if key in config] or [_EXPERT_COUNTS[0]]
    counts = {key: _size(config, key, where) for key in keys}
    if len(set(counts.values())) > 1:
        raise FormatError(f"{where}: the number of experts is in conflict: {counts}")
    return counts[keys[0]]


def _expected_layers(
    config: dict[str, Any], architecture: Architecture, where: str
) -> tuple[int, ...]:
    count = _size(config, "num_hidden_layers", where)
    step = 1
    if architecture.sparse_step is not None and architecture.sparse_step in config:
        step = _size(config, architecture.sparse_step, where)
    dense: set[int] = set()
    if architecture.dense_layers is not None:
        listed = config.get(architecture.dense_layers) or []
        if not isinstance(listed, list) or not all(type(n) is int for n in listed):
            raise FormatError(
                f"{where}: {architecture.dense_layers} is {listed!r}, expected a list of layers"
            )
        dense = set(listed)
    layers = tuple(n for n in range(count) if (n + 1) % step == 0 and n not in dense)
    if not layers:
        raise FormatError(f"{where} describes no layer with routed experts")
    return layers


def _check_names(checkpoint: Checkpoint, experts: RoutedExperts) -> None:
    """Every `.experts.` tensor is an expected one, else it is named and refused."""
    expected = set(experts.tensor_names())
    for name in checkpoint.tensors:
        if ".experts." not in name or name in expected:
            continue
        shard = checkpoint.path / checkpoint.tensors[name][0]
        layer = _LAYER.search(name)
        if layer and int(layer[1]) not in experts.layers:
            raise FormatError(
                f"{shard}: tensor {name} is an expert of layer {layer[1]}, "
                f"config.json has experts in layers {list(experts.layers)}"
            )
        number = re.search(r"\.experts\.(\d+)\.", name)
        if number and int(number[1]) >= experts.geometry.experts:
            raise FormatError(
                f"{shard}: tensor {name} is expert {number[1]} of layer "
                f"{layer[1] if layer else '?'}, config.json says {experts.geometry.experts} experts"
            )
        raise FormatError(
            f"{shard}: tensor {name} is in a layout that {experts.model_type} is not read in; "
            f"expected {experts.architecture.expert_key}"
        )


def _check_tensors(checkpoint: Checkpoint, experts: RoutedExperts) -> None:
    geometry = experts.geometry
    shapes = {
        "w1": (geometry.intermediate, geometry.hidden),
        "w3": (geometry.intermediate, geometry.hidden),
        "w2": (geometry.hidden, geometry.intermediate),
    }
    for layer in experts.layers:
        for expert in range(geometry.experts):
            for matrix, shape in shapes.items():
                name = experts.tensor_name(layer, expert, matrix)
                if name not in checkpoint.tensors:
                    part = experts.architecture.parts[matrix]
                    raise FormatError(
                        f"{checkpoint.path}: tensor {name} is missing "
                        f"(layer {layer}, expert {expert}, {part})"
                    )
                shard, entry = checkpoint.tensors[name]
                where = f"{checkpoint.path / shard}: tensor {name}"
                if entry.shape != shape:
                    raise FormatError(
                        f"{where} has shape {list(entry.shape)}, expected {list(shape)}"
                    )
                if entry.dtype not in READABLE:
                    raise FormatError(
                        f"{where} is {entry.dtype}; convert reads {', '.join(READABLE)}"
                    )
