"""Tiny checkpoints in Hub layout, made from a random generator."""

import json
import string
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

HIDDEN, INTERMEDIATE, LAYERS, EXPERTS, TOPK, VOCABULARY = 128, 256, 2, 4, 2, 64
INDEX = "model.safetensors.index.json"
ALPHABET = string.ascii_letters + string.digits + " ."
PARTS = ("gate_proj", "up_proj", "down_proj")
# How expert_key names them, for a manifest.
NAMED = {"layout": "each", "prefix": "model.", "mtp_layout": None}


def expert_key(layer: int, expert: int, part: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"


def config(**changes: object) -> dict:
    """config.json of a Qwen3-MoE model of the sizes above. A change to None removes the key."""
    value = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": 128,
        "mlp_only_layers": [],
        "moe_intermediate_size": INTERMEDIATE,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOPK,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": VOCABULARY,
    }
    value.update(changes)
    return {key: item for key, item in value.items() if item is not None}


def tensors(
    *,
    layers: int = LAYERS,
    experts: int = EXPERTS,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """All tensors of such a model, bfloat16, small normal values."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return (0.05 * torch.randn(*shape, generator=generator)).to(torch.bfloat16)

    value = {
        "model.embed_tokens.weight": draw(VOCABULARY, hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "lm_head.weight": draw(VOCABULARY, hidden),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, shape in (
            ("self_attn.q_proj", (128, hidden)),
            ("self_attn.k_proj", (64, hidden)),
            ("self_attn.v_proj", (64, hidden)),
            ("self_attn.o_proj", (hidden, 128)),
            ("mlp.gate", (experts, hidden)),
        ):
            value[f"{prefix}.{name}.weight"] = draw(*shape)
        for name, size in (
            ("self_attn.q_norm", 32),
            ("self_attn.k_norm", 32),
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
        ):
            value[f"{prefix}.{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)
        for expert in range(experts):
            for part in PARTS:
                shape = (hidden, intermediate) if part == "down_proj" else (intermediate, hidden)
                value[expert_key(layer, expert, part)] = draw(*shape)
    return value


def write_checkpoint(
    path: Path,
    *,
    config_value: dict | None = None,
    weights: dict[str, torch.Tensor] | None = None,
    shards: int = 2,
    shard_of: dict[str, int] | None = None,
) -> Path:
    """Write config.json, shards and an index.

    shard_of: the shard (from 1) of some tensors; the others are dealt out in order of names.
    """
    path.mkdir(parents=True)
    weights = tensors() if weights is None else weights
    place = {name: 1 + i % shards for i, name in enumerate(sorted(weights))} | (shard_of or {})
    files = {n: f"model-{n:05d}-of-{shards:05d}.safetensors" for n in range(1, shards + 1)}
    for number, file in files.items():
        part = {name: tensor for name, tensor in weights.items() if place[name] == number}
        save_file(part, path / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in weights.values())},
        "weight_map": {name: files[place[name]] for name in weights},
    }
    (path / INDEX).write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps(config_value or config()))
    (path / "generation_config.json").write_text('{"eos_token_id": 0}\n')
    return path


def write_tokenizer(folder: Path) -> None:
    """One token for each character of the alphabet."""
    vocabulary = {character: number for number, character in enumerate(ALPHABET)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def write_mixtral(path: Path) -> Path:
    """A Mixtral checkpoint of one layer of two experts."""
    weights = tensors(layers=1, experts=2)
    for old in [name for name in weights if ".mlp." in name or "_norm.weight" in name]:
        new = old.replace(".mlp.", ".block_sparse_moe.")
        for part, short in zip(PARTS, ("w1", "w3", "w2"), strict=True):
            new = new.replace(part, short)
        if "q_norm" not in old and "k_norm" not in old:
            weights[new] = weights[old]
        if new != old or "q_norm" in old or "k_norm" in old:
            del weights[old]
    value = config(
        architectures=["MixtralForCausalLM"],
        model_type="mixtral",
        num_hidden_layers=1,
        num_local_experts=2,
        num_experts=None,
        num_experts_per_tok=1,
        sliding_window=None,
    )
    return write_checkpoint(path, config_value=value, weights=weights)


def edit_json(path: Path, edit: Callable[[dict], object]) -> None:
    """Apply edit(value) in place to a JSON file."""
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))
