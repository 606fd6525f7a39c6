"""The table of architectures: how each family names its experts and what config.json says."""

from dataclasses import dataclass, replace

from qsrt_pack.source.naming import Layout


@dataclass(frozen=True)
class LayerRule:
    """Which layers have experts, by keys of config.json; one that is not there rules nothing out.

    Layer l has them if first <= l <= last, (l - offset) is a multiple of step, it is not listed
    under dense, and kinds, a list, does not say "dense" for it.   last: -1 for the last of all.
    step: may also hold a list by layer, of 1 for those with experts.   offset: a key, or the number
    itself.   listed: of the layers with experts; where it is set, nothing else counts.
    """

    first: str | None = None
    last: str | None = None
    step: str | None = None
    offset: str | int = 0
    dense: str | None = None
    kinds: str | None = None
    listed: str | None = None

    def keys(self) -> set[str]:
        """The keys of config.json that it reads."""
        values = (self.first, self.last, self.step, self.offset, self.dense, self.kinds)
        return {key for key in (*values, self.listed) if isinstance(key, str)}


@dataclass(frozen=True)
class Architecture:
    """How one family names its experts. Keys are those of config.json.

    layouts: in which its experts are read.   router: the name of the router's weight, [E, H],
    below the layer's.   intermediate, topk, activation: their keys; an activation of None is SiLU.
    layers: the rule that leaves layers dense, where the family has it.
    """

    layouts: tuple[Layout, ...]
    router: str = "mlp.gate.weight"
    intermediate: str = "moe_intermediate_size"
    topk: str = "num_experts_per_tok"
    activation: str | None = "hidden_act"
    activations: tuple[str, ...] = ("silu",)
    layers: LayerRule = LayerRule()

    def keys(self) -> set[str]:
        """The keys of config.json that it reads of all."""
        return {self.intermediate, self.topk, *self.layers.keys()} | (
            {self.activation} if self.activation else set()
        )


def _layouts(block: str, gate: str, up: str, down: str) -> tuple[Layout, ...]:
    """One tensor for each expert and matrix, and transformers' own stacks in memory."""
    expert = f"{block}.experts.{{expert}}"
    each = Layout("each", *(f"{expert}.{part}.weight" for part in (gate, up, down)))
    return each, _stacked(f"{block}.experts.gate_up_proj", f"{block}.experts.down_proj")


def _stacked(gate_up: str, down: str) -> Layout:
    return Layout("stacked", gate_up, gate_up, down)


def _transposed(stacked: Layout) -> Layout:
    return replace(stacked, name="transposed", is_transposed=True)


_PROJ = ("gate_proj", "up_proj", "down_proj")
_MLP = _layouts("mlp", *_PROJ)
_W = _layouts("block_sparse_moe", "w1", "w3", "w2")
_LLAMA4 = _stacked("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj")
_BY_KIND = LayerRule("first_k_dense_replace", step="moe_layer_freq", kinds="mlp_layer_types")
_QWEN = Architecture(
    _MLP, layers=LayerRule(step="decoder_sparse_step", offset=-1, dense="mlp_only_layers")
)
_DEEPSEEK = Architecture(_MLP, layers=_BY_KIND)
_NAMES_ONLY = replace(_DEEPSEEK, layouts=_MLP[:1])  # transformers lacks their classes
_PLAIN = Architecture(_MLP)
_MIXTRAL = Architecture(_W, router="block_sparse_moe.gate.weight", intermediate="intermediate_size")
_GRANITE = Architecture(
    (_stacked("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),),
    router="block_sparse_moe.router.layer.weight",
    intermediate="intermediate_size",
)
ARCHITECTURES = {  # by the model_type of the text model
    "afmoe": Architecture(
        _MLP, router="mlp.router.gate.weight", layers=LayerRule("num_dense_layers")
    ),
    "bailing_hybrid": Architecture(_MLP, topk="num_experts_per_token", layers=_BY_KIND),
    "bailing_moe": _NAMES_ONLY,
    "bailing_moe_v2": _NAMES_ONLY,
    "cohere2_moe": replace(_DEEPSEEK, intermediate="intermediate_size"),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "dots1": _DEEPSEEK,
    "ernie4_5_moe": Architecture(
        _MLP,
        topk="moe_k",
        layers=LayerRule(
            "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval", offset=-1
        ),
    ),
    "exaone_moe": _DEEPSEEK,
    "flex_olmo": replace(_PLAIN, intermediate="intermediate_size"),
    "glm4_moe": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "glm4v_moe_text": _DEEPSEEK,
    "glm_moe_dsa": _DEEPSEEK,
    "granitemoe": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "granitemoeshared": _GRANITE,
    "hunyuan_v1_moe": Architecture(
        _MLP,
        router="mlp.gate.wg.weight",
        intermediate="intermediate_size",
        topk="moe_topk",
    ),
    "hy_v3": Architecture(_MLP, router="mlp.router.gate.weight", layers=_BY_KIND),
    "jamba": Architecture(
        _layouts("feed_forward", *_PROJ),
        router="feed_forward.router.weight",
        intermediate="intermediate_size",
        layers=LayerRule(step="expert_layer_period", offset="expert_layer_offset"),
    ),
    "kimi_k2": _NAMES_ONLY,
    "kimi_linear": replace(
        _MIXTRAL,
        intermediate="moe_intermediate_size",
        topk="num_experts_per_token",
        layers=_BY_KIND,
    ),
    "lfm2_moe": Architecture(
        _layouts("feed_forward", "w1", "w3", "w2"),
        router="feed_forward.gate.weight",
        activation=None,
        layers=LayerRule("num_dense_layers"),
    ),
    "llama4_text": Architecture(
        (_transposed(_LLAMA4),),
        router="feed_forward.router.weight",
        intermediate="intermediate_size",
        layers=LayerRule(step="interleave_moe_layer_step", offset=-1, listed="moe_layers"),
    ),
    "mellum": _DEEPSEEK,
    "mimo_v2_flash": _DEEPSEEK,
    "minimax": _MIXTRAL,
    "minimax_m2": _MIXTRAL,
    "mixtral": _MIXTRAL,
    "olmoe": replace(_PLAIN, intermediate="intermediate_size"),
    "phimoe": _MIXTRAL,
    "qwen2_moe": _QWEN,
    "qwen3_5_moe_text": _PLAIN,
    "qwen3_moe": _QWEN,
    "qwen3_next": _QWEN,
    "qwen3_vl_moe_text": replace(_QWEN, layouts=(_MLP[1], _transposed(_MLP[1]))),
    "solar_open": _DEEPSEEK,
}
# Those of which a layer alone, as a model of one layer, is what it is in the whole model.
CALIBRATED = frozenset(
    {
        *("bailing_hybrid", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1"),
        *("ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite"),
        *("hunyuan_v1_moe", "hy_v3", "kimi_linear", "lfm2_moe", "mellum", "mimo_v2_flash"),
        *("minimax", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe"),
        *("qwen3_next", "solar_open"),
    }
)
