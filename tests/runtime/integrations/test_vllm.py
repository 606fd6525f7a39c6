"""Packages in stock vLLM, its own layers and its own server; tests/run_vllm runs this file."""

import json
import os
import socket
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from packages import write_package
from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM
from vllm.config import LoRAConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.fused_moe import FusedMoEFactory, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe import config as fused_moe_config
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod
from vllm.plugins import load_plugins_by_group

import qsrt_runtime.integrations.transformers  # noqa: F401, registers with transformers
from qsrt_pack import job
from qsrt_pack.encode.expert import Settings
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import Geometry, TrueSizes
from qsrt_runtime.format.manifest import DENSE_QUANTIZATION
from qsrt_runtime.integrations.vllm import QsrtConfig, QsrtMoEMethod, expert_range, register
from qsrt_runtime.load import load_package
from qsrt_runtime.moe import moe_forward

PREFIX = "model.layers.1.mlp.experts"
BY_EXPERTS = {"enable_expert_parallel": True}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Two layers of 5 experts of 3 pairs."""
    path = tmp_path_factory.mktemp("wide") / "package"
    return write_package(path, Geometry(128, 768, 5), layers=(0, 1))


@pytest.fixture
def build(monkeypatch, wide):
    """build(rank=, parallel=, lora=, model=, cache=, ...): vLLM's own layer, loaded, as its model
    classes make it; as one of several ranks where options say so."""
    group = SimpleNamespace(rank_in_group=0)
    for name in ("get_dp_group", "get_pcp_group"):
        monkeypatch.setattr(fused_moe_config, name, lambda: group)

    def build(*, rank=0, parallel=None, lora=None, model=wide, cache=None, **options):
        monkeypatch.setattr(fused_moe_config, "get_tensor_model_parallel_rank", lambda: rank)
        quantization_config = json.loads((wide / "config.json").read_text())
        config = QsrtConfig.from_config(quantization_config["quantization_config"])
        config.maybe_update_config(str(model))
        whole = VllmConfig()
        whole.load_config.download_dir, whole.lora_config = cache, lora
        for name, value in (parallel or {}).items():
            setattr(whole.parallel_config, name, value)
        given = {"num_experts": 5, "top_k": 2, "hidden_size": 128, "intermediate_size": 768}
        given |= {"tp_size": 1, "dp_size": 1, "pcp_size": 1, "prefix": PREFIX} | options
        with set_current_vllm_config(whole):
            runner = FusedMoEFactory(**given, params_dtype=torch.float32, quant_config=config)
        layer = runner.routed_experts
        layer.quant_method.process_weights_after_loading(layer)
        return layer

    return build


def batch(tokens=6, topk=2):
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(tokens, 5, generator=generator)
    weights, ids = scores.topk(topk)
    return torch.randn(tokens, 128, generator=generator), weights, ids.int()


def apply(layer, x, weights, ids):
    return layer.quant_method.apply(layer, x, weights, ids, None, None)


def close(found, expected):
    return ((found - expected).norm() / expected.norm()).item() < 1e-5


def test_entry_point():
    assert load_plugins_by_group("vllm.general_plugins")["qsrt"] is register
    for _ in range(2):
        register()
    assert quantization.QUANTIZATION_METHODS.count("qsrt") == 1
    assert quantization.get_quantization_config("qsrt") is QsrtConfig


def test_which_packages_are_ours():
    probe = QsrtConfig.override_quantization_method
    assert probe({"quant_method": "qsrt", "qsrt": {}}, None) == "qsrt"
    assert probe({"quant_method": "modelopt", "quant_algo": "NVFP4", "qsrt": {}}, None) == "qsrt"
    assert probe({"quant_method": "modelopt", "quant_algo": "NVFP4"}, None) is None
    assert probe({"quant_method": "fp8", "qsrt": {}}, None) is None


@pytest.mark.parametrize("key", ["dense_format", DENSE_QUANTIZATION])
def test_quantization_of_other_tensors_is_refused(key):
    with pytest.raises(FormatError, match=f"quantization_config has {key}: tensors that are no"):
        QsrtConfig.from_config({"quant_method": "qsrt", "qsrt": {}, key: "mxfp8"})


def test_quantization_that_is_none_of_ours():
    with pytest.raises(FormatError, match="quantization_config has no qsrt block"):
        QsrtConfig.from_config({"quant_method": "qsrt"})


def test_a_layer_is_moe_forward(build, wide):
    layer = build()
    assert isinstance(layer.quant_method, QsrtMoEMethod)
    assert not list(layer.parameters())
    x, weights, ids = batch()
    expected = moe_forward(x, load_package(wide).layers[1], ids, weights)
    assert torch.equal(apply(layer, x, weights, ids), expected)
    assert expected.any()
    stored = dict(layer.named_buffers())["qsrt_atoms"]
    assert stored.data_ptr() == layer.quant_method.weights.atoms.data_ptr()


@pytest.mark.parametrize("is_padded", [False, True])
def test_the_kernels_way(build, wide, tmp_path, is_padded):
    """What a GPU does, by Triton's interpreter: more tokens than the workspace has room for."""
    path, options, x = wide, {}, batch(tokens=17)[0]
    if is_padded:
        sizes = TrueSizes(100, 600)
        path = write_package(tmp_path / "package", sizes.padded(5), layers=(1,), true_sizes=sizes)
        options = {"model": path, "hidden_size": 100, "intermediate_size": 600}
        x = x[:, :100]
    layer = build(apply_router_weight_on_input=True, **options)
    _, weights, ids = batch(tokens=17)
    expected = moe_forward(x, load_package(path).layers[1], ids, weights, weight_on_input=True)
    assert torch.equal(apply(layer, x, weights, ids), expected)
    method = layer.quant_method
    method.workspace = method.config.workspace(method.weights, 2, torch.float16)
    assert method.workspace is method.config.workspace(method.weights, 2, torch.float16)
    found = apply(layer, x.half(), weights, ids)
    assert ((found - expected).norm() / expected.norm()).item() < 6e-4


def test_hub_repository(build, wide, hub_snapshot, tmp_path):
    snapshot = hub_snapshot(wide)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text(snapshot.name)
    layer = build(model="owner/name", cache=str(tmp_path))
    assert torch.equal(layer.qsrt_atoms, load_package(wide).layers[1].atoms)


@pytest.mark.parametrize("value", [0.25, 4.0])
def test_router_weight_on_input(build, value):  # RT-8a
    after, before = build(), build(apply_router_weight_on_input=True)
    x, _, ids = batch(topk=1)
    one, weights = torch.ones(6, 1), torch.full((6, 1), value)
    assert torch.equal(apply(after, x, weights, ids), value * apply(after, x, one, ids))
    assert torch.equal(apply(before, x, weights, ids), apply(after, value * x, one, ids))


def test_router_weight_on_input_with_two_experts(build):  # RT-8b
    after, before = build(), build(apply_router_weight_on_input=True)
    x, weights, ids = batch()
    one = torch.ones(6, 1)
    expected = sum(apply(after, x * weights[:, c, None], one, ids[:, c, None]) for c in (0, 1))
    assert close(apply(before, x, weights, ids), expected)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("by_experts", [False, True])
def test_ranks_add_up(build, ranks, by_experts):  # RT-11a
    x, weights, ids = batch()
    options = {"tp_size": ranks, "parallel": BY_EXPERTS if by_experts else None}
    shares = [build(rank=rank, **options) for rank in range(ranks)]
    assert close(
        sum(apply(layer, x, weights, ids) for layer in shares), apply(build(), x, weights, ids)
    )
    held = [layer.quant_method.weights.atoms.nbytes for layer in shares]
    size, slots = Geometry(128, 768, 5).bundle_bytes, [16, 8] if ranks == 2 else [8, 8, 8]
    experts = [3, 2] if ranks == 2 else [2, 2, 1]
    stride = Geometry(128, 768, 5).slot_stride(5)
    assert held == ([24 * n * size for n in experts] if by_experts else [n * stride for n in slots])


def test_more_ranks_than_pairs(build):  # RT-11a
    with pytest.raises(ValueError, match="world_size is 4; experts of 768 channels have 3 pairs"):
        build(tp_size=4)


def test_more_ranks_than_experts(build):
    with pytest.raises(ValueError, match=r"a rank has experts \[\] of 5"):
        build(rank=5, tp_size=6, parallel=BY_EXPERTS)


def test_experts_that_do_not_follow_each_other():
    with pytest.raises(ValueError, match=r"experts \[0, 2\] of 4, .* placement strategy linear"):
        expert_range(torch.tensor([0, -1, 1, -1]), 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "gelu"}, "has the activation gelu, packed is silu"),
        ({"activation": "swigluoai"}, "has the activation swigluoai, packed is silu"),
        ({"activation": "situ"}, "has the activation situ, packed is silu"),
        ({"activation_situ_beta": 2.0}, "activation_situ_beta is 2.0, packed experts run 4.0"),
        ({"swiglu_limit": 7.0}, "do not run with a clamped SwiGLU"),
        ({"has_bias": True}, "do not run with biases"),
        ({"lora": LoRAConfig(max_lora_rank=8)}, "do not run with LoRA adapters"),
        (
            {"tp_size": 2, "parallel": BY_EXPERTS, "is_sequence_parallel": True},
            "do not run with sequence parallelism",
        ),
        ({"dp_size": 2}, "do not run with data parallelism"),
        ({"pcp_size": 2}, "do not run with prefill context parallelism"),
        ({"parallel": {"enable_dbo": True}}, "do not run with dual batch overlap"),
        ({"num_experts": 6}, "vLLM has 6 experts, packed are 5"),
        ({"hidden_size": 256}, "vLLM has 256 hidden channels, packed are 128"),
        ({"intermediate_size": 512}, "vLLM has 512 intermediate channels, packed are 768"),
        ({"prefix": "experts"}, "experts does not say of which layer"),
    ],
)
def test_refusals(build, options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_moving_experts_is_refused(build):
    options = {"parallel": BY_EXPERTS | {"enable_eplb": True}, "enable_eplb": True}
    with pytest.raises(NotImplementedError, match="EPLB is not supported QsrtMoEMethod"):
        build(tp_size=2, num_redundant_experts=1, **options)


def test_everything_else_is_not_quantized(build, wide):
    assert type(build(prefix="model.layers.2.experts").quant_method) is UnquantizedFusedMoEMethod
    config = QsrtConfig.from_config({"quant_method": "qsrt", "qsrt": {}})
    linear = ReplicatedLinear.__new__(ReplicatedLinear)  # the kind is all that is looked at
    assert type(config.get_quant_method(linear, "layers.0.x")) is UnquantizedLinearMethod
    assert config.get_quant_method(torch.nn.Embedding(2, 2), "embed_tokens") is None


def test_types_it_runs_in():
    config = QsrtConfig.from_config({"quant_method": "qsrt", "qsrt": {}})
    assert torch.float64 not in config.get_supported_act_dtypes()
    assert {torch.float32, torch.bfloat16} < set(config.get_supported_act_dtypes())


# From here on whole models, in processes of vLLM's own.

TOKENS, ENGINE = 64, {"dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 256}
GENERATE = """
    import json, sys
    from vllm import LLM, SamplingParams

    path, prompts, out, options = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], sys.argv[4]
    model = LLM(path, **json.loads(options))
    sampling = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
    done = model.generate([{"prompt_token_ids": p} for p in prompts], sampling)
    json.dump([list(one.outputs[0].token_ids) for one in done], open(out, "w"))
"""


def environment():
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return os.environ | own | {"TRITON_INTERPRET": "0", "VLLM_NO_USAGE_STATS": "1"}


def make_prompts(package):
    vocabulary = json.loads((package / "config.json").read_text())["vocab_size"]
    return torch.randint(vocabulary, (8, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def expected():
    """expected(package): 64 greedy tokens of transformers for each of 8 prompts, computed once."""
    known = {}

    def greedy(package):
        if package not in known:
            prompts = make_prompts(package)
            model = AutoModelForCausalLM.from_pretrained(package, dtype=torch.float32)
            options = {"do_sample": False, "max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
            done = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
            known[package] = done[:, prompts.shape[1] :].tolist()
            assert len({tuple(row) for row in known[package]}) == 8  # texts, not one token
        return known[package]

    return greedy


def generate(package, out, **options):
    command = [sys.executable, "-c", textwrap.dedent(GENERATE), str(package)]
    command += [json.dumps(make_prompts(package).tolist()), str(out), json.dumps(ENGINE | options)]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True)
    return ran, json.loads(out.read_text()) if ran.returncode == 0 else None


@contextmanager
def serving(package, log):
    """`vllm serve PACKAGE` on a free port; gives its address once it answers.

    By its module: the command itself stops in vllm-cpu 0.32.0, whose distribution is not `vllm`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in ENGINE.items()]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(package)]
    address = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, *flags, "--host=127.0.0.1", f"--port={port}"],
            env=environment(),
            stdout=output,
            stderr=output,
        )
        try:
            while server.poll() is None:
                try:
                    urllib.request.urlopen(f"{address}/health")
                    break
                except urllib.error.URLError:
                    time.sleep(1)
            assert server.poll() is None, log.read_text()[-3000:]
            yield address
        finally:
            server.terminate()
            server.wait()


def test_server(example, tmp_path, expected):
    _, package = example
    asked = {
        "model": str(package),
        "prompt": make_prompts(package).tolist(),
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    with serving(package, tmp_path / "log") as address:
        request = urllib.request.Request(
            f"{address}/v1/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        answer = json.load(urllib.request.urlopen(request))
    found = sorted(answer["choices"], key=lambda choice: choice["index"])
    assert [choice["token_ids"] for choice in found] == expected(package)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tensor_parallel_size": 2, "enforce_eager": True},
        {"tensor_parallel_size": 2, "enforce_eager": True, "enable_expert_parallel": True},
    ],
    ids=["compiled", "by pairs", "by experts"],
)
def test_trained_model(trained, tmp_path, expected, options):
    ran, found = generate(trained[1], tmp_path / "tokens", **options)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert found == expected(trained[1])


def test_in_the_published_spelling(example, tmp_path, expected):
    source, package = example
    other = tmp_path / "kquant"
    job.run(
        job.prepare(source, other, Settings(search="fast"), loader="kquant"), show_progress=False
    )
    stated = json.loads((other / "config.json").read_text())["quantization_config"]
    assert stated["quant_method"] == "modelopt"
    ran, found = generate(other, tmp_path / "tokens", enforce_eager=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert found == expected(package)


def test_shared_experts_are_added_once(tmp_path, expected):  # RT-11c
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 512}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2MoeConfig(
        **(sizes | counts),
        shared_expert_intermediate_size=256,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=256,
        max_position_embeddings=128,
        initializer_range=0.1,
    )
    Qwen2MoeForCausalLM(config).save_pretrained(tmp_path / "model")
    package = tmp_path / "package"
    job.run(job.prepare(tmp_path / "model", package, Settings(search="fast")), show_progress=False)
    options = {"tensor_parallel_size": 2, "enforce_eager": True, "skip_tokenizer_init": True}
    ran, found = generate(package, tmp_path / "tokens", **options)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert found == expected(package)


def test_model_with_fewer_pairs_than_ranks(example, tmp_path):  # RT-11a
    ran, _ = generate(example[1], tmp_path / "tokens", tensor_parallel_size=2, enforce_eager=True)
    assert ran.returncode != 0
    said = "world_size is 2; experts of 256 channels have 1 pairs, of which each rank owns at least"
    assert said in ran.stdout + ran.stderr
