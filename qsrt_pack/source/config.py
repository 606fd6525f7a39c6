"""What config.json says of the routed experts: architecture, sizes, layers."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from qsrt_pack.source.architectures import ARCHITECTURES, Architecture, LayerRule
from qsrt_pack.source.naming import MATRICES, ExpertWeight, Naming
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import Geometry, TrueSizes
from qsrt_runtime.format.manifest import same_by_layer, text_config

# Keys of config.json for the number of experts; transformers 5 renames the first on saving.
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOPK = "num_experts_per_tok"  # which transformers saves by another name for some families
# Keys of config.json for the number of layers of next-token prediction.
_NEXTN = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
# Keys that name an activation.
ACTIVATION_KEYS = ("hidden_act", "mlp_hidden_act", "hidden_activation")
MODEL_PREFIX = "model."  # of the layers of a model of text alone
MAX_LAYERS = 100_000
_MAX_EXPERTS, _MAX_SIZE = 65_536, 1 << 24


@dataclass(frozen=True)
class RoutedExperts:
    """The routed experts of a checkpoint, every expected tensor present and of the right shape.

    geometry: as they will be stored.   true_sizes: as the model has them.
    layers: with experts, those of next-token prediction last, numbered from naming.count on.
    """

    model_type: str
    architecture: Architecture
    geometry: Geometry
    true_sizes: TrueSizes
    layers: tuple[int, ...]
    topk: int
    activation: str
    naming: Naming

    def shape(self, matrix: str) -> tuple[int, int]:
        """[out, in] of w1, w3 or w2."""
        hidden, intermediate = self.true_sizes.hidden, self.true_sizes.intermediate
        return (hidden, intermediate) if matrix == "w2" else (intermediate, hidden)

    def weight(self, layer: int, expert: int, matrix: str) -> ExpertWeight:
        """Where w1, w3 or w2 of one expert is stored."""
        return self.naming.weight(layer, expert, matrix, self.shape(matrix)[0])

    def weights(self) -> Iterator[tuple[int, int, str, ExpertWeight]]:
        """Layer, expert, matrix and place of all of them, in that order."""
        for layer in self.layers:
            for expert in range(self.geometry.experts):
                for matrix in MATRICES:
                    yield layer, expert, matrix, self.weight(layer, expert, matrix)

    def stored_shape(self, layer: int, matrix: str) -> tuple[int, ...]:
        """The shape of the tensors that hold w1, w3 or w2 of a layer."""
        layout = self.naming.layout_of(layer)
        return layout.stored_shape(matrix, self.shape(matrix), self.geometry.experts)

    def stored(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of experts."""
        return {w.tensor: self.stored_shape(layer, m) for layer, _, m, w in self.weights()}

    def blocks(self) -> list[tuple[str, int | None]]:
        """All that is read at once: tensors, or indices of stacks."""
        return list(dict.fromkeys(weight.block for *_, weight in self.weights()))

    def layer_blocks(self, layer: int) -> list[tuple[str, int | None]]:
        """The same of one layer."""
        pairs = itertools.product(range(self.geometry.experts), MATRICES)
        return list(dict.fromkeys(self.weight(layer, *pair).block for pair in pairs))


def described_experts(config: dict[str, Any], where: str) -> RoutedExperts:
    """The routed experts that a config.json describes, whatever the files hold.

    Those of next-token prediction aside; named as the architecture has it first.
    """
    found = find_architecture(config)
    if found is None:
        raise FormatError(
            f"{where}: model_type {config.get('model_type')!r} is not one of "
            f"{sorted(ARCHITECTURES)}"
        )
    (model_type, architecture), config = found, text_config(config)
    activation = config.get(architecture.activation) if architecture.activation else "silu"
    if activation not in architecture.activations:
        raise FormatError(
            f"{where}: {architecture.activation} is {activation!r}, expected one of "
            f"{architecture.activations}"
        )
    sizes = TrueSizes(
        _size(config, "hidden_size", where), _size(config, architecture.intermediate, where)
    )
    count = _size(config, "num_hidden_layers", where, MAX_LAYERS)
    topk = _TOPK if config.get(architecture.topk) is None and _TOPK in config else architecture.topk
    experts = RoutedExperts(
        model_type=model_type,
        architecture=architecture,
        geometry=sizes.padded(_expert_count(config, where)),
        true_sizes=sizes,
        layers=_expected_layers(config, architecture.layers, count, where),
        topk=_size(config, topk, where),
        activation=activation,
        naming=Naming(architecture.layouts[0], MODEL_PREFIX, count),
    )
    if experts.topk > experts.geometry.experts:
        raise FormatError(
            f"{where}: {topk} is {experts.topk}, more than the {experts.geometry.experts} experts"
        )
    return experts


def find_architecture(config: dict[str, Any]) -> tuple[str, Architecture] | None:
    """The model_type and the architecture of the text model, else of the whole; None if unknown."""
    for model_type in (text_config(config).get("model_type"), config.get("model_type")):
        if isinstance(model_type, str) and model_type in ARCHITECTURES:
            return model_type, ARCHITECTURES[model_type]
    return None


def check_levels(config: dict[str, Any], where: str) -> None:
    """Refuse a text_config that contradicts what stands beside it."""
    inner = config.get("text_config")
    if inner is None:
        return
    if not isinstance(inner, dict):
        raise FormatError(f"{where}: text_config is {inner!r:.99}, expected an object")
    keys = {"hidden_size", "num_hidden_layers", *_EXPERT_COUNTS, *_NEXTN, *ACTIVATION_KEYS}
    for key in sorted(keys.union(*(each.keys() for each in ARCHITECTURES.values()))):
        above, below = config.get(key), inner.get(key)
        if None not in (above, below) and above != below:
            raise FormatError(
                f"{where}: {key} is {above!r:.99}, and {below!r:.99} in text_config; which is meant"
            )


def nextn_count(config: dict[str, Any], where: str) -> int | None:
    """The layers of next-token prediction that config.json counts, None where it does not."""
    counts = [_number(config, key, 0, where) for key in _NEXTN if config.get(key) is not None]
    return max(counts, default=None)


def _size(config: dict[str, Any], key: str, where: str, limit: int = _MAX_SIZE) -> int:
    value = same_by_layer(config.get(key))
    if type(value) is not int or not 0 < value <= limit:
        raise FormatError(f"{where}: {key} is {value!r:.99}, expected an integer in 1..{limit}")
    return value


def _expert_count(config: dict[str, Any], where: str) -> int:
    keys = [key for key in _EXPERT_COUNTS if config.get(key) is not None] or [_EXPERT_COUNTS[0]]
    counts = {key: _size(config, key, where, _MAX_EXPERTS) for key in keys}
    if len(set(counts.values())) > 1:
        raise FormatError(f"{where}: the number of experts is in conflict: {counts}")
    return counts[keys[0]]


def _expected_layers(
    config: dict[str, Any], rule: LayerRule, count: int, where: str
) -> tuple[int, ...]:
    first = _number(config, rule.first, 0, where)
    last = _number(config, rule.last, -1, where, least=-1)
    last = count - 1 if last == -1 else last
    flags = _flags(config, rule.step, count, where)
    step = _number(config, rule.step, 1, where, least=1) if flags is None else 1
    offset = rule.offset if type(rule.offset) is int else _number(config, rule.offset, 0, where)
    dense = _list(config, rule.dense, int, where)
    kinds = _list(config, rule.kinds, str, where) or ["sparse"] * count
    if len(kinds) != count:
        raise FormatError(f"{where}: {rule.kinds} has {len(kinds)} entries for {count} layers")
    listed = _list(config, rule.listed, int, where)
    layers = tuple(
        n
        for n in range(count)
        if (first <= n <= last and (n - offset) % step == 0 and n not in dense)
        and kinds[n] != "dense"
        and (flags is None or flags[n])
    )
    layers = tuple(sorted(set(listed) & set(range(count)))) if listed else layers
    if not layers:
        raise FormatError(f"{where} describes no layer with routed experts")
    return layers


def _flags(config: dict[str, Any], key: str | None, count: int, where: str) -> list[int] | None:
    """A list by layer of 1 where there are experts and 0 where not, None where there is none."""
    value = config.get(key) if key is not None else None
    if not isinstance(value, list):
        return None
    if len(value) != count or not all(type(flag) is int and flag in (0, 1) for flag in value):
        raise FormatError(f"{where}: {key} is {value!r:.99}, expected 0 or 1 for {count} layers")
    return value


def _number(
    config: dict[str, Any], key: str | None, default: int, where: str, least: int = 0
) -> int:
    """A count of layers, `default` where the family or the config has no such key."""
    value = config.get(key) if key is not None else None
    if value is None:
        return default
    if type(value) is not int or not least <= value <= MAX_LAYERS:
        raise FormatError(f"{where}: {key} is {value!r:.99}, expected a number of layers")
    return value


def _list(config: dict[str, Any], key: str | None, kind: type, where: str) -> list[Any]:
    value = (config.get(key) if key is not None else None) or []
    if not isinstance(value, list) or not all(type(item) is kind for item in value):
        raise FormatError(f"{where}: {key} is {value!r:.99}, expected a list by layer")
    return value
