"""Packages in transformers: loaded packed, running, and refused where they would be wrong."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from checkpoints import edit_json
from packages import write_package
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from qsrt_pack import job
from qsrt_pack.encode.expert import Settings
from qsrt_pack.restore import decode_package
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.format.manifest import IMPORT_FIRST
from qsrt_runtime.integrations import transformers as integration
from qsrt_runtime.integrations.transformers import PackedExperts, QsrtConfig

IDS = torch.arange(1, 21)[None]


def load(path, **options):
    options = {"dtype": torch.float32} | options
    return AutoModelForCausalLM.from_pretrained(path, **options)


def logits(model):
    with torch.inference_mode():
        return model(IDS.to(model.device)).logits


def close(found, expected):
    return ((found - expected).norm() / expected.norm()).item() < 1e-5


@pytest.fixture(scope="module")
def dense_logits(clean_package, tmp_path_factory):
    """Of the tiny package's decoded checkpoint."""
    out = tmp_path_factory.mktemp("dense") / "dense"
    decode_package(clean_package, out, dtype="float32", show_progress=False)
    return logits(load(out))


def child(code, *arguments, **environment):
    """Run Python code in a process of its own, which has not imported the integration."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
    )


def test_loads_whole(clean_package, dense_logits):
    model, info = load(clean_package, output_loading_info=True)
    assert {key: names for key, names in info.items() if names} == {}
    packed = [m for m in model.modules() if isinstance(m, PackedExperts)]
    assert len(packed) == 2
    assert not any(".experts." in name for name, _ in model.named_parameters())
    assert close(logits(model), dense_logits)
    assert not model.training


def expanding(path, expand="e4m3"):
    config = AutoConfig.from_pretrained(path)
    config.quantization_config["expand"] = expand
    return config


def test_loads_expanded(clean_package, dense_logits, tmp_path):
    packed = load(clean_package)
    model, info = load(clean_package, config=expanding(clean_package), output_loading_info=True)
    assert {key: names for key, names in info.items() if names} == {}
    assert torch.equal(logits(model), logits(packed))
    for found, plain in zip(model.modules(), packed.modules(), strict=True):
        if isinstance(found, PackedExperts):
            experts, weights = 4, 3 * 128 * 256
            assert plain.labels is None and "labels" not in plain.state_dict()
            assert found.labels.nbytes == experts * weights
            assert found.atoms.nbytes == 8 * experts * 192  # no words
            assert found.traits == plain.traits
    assert close(logits(model.dequantize()), dense_logits)


@pytest.mark.parametrize(
    ("block", "name"), [((), "expnd"), (("qsrt",), "expand")], ids=["misspelt", "misplaced"]
)
def test_fields_that_are_not_the_packages_are_refused(clean_package, block, name):
    config = AutoConfig.from_pretrained(clean_package)
    fields = config.quantization_config
    for key in block:
        fields = fields[key]
    fields[name] = "e4m3"
    at_fault = block[0] if block else name
    with pytest.raises(ValueError, match=f"differs from the package's in {at_fault}; `expand`"):
        load(clean_package, config=config)


def test_other_expansions_are_refused(clean_package):
    with pytest.raises(ValueError, match="expand is 'fp8', expected None or one of"):
        load(clean_package, config=expanding(clean_package, "fp8"))


def test_loads_mixtral(mixtral, tmp_path):
    model, info = load(mixtral[1], output_loading_info=True)
    assert {key: names for key, names in info.items() if names} == {}
    decode_package(mixtral[1], tmp_path / "dense", dtype="float32", show_progress=False)
    assert close(logits(model), logits(load(tmp_path / "dense")))


def greedy(model, prompts):
    return model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=64,
        min_new_tokens=64,
    )  # fmt: skip


@pytest.mark.parametrize("model", ["example", "trained"])
def test_generates_what_the_decoded_checkpoint_does(request, tmp_path, model):
    source, package = request.getfixturevalue(model)
    decode_package(package, tmp_path / "dense", dtype="float32", show_progress=False)
    vocabulary = json.loads((source / "config.json").read_text())["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(vocabulary, (8, 12), generator=generator)
    packed, dense = (greedy(load(path), prompts) for path in (package, tmp_path / "dense"))
    assert packed.shape == (8, 12 + 64)
    assert torch.equal(packed, dense)
    assert len({tuple(row) for row in packed[:, 12:].tolist()}) == 8  # texts, not one token


PEAK = """
    import sys, torch
    import qsrt_runtime.integrations.transformers
    from transformers import AutoModelForCausalLM

    def resident(name):
        lines = open("/proc/self/status").read().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)  # imports everything
    open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
    before = resident("VmRSS")
    model = AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.bfloat16)
    print(resident("VmHWM") - before)
"""


def test_dense_experts_are_never_allocated(clean_package, tmp_path):
    geometry = Geometry(512, 768, 48)
    config = AutoConfig.from_pretrained(clean_package)
    for key in ("hidden_size", "num_experts", "moe_intermediate_size"):
        size = {"hidden_size": 512, "num_experts": 48, "moe_intermediate_size": 768}[key]
        setattr(config, key, size)
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    base = {
        name: torch.zeros(tensor.shape, dtype=torch.bfloat16)
        for name, tensor in state.items()
        if ".experts." not in name
    }
    path = write_package(tmp_path / "package", geometry, layers=(0, 1), base=base)
    ran = child(PEAK, clean_package, path)
    assert ran.returncode == 0, ran.stderr
    packed = sum(p.stat().st_size for p in path.glob("qsrt-layer-*.safetensors"))
    dense = 2 * 2 * 48 * geometry.weights_per_expert
    assert dense > 220e6
    # The checks map each layer file once more; with them it is still less than half.
    assert packed < int(ran.stdout) < 2 * packed + 20e6 < dense / 2


PLAIN = """
    import sys, torch
    from transformers import AutoModelForCausalLM
    model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
    print(sorted(info["missing_keys"]))
"""


def test_transformers_alone_stops(clean_package):
    ran = child(PLAIN, clean_package)
    assert ran.returncode == 1
    assert IMPORT_FIRST in ran.stderr.splitlines()[-1]
    assert ran.stdout == ""


def test_what_the_entry_in_config_prevents(package):
    """Without it transformers warns, and starts the experts at random."""
    edit_json(package / "config.json", lambda config: config.pop("transformers_weights"))
    ran = child(PLAIN, package)
    assert ran.returncode == 0, ran.stderr
    assert "Unknown quantization type, got qsrt" in ran.stderr
    assert "model.layers.0.mlp.experts.gate_up_proj" in ran.stdout


def test_hub_repository(clean_package, hub_snapshot, tmp_path, dense_logits):
    snapshot = hub_snapshot(clean_package)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text(snapshot.name)
    model = load("owner/name", cache_dir=tmp_path)
    assert close(logits(model), dense_logits)
    ran = child(PLAIN.replace("sys.argv[1]", "'owner/name', cache_dir=sys.argv[1]"), tmp_path)
    assert ran.returncode == 1
    assert IMPORT_FIRST in ran.stderr


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, "auto"])
def test_device_map(clean_package, dense_logits, device_map):
    model = load(clean_package, device_map=device_map)
    for module in model.modules():
        if isinstance(module, PackedExperts):
            assert {buffer.device for buffer in module.buffers()} == {model.device}
    assert close(logits(model), dense_logits)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"device_map": "cuda"}, {"device_map": "auto"}, {}])
def test_on_a_gpu(clean_package, dense_logits, options):
    model = load(clean_package, **options).to("cuda")
    found = logits(model).cpu()
    assert ((found - dense_logits).norm() / dense_logits.norm()).item() < 1e-3


def test_offloading_is_refused(clean_package, tmp_path):
    device_map = {"model": "cpu", "lm_head": "disk"}
    with pytest.raises(ValueError, match="packed experts cannot be offloaded"):
        load(clean_package, device_map=device_map, offload_folder=tmp_path)


def test_other_devices_are_refused(clean_package):
    with pytest.raises(ValueError, match="packed experts run on cpu and cuda, not on meta"):
        load(clean_package, device_map="meta")


def test_compiled_whole(clean_package, dense_logits):
    model = load(clean_package)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert close(compiled(IDS).logits, dense_logits)


def test_a_type_that_packed_experts_do_not_run_in(clean_package):
    with pytest.raises(ValueError, match=r"float16 and bfloat16, not in torch\.float64"):
        load(clean_package, dtype=torch.float64)


def test_dtype_of_the_model_leaves_the_package_alone(clean_package):
    model = load(clean_package, dtype=torch.bfloat16)
    expected = {name: value.clone() for name, value in model.named_buffers() if "experts" in name}
    assert len(expected) == 8
    found = dict(model.to(torch.float64).to(torch.bfloat16).named_buffers())
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert {value.dtype for value in expected.values()} == {torch.uint8, torch.int16}


def test_saving_is_refused(clean_package, tmp_path, caplog):
    model = load(clean_package)
    for part in (model, model.model):
        with pytest.raises(ValueError, match="not serializable"):
            part.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    assert "copying its folder" in caplog.text


def test_state_dict_is_complete(clean_package, dense_logits, tmp_path):
    torch.save(load(clean_package).state_dict(), tmp_path / "state")
    model = load(clean_package)
    for module in model.modules():
        if isinstance(module, PackedExperts):
            module.atoms.zero_()
            module.scale_bits.zero_()
    assert not close(logits(model), dense_logits)
    model.load_state_dict(torch.load(tmp_path / "state"))
    assert close(logits(model), dense_logits)


def test_no_training(clean_package):
    model = load(clean_package)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_dequantize(clean_package, dense_logits, tmp_path):
    model = load(clean_package)
    model.dequantize()
    assert not any(isinstance(module, PackedExperts) for module in model.modules())
    assert close(logits(model), dense_logits)
    model.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved/config.json").read_text())
    assert not {"quantization_config", "transformers_weights"} & set(config)
    again, info = load(tmp_path / "saved", output_loading_info=True)
    assert {key: names for key, names in info.items() if names} == {}
    assert close(logits(again), dense_logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16"])
def test_dequantize_to_another_dtype(clean_package, dtype):
    model = load(clean_package)
    model.dequantize(dtype=dtype)
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}
    assert model.config.dtype == torch.bfloat16
    assert not any(module.training for module in model.modules())
    assert all(value.requires_grad for value in model.parameters())


def test_base_model(clean_package, dense_logits):
    base = AutoModel.from_pretrained(clean_package, dtype=torch.float32)
    head = load(clean_package).lm_head
    with torch.inference_mode():
        assert close(head(base(IDS).last_hidden_state), dense_logits)


def test_subfolder(clean_package, dense_logits):
    found = load(clean_package.parent, subfolder=clean_package.name)
    assert close(logits(found), dense_logits)


@pytest.mark.parametrize("pattern", ["qsrt-layer-001.safetensors", "model-*.safetensors"])
def test_a_file_that_changes_while_it_is_read(package, monkeypatch, pattern):
    (path,) = package.glob(pattern)

    def verify(opened, how):
        found = original(opened, how)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        return found

    original = integration.verify_package
    monkeypatch.setattr(integration, "verify_package", verify)
    with pytest.raises(FormatError, match="was changed while it was read"):
        load(package)


def test_dequantize_refuses_mixed_activations(package, reseal):
    activation = {"default": "silu", "experts": {"2": "situ"}}
    edit_json(
        package / "qsrt-manifest.json", lambda m: m["layers"]["1"].update(activation=activation)
    )
    reseal(package)
    model = load(package)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts: experts have activations"):
        model.dequantize()
    assert any(isinstance(module, PackedExperts) for module in model.modules())


def test_published_spelling(clean_checkpoint, tmp_path, dense_logits):
    out = tmp_path / "out"
    settings = Settings(search="fast")
    job.run(job.prepare(clean_checkpoint, out, settings, loader="kquant"), show_progress=False)
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == (
        "modelopt"
    )
    assert close(logits(load(out)), dense_logits)


def test_config_of_another_tool():
    with pytest.raises(ValueError, match="quant_method 'modelopt' has no qsrt block"):
        QsrtConfig.from_dict({"quant_method": "modelopt", "quant_algo": "NVFP4"})


@pytest.mark.parametrize("suffix", ["qsrt-layer-001.safetensors", "qsrt-layer-001.json"])
def test_damage_is_refused_before_loading(package, suffix, monkeypatch):
    data = bytearray((package / suffix).read_bytes())
    data[len(data) // 2] ^= 1
    (package / suffix).write_bytes(data)
    monkeypatch.setattr(PackedExperts, "fill", None)
    with pytest.raises(FormatError, match=suffix):
        load(package)


def test_damaged_base_shard(package):
    (shard,) = package.glob("model-*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(FormatError, match=f"{shard.name} is damaged"):
        load(package)


def test_folder_that_is_no_package(package):
    (package / "QSRT_COMPLETE.json").unlink()
    with pytest.raises(FormatError, match=r"has no QSRT_COMPLETE\.json"):
        load(package)


def test_model_without_the_packed_layer(clean_package):
    config = AutoConfig.from_pretrained(clean_package, num_hidden_layers=1)
    with pytest.raises(FormatError, match="Qwen3MoeForCausalLM has no experts in layer 1"):
        load(clean_package, config=config)


@pytest.mark.parametrize("changes", [{"num_experts": 5}, {"moe_intermediate_size": 512}])
def test_experts_of_another_size(clean_package, changes):
    config = AutoConfig.from_pretrained(clean_package, **changes)
    with pytest.raises(FormatError, match=r"layers\.0\.mlp\.experts .* has parameters"):
        load(clean_package, config=config)


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("is_transposed", True),
        ("is_concatenated", False),
        ("has_bias", True),
        ("has_gate", False),
        ("has_post_expert_norm", True),
    ],
)
def test_experts_of_another_kind(clean_package, monkeypatch, attribute, value):
    original = Qwen3MoeExperts.__init__

    def build(self, config):
        original(self, config)
        setattr(self, attribute, value)

    monkeypatch.setattr(Qwen3MoeExperts, "__init__", build)
    with pytest.raises(FormatError, match=rf"experts \(Qwen3MoeExperts\) has {attribute} {value}"):
        load(clean_package)


def test_state_dict_in_place_of_a_folder(clean_package):
    config = AutoConfig.from_pretrained(clean_package)
    model_class = type(load(clean_package))
    with pytest.raises(ValueError, match="loaded from its folder or repository"):
        model_class.from_pretrained(None, config=config, state_dict={})
