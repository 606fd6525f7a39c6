"""A tiny random model of every architecture of the table, by transformers' own classes."""

from dataclasses import dataclass, field

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "num_experts": 2,
    "num_local_experts": 2,
    "n_routed_experts": 2,
    "moe_num_experts": 2,
    "num_experts_per_tok": 1,
    "num_experts_per_token": 1,
    "moe_k": 1,
    "moe_topk": 1,
    "max_position_embeddings": 64,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


@dataclass(frozen=True)
class Kind:
    """How a tiny model of an architecture is made.

    layers: that then have experts. One has none where that can be.   changes: to SIZES.
    text: the model_type of the text model, where the kind is a model of images and text.
    vision: its vision_config.   layout: of what transformers writes.   hub: a part of the names
    that transformers writes and what the Hub's files have there, where it reads these alone.
    """

    layers: tuple[int, ...] = (0,)
    changes: dict = field(default_factory=dict)
    text: str | None = None
    vision: dict = field(default_factory=dict)
    layout: str = "each"
    hub: tuple[str, str] | None = None


ONE = {"num_hidden_layers": 1}
BY_KIND = {"mlp_layer_types": ["dense", "sparse"]}
FIRST_DENSE = {"first_k_dense_replace": 1}
LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
INDEXER = {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 16}
ROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 3, 3],
    }
}
LLAMA4 = {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 256, "moe_layers": None}
VISION = {
    "depth": 1,
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "num_attention_heads": 2,
    "out_hidden_size": 128,
    "patch_size": 4,
    "image_size": 8,
}
KINDS = {
    "mixtral": Kind(changes=ONE),
    "phimoe": Kind(changes=ONE),
    "minimax": Kind(changes=ONE),
    "minimax_m2": Kind(changes={**ONE, "rotary_dim": 32}),
    "qwen2_moe": Kind((1,), {"mlp_only_layers": [0]}),
    "qwen3_moe": Kind((1,), {"decoder_sparse_step": 2}),
    "qwen3_next": Kind((1,), {"decoder_sparse_step": 2, **LINEAR}),
    "qwen3_5_moe": Kind(
        changes={**ONE, **LINEAR, "layer_types": ["full_attention"]},
        text="qwen3_5_moe_text",
        vision=VISION,
    ),
    "qwen3_vl_moe": Kind(
        (1,),
        {"decoder_sparse_step": 2},
        text="qwen3_vl_moe_text",
        vision={**VISION, "deepstack_visual_indexes": [0]},
        layout="stacked",
    ),
    "olmoe": Kind(changes=ONE),
    "flex_olmo": Kind(changes=ONE),
    "mellum": Kind((1,), BY_KIND),
    "hunyuan_v1_moe": Kind(changes=ONE),
    "hy_v3": Kind((1,), BY_KIND),
    "ernie4_5_moe": Kind((1,), {"moe_layer_end_index": 1}),
    "jamba": Kind(
        (1,), {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
    ),
    "deepseek_v2": Kind((1,), LATENT),
    "deepseek_v3": Kind((1,), LATENT),
    "deepseek_v32": Kind((1,), {**LATENT, **BY_KIND, **INDEXER}),
    "kimi_linear": Kind((1,), {**LATENT, **BY_KIND, "linear_num_heads": 2, "linear_head_dim": 32}),
    "dots1": Kind((1,), {"n_shared_experts": 1, **FIRST_DENSE}),
    "glm4_moe": Kind((1,), FIRST_DENSE),
    "glm4_moe_lite": Kind((1,), {**LATENT, **BY_KIND}),
    "glm4v_moe": Kind((1,), {**FIRST_DENSE, **ROPE}, text="glm4v_moe_text", vision=VISION),
    "kimi_k25": Kind(
        (1,),
        LATENT,
        text="deepseek_v3",
        vision=VISION,
        hub=("language_model.model.blocks.", "language_model.model.layers."),
    ),
    "glm_moe_dsa": Kind((1,), {**LATENT, **BY_KIND, **INDEXER}),
    "afmoe": Kind((1,), {"num_dense_layers": 1}),
    "bailing_hybrid": Kind((1,), {**LATENT, **FIRST_DENSE, "num_expert_group": 1}),
    "cohere2_moe": Kind((1,), BY_KIND),
    "exaone_moe": Kind((1,), {**BY_KIND, "n_group": 1}),
    "mimo_v2_flash": Kind((1,), BY_KIND),
    "solar_open": Kind(changes=ONE),
    "lfm2_moe": Kind((1,), {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]}),
    "granitemoe": Kind(changes=ONE, layout="stacked"),
    "granitemoeshared": Kind(changes={**ONE, "shared_intermediate_size": 64}, layout="stacked"),
    "granitemoehybrid": Kind(
        changes={**ONE, "shared_intermediate_size": 64, "layer_types": ["attention"]},
        layout="stacked",
    ),
    "llama4_text": Kind((1,), LLAMA4, layout="transposed"),
    "llama4": Kind(
        (1,),
        LLAMA4,
        text="llama4_text",
        vision={**VISION, "vision_output_dim": 32, "projector_input_dim": 32},
        layout="transposed",
    ),
}
# Refused: experts that the format cannot say.
REFUSED = {
    "gpt_oss": Kind(changes=ONE),
    "nemotron_h": Kind(
        changes={"layers_block_type": ["moe"], "moe_shared_expert_intermediate_size": 64}
    ),
}
# Those whose class transformers lacks: the same names and config as another's.
NAMES_ONLY = {"kimi_k2": "deepseek_v3", "bailing_moe": "glm4_moe", "bailing_moe_v2": "glm4_moe"}
IDS = torch.arange(24)[None] % 96


def make_config(name, **changes):
    """changes: to the kind's own, of those keys that the config has."""
    kind = (KINDS | REFUSED)[name]
    text = kind.text or name
    defaults = AutoConfig.for_model(text).to_dict()
    values = {key: value for key, value in SIZES.items() if key in defaults} | kind.changes
    values |= {key: value for key, value in changes.items() if key in defaults}
    values |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    if kind.text is None:
        return AutoConfig.for_model(name, **values)
    known = AutoConfig.for_model(name).vision_config.to_dict()
    vision = {key: value for key, value in kind.vision.items() if key in known}
    values["model_type"] = text
    return AutoConfig.for_model(name, text_config=values, vision_config=vision)


def write_model(path, name, **changes):
    """A checkpoint of random weights by transformers' own class; returns the model.

    changes: as make_config takes them.
    """
    kind = (KINDS | REFUSED)[name]
    torch.manual_seed(0)
    auto = AutoModelForCausalLM if kind.text is None else AutoModelForImageTextToText
    model = auto.from_config(make_config(name, **changes)).to(torch.bfloat16).eval()
    model.save_pretrained(path)
    if kind.hub is not None:
        tensors = {key.replace(*kind.hub): tensor for key, tensor in tensors_of(path).items()}
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return model.float()


def tensors_of(path):
    return {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}
