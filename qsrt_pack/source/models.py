"""Which tensors of a checkpoint are routed experts: a table by architecture, and its checks."""

import re
from dataclasses import dataclass, replace
from typing import Any

from qsrt_pack.source.checkpoint import Checkpoint
from qsrt_pack.source.dtypes import READABLE
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import Geometry, TrueSizes
from qsrt_runtime.format.manifest import (
    Documents,
    activations,
    geometry_of,
    layers_of,
    true_sizes_of,
)


@dataclass(frozen=True)
class LayerRule:
    """Which layers have experts, by keys of config.json; one that is not there rules nothing out.

    Layer l has them if first <= l <= last, (l - offset) is a multiple of step, it is not listed
    under dense, and kinds, a list, does not say "dense" for it.
    offset: a key, or the number itself.
    """

    first: str | None = None
    last: str | None = None
    step: str | None = None
    offset: str | int = 0
    dense: str | None = None
    kinds: str | None = None


@dataclass(frozen=True)
class Architecture:
    """How one family names its experts. Keys are those of config.json.

    expert_key: template of an expert weight's name.   parts: the name of w1, w3 and w2 in it.
    router_key: template of the router's, [E, H].   intermediate, topk: their keys.
    layers: the rule that leaves layers dense, where the family has it.
    known: those of _UNSUPPORTED that are no obstacle here.
    is_calibrated: whether calibrate can run one of its layers alone.
    """

    expert_key: str = "model.layers.{layer}.mlp.experts.{expert}.{part}.weight"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router_key: str = "model.layers.{layer}.mlp.gate.weight"
    intermediate: str = "moe_intermediate_size"
    topk: str = "num_experts_per_tok"
    activations: tuple[str, ...] = ("silu",)
    layers: LayerRule = LayerRule()
    known: tuple[str, ...] = ()
    is_calibrated: bool = False

    def part(self, matrix: str) -> str:
        """The name of w1, w3 or w2."""
        return self.parts[MATRICES.index(matrix)]


MATRICES = ("w1", "w3", "w2")  # in the order of Architecture.parts
_QWEN = Architecture(
    layers=LayerRule(step="decoder_sparse_step", offset=-1, dense="mlp_only_layers"),
)
_DEEPSEEK = Architecture(
    layers=LayerRule("first_k_dense_replace", step="moe_layer_freq", kinds="mlp_layer_types"),
    known=("first_k_dense_replace", "num_nextn_predict_layers"),
)
_MIXTRAL = Architecture(
    expert_key="model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight",
    parts=("w1", "w3", "w2"),
    router_key="model.layers.{layer}.block_sparse_moe.gate.weight",
    intermediate="intermediate_size",
)
ARCHITECTURES = {
    "qwen2_moe": _QWEN,
    "qwen3_moe": replace(_QWEN, is_calibrated=True),
    "qwen3_next": _QWEN,
    "olmoe": replace(_QWEN, intermediate="intermediate_size", layers=LayerRule()),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "dots1": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "glm_moe_dsa": _DEEPSEEK,
    "ernie4_5_moe": Architecture(
        topk="moe_k",
        layers=LayerRule(
            "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval", offset=-1
        ),
    ),
    "hunyuan_v1_moe": Architecture(
        router_key="model.layers.{layer}.mlp.gate.wg.weight",
        intermediate="intermediate_size",
        topk="moe_topk",
    ),
    "jamba": Architecture(
        expert_key="model.layers.{layer}.feed_forward.experts.{expert}.{part}.weight",
        router_key="model.layers.{layer}.feed_forward.router.weight",
        intermediate="intermediate_size",
        layers=LayerRule(step="expert_layer_period", offset="expert_layer_offset"),
    ),
    "minimax_m2": _MIXTRAL,
    "mixtral": replace(_MIXTRAL, is_calibrated=True),
    "phimoe": _MIXTRAL,
}
# Keys of config.json for the number of experts; transformers 5 renames the first on saving.
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Keys that would change which experts there are or what they compute, where they are set.
_UNSUPPORTED = (
    *("text_config", "swiglu_limit", "expert_bias", "mlp_bias", "first_k_dense_replace"),
    *("num_nextn_predict_layers", "quantization", "quantization_config", "compression_config"),
    "transformers_weights",
)
_MAX_LAYERS, _MAX_EXPERTS, _MAX_SIZE = 100_000, 65_536, 1 << 24


@dataclass(frozen=True)
class RoutedExperts:
    """The routed experts of a checkpoint, every expected tensor present and of the right shape.

    geometry: as they will be stored.   true_sizes: as the model has them.
    """

    model_type: str
    architecture: Architecture
    geometry: Geometry
    true_sizes: TrueSizes
    layers: tuple[int, ...]
    topk: int
    activation: str

    def tensor_name(self, layer: int, expert: int, matrix: str) -> str:
        """The checkpoint's name of w1, w3 or w2 of one expert."""
        part = self.architecture.part(matrix)
        return self.architecture.expert_key.format(layer=layer, expert=expert, part=part)

    def tensor_names(self) -> list[str]:
        """All expert tensors by layer, expert and matrix."""
        return [
            self.tensor_name(layer, expert, matrix)
            for layer in self.layers
            for expert in range(self.geometry.experts)
            for matrix in MATRICES
        ]


def find_experts(checkpoint: Checkpoint) -> RoutedExperts:
    """Find the routed experts; FormatError names the layer, expert and tensor of any doubt."""
    where = f"{checkpoint.path}/config.json"
    if not any(map(_is_expert, checkpoint.tensors)):
        raise FormatError(f"{checkpoint.path} has no routed experts: no tensor is named .experts.")
    known = ARCHITECTURES.get(str(checkpoint.config.get("model_type")), Architecture()).known
    for key in _UNSUPPORTED:
        if key not in known and checkpoint.config.get(key) not in (None, False, 0):
            raise FormatError(
                f"{where}: {key} is set; convert reads plain unquantized experts "
                f"({', '.join(READABLE)})"
            )
    experts = described_experts(checkpoint.config, where)
    _check_names(checkpoint, experts)
    _check_tensors(checkpoint, experts)
    _check_routers(checkpoint, experts)
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
    sizes = TrueSizes(
        _size(config, "hidden_size", where), _size(config, architecture.intermediate, where)
    )
    experts = RoutedExperts(
        model_type=model_type,
        architecture=architecture,
        geometry=sizes.padded(_expert_count(config, where)),
        true_sizes=sizes,
        layers=_expected_layers(config, architecture.layers, where),
        topk=_size(config, architecture.topk, where),
        activation=activation,
    )
    if experts.topk > experts.geometry.experts:
        raise FormatError(
            f"{where}: {architecture.topk} is {experts.topk}, more than "
            f"the {experts.geometry.experts} experts"
        )
    return experts


def check_package_config(documents: Documents, where: str) -> None:
    """Refuse a package whose config.json describes other experts than were packed."""
    experts = described_experts(documents.config, where)
    manifest = documents.manifest
    for what, described, packed in (
        ("layers with experts", list(experts.layers), layers_of(manifest)),
        ("sizes of the experts", experts.true_sizes, true_sizes_of(manifest)),
        ("experts of a layer", experts.geometry.experts, geometry_of(manifest).experts),
        ("experts a token goes to", experts.topk, manifest["geometry"]["topk"]),
    ):
        if described != packed:
            raise FormatError(f"{where}: {what} are {described!s:.200}, packed are {packed!s:.200}")
    for layer in experts.layers:
        used = set(activations(manifest, experts.activation, layer))
        if used - set(experts.architecture.activations):
            raise FormatError(
                f"{where}: {experts.model_type} has no experts with {max(used)} (layer {layer})"
            )


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


def one_layer_changes(experts: RoutedExperts, layer: int) -> dict[str, Any]:
    """What config.json of one layer alone says besides the layer's share of its lists."""
    rule, dense = experts.architecture.layers, layer not in experts.layers
    changes: dict[str, Any] = {}
    if rule.step is not None:
        changes[rule.step] = 1
    if rule.dense is not None:
        changes[rule.dense] = [0] if dense else []
    return changes


def _size(config: dict[str, Any], key: str, where: str, limit: int = _MAX_SIZE) -> int:
    value = config.get(key)
    if isinstance(value, list) and value and all(each == value[0] for each in value):
        value = value[0]  # one for each layer, all alike
    if type(value) is not int or not 0 < value <= limit:
        raise FormatError(f"{where}: {key} is {value!r:.99}, expected an integer in 1..{limit}")
    return value


def _is_expert(name: str) -> bool:
    return name.startswith("experts.") or ".experts." in name


def _expert_count(config: dict[str, Any], where: str) -> int:
    keys = [key for key in _EXPERT_COUNTS if key in config] or [_EXPERT_COUNTS[0]]
    counts = {key: _size(config, key, where, _MAX_EXPERTS) for key in keys}
    if len(set(counts.values())) > 1:
        raise FormatError(f"{where}: the number of experts is in conflict: {counts}")
    return counts[keys[0]]


def _expected_layers(config: dict[str, Any], rule: LayerRule, where: str) -> tuple[int, ...]:
    count = _size(config, "num_hidden_layers", where, _MAX_LAYERS)
    first = _number(config, rule.first, 0, where)
    last = _number(config, rule.last, count - 1, where)
    step = _number(config, rule.step, 1, where, least=1)
    offset = rule.offset if type(rule.offset) is int else _number(config, rule.offset, 0, where)
    dense = _list(config, rule.dense, int, where)
    kinds = _list(config, rule.kinds, str, where) or ["sparse"] * count
    if len(kinds) != count:
        raise FormatError(f"{where}: {rule.kinds} has {len(kinds)} entries for {count} layers")
    layers = tuple(
        n
        for n in range(count)
        if first <= n <= last
        and (n - offset) % step == 0
        and n not in dense
        and kinds[n] != "dense"
    )
    if not layers:
        raise FormatError(f"{where} describes no layer with routed experts")
    return layers


def _number(
    config: dict[str, Any], key: str | None, default: int, where: str, least: int = 0
) -> int:
    """A count of layers, `default` where the family or the config has no such key."""
    value = config.get(key) if key is not None else None
    if value is None:
        return default
    if type(value) is not int or not least <= value <= _MAX_LAYERS:
        raise FormatError(f"{where}: {key} is {value!r:.99}, expected a number of layers")
    return value


def _list(config: dict[str, Any], key: str | None, kind: type, where: str) -> list[Any]:
    value = (config.get(key) if key is not None else None) or []
    if not isinstance(value, list) or not all(type(item) is kind for item in value):
        raise FormatError(f"{where}: {key} is {value!r:.99}, expected a list by layer")
    return value


def _check_names(checkpoint: Checkpoint, experts: RoutedExperts) -> None:
    """Every expert tensor is an expected one, else it is named and refused."""
    architecture, layers = experts.architecture, set(experts.layers)
    fields = {k: rf"(?P<{k}>0|[1-9]\d{{0,8}})" for k in ("layer", "expert")}
    parts = "|".join(map(re.escape, architecture.parts))
    template = re.escape(architecture.expert_key).replace(r"\{", "{").replace(r"\}", "}")
    expected = re.compile(template.format(part=f"(?:{parts})", **fields))
    for name, (shard, _) in checkpoint.tensors.items():
        if not _is_expert(name):
            continue
        match, where = expected.fullmatch(name), f"{checkpoint.path / shard}: tensor {name:.200}"
        if match is None:
            raise FormatError(
                f"{where} is in a layout that {experts.model_type} is not read in; "
                f"expected {architecture.expert_key}"
            )
        if int(match["layer"]) not in layers:
            raise FormatError(
                f"{where} is an expert of layer {match['layer']}, config.json has experts in "
                f"{len(layers)} layers, {experts.layers[0]} to {experts.layers[-1]}"
            )
        if int(match["expert"]) >= experts.geometry.experts:
            raise FormatError(
                f"{where} is expert {match['expert']} of layer {match['layer']}, "
                f"config.json says {experts.geometry.experts} experts"
            )


def _check_routers(checkpoint: Checkpoint, experts: RoutedExperts) -> None:
    shape = (experts.geometry.experts, experts.true_sizes.hidden)
    for layer in experts.layers:
        name = experts.architecture.router_key.format(layer=layer)
        if name not in checkpoint.tensors:
            raise FormatError(f"{checkpoint.path}: router {name} is missing (layer {layer})")
        shard, entry = checkpoint.tensors[name]
        if entry.shape != shape:
            raise FormatError(
                f"{checkpoint.path / shard}: router {name} has shape {list(entry.shape)}, "
                f"expected {list(shape)}"
            )


def _check_tensors(checkpoint: Checkpoint, experts: RoutedExperts) -> None:
    hidden, intermediate = experts.true_sizes.hidden, experts.true_sizes.intermediate
    shapes = dict.fromkeys(("w1", "w3"), (intermediate, hidden)) | {"w2": (hidden, intermediate)}
    for layer in experts.layers:
        for expert in range(experts.geometry.experts):
            for matrix, shape in shapes.items():
                name = experts.tensor_name(layer, expert, matrix)
                if name not in checkpoint.tensors:
                    part = experts.architecture.part(matrix)
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
