"""Every architecture of the table as transformers writes it: packed, decoded, loaded, run."""

import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from qsrt_pack import job
from qsrt_pack.calibration_input import read_input
from qsrt_pack.encode.expert import Settings
from qsrt_pack.restore import decode_package
from qsrt_pack.source.checkpoint import open_checkpoint
from qsrt_pack.source.models import ARCHITECTURES, find_experts
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.integrations.transformers import PackedExperts

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
# What differs from SIZES, and the layers that then have experts. One has none where that can be.
KINDS = {
    "mixtral": ({"num_hidden_layers": 1}, (0,)),
    "phimoe": ({"num_hidden_layers": 1}, (0,)),
    "minimax_m2": ({"num_hidden_layers": 1, "rotary_dim": 32}, (0,)),
    "qwen2_moe": ({"mlp_only_layers": [0]}, (1,)),
    "qwen3_moe": ({"decoder_sparse_step": 2}, (1,)),
    "qwen3_next": (
        {
            "decoder_sparse_step": 2,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
        (1,),
    ),
    "olmoe": ({"num_hidden_layers": 1}, (0,)),
    "hunyuan_v1_moe": ({"num_hidden_layers": 1}, (0,)),
    "ernie4_5_moe": ({"moe_layer_end_index": 1}, (1,)),
    "jamba": ({"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}, (1,)),
    "deepseek_v2": (LATENT, (1,)),
    "deepseek_v3": (LATENT, (1,)),
    "dots1": ({"n_shared_experts": 1, "first_k_dense_replace": 1}, (1,)),
    "glm4_moe": ({"first_k_dense_replace": 1}, (1,)),
    "glm4_moe_lite": ({**LATENT, "mlp_layer_types": ["dense", "sparse"]}, (1,)),
    "glm_moe_dsa": (
        {
            **LATENT,
            "mlp_layer_types": ["dense", "sparse"],
            "index_head_dim": 32,
            "index_n_heads": 2,
            "index_topk": 16,
        },
        (1,),
    ),
}
IDS = torch.arange(24)[None] % 96


def write_model(path, kind):
    """A checkpoint of random weights by transformers' own class; returns the model."""
    defaults = AutoConfig.for_model(kind).to_dict()
    changes, _ = KINDS[kind]
    values = {key: value for key, value in SIZES.items() if key in defaults} | changes
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **values, **tokens)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    model.save_pretrained(path)
    return model.float()


@pytest.fixture(autouse=True)
def quiet():
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def tensors_of(path):
    return {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}


def stated(kind, repository):
    """The error of a kind's logits in README.md."""
    return float(re.search(rf"^\| `{kind}` \|.*\| ([\d.]+) \|$", readme(repository), re.M)[1])


def readme(repository):
    return (repository / "README.md").read_text()


def relative(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def logits(model):
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def test_every_architecture_is_here_and_in_the_readme(repository):
    assert set(KINDS) == set(ARCHITECTURES)
    assert set(re.findall(r"^\| `(\w+)` \| `model\.", readme(repository), re.M)) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_decoded_and_run(tmp_path, kind, repository):
    original = write_model(tmp_path / "model", kind)
    checkpoint = open_checkpoint(tmp_path / "model")
    experts = find_experts(checkpoint)
    assert experts.layers == KINDS[kind][1]
    job.run(
        job.prepare(tmp_path / "model", tmp_path / "package", Settings(search="fast")),
        show_progress=False,
    )
    decode_package(tmp_path / "package", tmp_path / "dense", dtype="float32", show_progress=False)
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "dense", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    routed = set(experts.tensor_names())
    before, after = (tensors_of(tmp_path / folder) for folder in ("model", "dense"))
    assert before.keys() == after.keys() > routed
    for name, tensor in before.items():
        error = (after[name].float() - tensor.float()).norm() / tensor.float().norm()
        assert 0.05 < error < 0.2 if name in routed else torch.equal(after[name], tensor)
    found = logits(model.eval())
    assert relative(found, logits(original)) == pytest.approx(stated(kind, repository), rel=0.5)
    packed, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "package", dtype=torch.float32, output_loading_info=True
    )
    assert sum(isinstance(m, PackedExperts) for m in packed.modules()) == len(experts.layers)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert relative(logits(packed.eval()), found) < 1e-5


def test_calibration_says_which_it_runs(tmp_path):
    write_model(tmp_path / "model", "olmoe")
    with pytest.raises(FormatError, match="calibration runs mixtral, qwen3_moe, not olmoe"):
        read_input(tmp_path / "model", tmp_path / "text", device=torch.device("cpu"))


def test_nextn_layers_are_not_dropped(tmp_path):
    """Experts beyond the layers that config.json counts are refused by name."""
    write_model(tmp_path / "model", "deepseek_v3")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.2.mlp.experts.0.up_proj.weight"
    tensors[name] = tensors["model.layers.1.mlp.experts.0.up_proj.weight"].clone()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(FormatError, match=f"{name} is an expert of layer 2, config.json has"):
        find_experts(open_checkpoint(tmp_path / "model"))
