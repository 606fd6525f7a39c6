"""Quantized checkpoints from end to end: packed, carried, calibrated, compared, loaded."""

import dataclasses
import json
import re
from pathlib import Path

import checkpoints
import pytest
import quantized
import torch
import transformers
from click.testing import CliRunner
from quantized import KINDS, is_quantized
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import qsrt_runtime.integrations.transformers  # noqa: F401 (registers the method)
from qsrt_pack import job, plan
from qsrt_pack.calibration import calibrate
from qsrt_pack.cli import main
from qsrt_pack.encode.expert import Settings
from qsrt_pack.evaluate import evaluate
from qsrt_pack.inspect import describe, inspect
from qsrt_pack.restore import DensePackage, decode_package
from qsrt_pack.source.checkpoint import open_checkpoint, read_weight
from qsrt_pack.source.models import find_experts
from qsrt_pack.validate import validate
from qsrt_runtime.format import manifest as manifests
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.package import open_package

FAST = Settings(search="fast")
IDS = torch.arange(32)[None] % checkpoints.VOCABULARY
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "probe", lambda _method, _device: 1e6)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def convert(source: Path, out: Path, **options: object) -> Path:
    job.run(job.prepare(source, out, FAST, **options), show_progress=False)
    return out


def small_config(**changes: object) -> dict:
    """Of one layer of one expert."""
    counts = {"num_hidden_layers": 1, "num_experts": 1, "num_experts_per_tok": 1}
    return checkpoints.config(**counts | changes)


def small(folder: Path, kind: str) -> Path:
    """A checkpoint in a format."""
    value = small_config(quantization_config=KINDS[kind].config)
    weights = quantized.quantize(KINDS[kind], checkpoints.tensors(layers=1, experts=1))
    return checkpoints.write_checkpoint(folder, config_value=value, weights=weights)


def decoded(source: Path, folder: Path) -> Path:
    """The checkpoint of what a quantized one decodes to, in float32 where it was quantized."""
    opened = open_checkpoint(source)
    weights = {
        name: read_weight(opened, name).to(torch.float32 if is_quantized(name) else torch.bfloat16)
        for name in opened.weights
    }
    value = dict(opened.model_config)
    return checkpoints.write_checkpoint(folder, config_value=value, weights=weights)


def base_tensors(package: Path) -> dict[str, torch.Tensor]:
    shards = sorted(package.glob("model-*.safetensors"))
    return {name: tensor for shard in shards for name, tensor in load_file(shard).items()}


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An FP8 checkpoint. Not to be written to."""
    return small(tmp_path_factory.mktemp("fp8") / "model", "fp8_block")


@pytest.fixture(scope="module")
def plain(fp8: Path) -> Path:
    return decoded(fp8, fp8.with_name("plain"))


@pytest.fixture(scope="module")
def package(fp8: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "probe", lambda _method, _device: 1e6)
        return convert(fp8, fp8.with_name("package"))


@pytest.fixture(scope="module")
def kept(fp8: Path) -> Path:
    """A package with the other tensors in FP8."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "probe", lambda _method, _device: 1e6)
        return convert(fp8, fp8.with_name("kept"), keep_dense_format=True)


ROWS = {  # of README.md's table of formats
    "fp8_block": "FP8 E4M3, a scale a block, cut at the edges",
    "fp8_ue8m0": "the same with UE8M0 scales",
    "fp8_tensor": "FP8 E4M3, a scale a tensor",
    "fp8_channel": "FP8 E4M3, a scale a row",
    "mxfp4_blocks": "MXFP4",
    "mxfp4_f4": "MXFP4 of dtype F4",
    "mxfp4_packed": "MXFP4, packed",
    "nvfp4_modelopt": "NVFP4",
    "nvfp4_packed": "NVFP4, packed",
    "int4": "int4, a scale a group",
    "int4_asymmetric": "the same with zero points",
}


@pytest.mark.parametrize("kind", KINDS)
def test_packed_as_what_it_decodes_to(tmp_path: Path, kind: str, repository: Path) -> None:
    source = small(tmp_path / "model", kind)
    twin = decoded(source, tmp_path / "plain")
    found, expected = (convert(s, s.with_name(f"{s.name}-qsrt")) for s in (source, twin))
    name = "qsrt-layer-000.safetensors"
    layer, other = load_file(found / name), load_file(expected / name)
    assert layer.keys() == other.keys()
    for key, tensor in layer.items():
        assert torch.equal(tensor, other[key]), key
    base, opened = base_tensors(found), open_checkpoint(source)
    assert base.keys() == {key for key in checkpoints.tensors(layers=1) if ".experts." not in key}
    for key, tensor in base.items():
        assert torch.equal(tensor, read_weight(opened, key).to(torch.bfloat16)), key
    documents = open_package(found).documents
    assert documents.manifest["source_format"] == {
        "experts": [KINDS[kind].name],
        "carried": [KINDS[kind].name],
        "carried_as": "bf16",
    }
    assert "source_format" not in open_package(expected).documents.manifest
    assert documents.config["quantization_config"].keys() == {
        "demoted_format",
        "hybrid_bit_map",
        "qsrt",
        "quant_method",
    }
    validate(found, deep=True, show_progress=False)
    decode_package(found, tmp_path / "dense", dtype="float32", show_progress=False)
    error = ((logits(tmp_path / "dense") - logits(twin)).norm() / logits(twin).norm()).item()
    row = re.search(
        rf"^\| {re.escape(ROWS[kind])} \|.*\| ([\d.]+) \|$",
        (repository / "README.md").read_text(),
        re.MULTILINE,
    )
    assert row is not None
    assert error == pytest.approx(float(row[1]), rel=0.5)


def logits(folder: Path) -> torch.Tensor:
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        return model.eval()(IDS, use_cache=False).logits


@pytest.mark.parametrize("kind", ["fp8_block", "fp8_ue8m0", "mxfp4_packed"])
def test_transformers_reads_the_same_weights(tmp_path: Path, kind: str) -> None:
    """Of those that it dequantizes without a GPU, whole, and without rounding to bfloat16."""
    source, options = small(tmp_path / "model", kind), {}
    if KINDS[kind].config["quant_method"] == "compressed-tensors":
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    model, info = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, output_loading_info=True, **options
    )
    assert not info["missing_keys"]
    opened, state = open_checkpoint(source), model.state_dict()
    assert torch.equal(state[QUERY], read_weight(opened, QUERY))
    key = "model.layers.0.mlp.experts.down_proj"
    expert = checkpoints.expert_key(0, 0, "down_proj")
    assert torch.equal(state[key][0], read_weight(opened, expert))


def test_the_package_in_transformers(package: Path, tmp_path: Path) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(
        package, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    decode_package(package, tmp_path / "dense", dtype="float32", show_progress=False)
    dense, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "dense", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        found, expected = (m.eval()(IDS, use_cache=False).logits for m in (model, dense))
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_kept_tensors_are_as_they_were(fp8: Path, kept: Path, package: Path) -> None:
    source = open_checkpoint(fp8)
    base = base_tensors(kept)
    assert base.keys() == {name for name in source.tensors if ".experts." not in name}
    raw = base_tensors(fp8)
    for name, tensor in base.items():
        assert tensor.dtype == raw[name].dtype
        assert torch.equal(tensor.view(torch.uint8), raw[name].view(torch.uint8))
    documents = open_package(kept).documents
    assert documents.manifest["source_format"]["carried_as"] == "stored"
    quantization = documents.config["quantization_config"]
    assert quantization["quant_method"] == "qsrt"
    assert quantization["dense_quantization_config"] == source.config["quantization_config"]
    validate(kept, deep=True, show_progress=False)
    layers = (folder / "qsrt-layer-000.safetensors" for folder in (kept, package))
    assert len({path.read_bytes() for path in layers}) == 1


def test_inspect_says_the_format(kept: Path, package: Path) -> None:
    for folder, how in ((kept, "kept so"), (package, "decoded to bf16")):
        report = inspect(folder, show_progress=False)
        assert f"experts fp8; other tensors fp8, {how}\n" in describe(report)


def test_transformers_refuses_kept_tensors_by_name(kept: Path) -> None:
    with pytest.raises(ValueError, match=r"quantized with fp8 .*without --keep-dense-format"):
        AutoModelForCausalLM.from_pretrained(kept, dtype=torch.float32)


def test_kept_tensors_are_decoded(kept: Path, package: Path, tmp_path: Path) -> None:
    for number, folder in enumerate((kept, package)):
        decode_package(folder, tmp_path / str(number), dtype="float32", show_progress=False)
    first, second = (base_tensors(tmp_path / name) for name in "01")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in "01"]
    assert configs[0] == configs[1]
    assert "quantization_config" not in configs[0]
    source = open_checkpoint(kept.with_name("model"))
    assert torch.equal(DensePackage(kept).base_weight(QUERY), read_weight(source, QUERY))


def test_a_package_of_the_other_kind_is_not_taken_for_done(fp8: Path, kept: Path) -> None:
    assert job.prepare(fp8, kept, FAST, keep_dense_format=True).complete
    with pytest.raises(FormatError, match=r"not empty|overwrite"):
        job.prepare(fp8, kept, FAST)


def test_what_cannot_be_kept(fp8: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="the kquant loader reads no other quantization"):
        job.prepare(fp8, tmp_path / "out", FAST, loader="kquant", keep_dense_format=True)
    weights = quantized.quantize(KINDS["mxfp4_f4"], checkpoints.tensors(layers=1, experts=1))
    options = {"config_value": small_config(), "weights": weights}
    unsaid = checkpoints.write_checkpoint(tmp_path / "unsaid", **options)
    with pytest.raises(FormatError, match="quantized tensors and no quantization_config"):
        job.prepare(unsaid, tmp_path / "out", FAST, keep_dense_format=True)
    assert job.prepare(unsaid, tmp_path / "out", FAST).plan["expert_formats"] == {"mxfp4": 3}


def test_a_manifest_and_a_config_that_disagree(kept: Path) -> None:
    documents = open_package(kept).documents
    config = json.loads(json.dumps(documents.config))
    del config["quantization_config"]["dense_quantization_config"]
    changed = dataclasses.replace(documents, config=config)
    with pytest.raises(FormatError, match="stands there if and only if"):
        manifests.check_documents(changed, "package")


@pytest.mark.parametrize(
    ("options", "carried"),
    [([], "written as bf16"), (["--keep-dense-format"], "carried as they are, for a loader")],
)
def test_the_dry_run_says_the_format(
    fp8: Path, tmp_path: Path, options: list[str], carried: str
) -> None:
    arguments = ["convert", str(fp8), str(tmp_path / "out"), "--dry-run", "--devices", "cpu"]
    result = CliRunner().invoke(main, [*arguments, *options])
    assert result.exit_code == 0, result.output
    assert f"fp8 (experts); 4 other weights in fp8, {carried}" in result.output
    planned = json.loads(CliRunner().invoke(main, [*arguments, *options, "--json"]).stdout)
    assert planned["expert_formats"] == {"fp8": 3}
    assert planned["carried_formats"] == {"fp8": 4}


def test_the_dry_run_of_a_plain_checkpoint(plain: Path, tmp_path: Path) -> None:
    prepared = job.prepare(plain, tmp_path / "out", FAST)
    assert prepared.plan["carried_formats"] == {}
    assert "F32 (experts)\n" in plan.describe(prepared.plan)


@pytest.mark.parametrize("name", [checkpoints.expert_key(0, 0, "up_proj"), QUERY])
def test_st_5b_a_scale_that_is_no_number(tmp_path: Path, name: str) -> None:
    """Found at the scan, in experts and in tensors that would be decoded."""
    weights = quantized.quantize(KINDS["mxfp4_f4"], checkpoints.tensors(layers=1, experts=1))
    weights[f"{name}_scale"].view(torch.uint8)[5, 2] = 255
    value = small_config(quantization_config=KINDS["mxfp4_f4"].config)
    checkpoints.write_checkpoint(tmp_path / "model", config_value=value, weights=weights)
    with pytest.raises(FormatError, match=rf"{name}_scale holds nan at \[5, 2\]"):
        convert(tmp_path / "model", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.fixture(scope="module")
def text(fp8: Path, plain: Path) -> Path:
    for folder in (fp8, plain):
        checkpoints.write_tokenizer(folder)
    path = fp8.with_name("text.txt")
    path.write_text("The quick brown fox jumps over the lazy dog. " * 8)
    return path


def test_calibrated_as_what_it_decodes_to(
    fp8: Path, plain: Path, text: Path, tmp_path: Path
) -> None:
    folders = []
    for source in (fp8, plain):
        folders.append(tmp_path / source.name)
        calibrate(source, text, folders[-1], window=32, show_progress=False)
    names = {path.name for path in folders[0].glob("*.safetensors")}
    assert names == {"layer-000.safetensors", "gradients-000.safetensors"}
    for name in names:
        first, second = (load_file(folder / name) for folder in folders)
        assert all(torch.equal(first[key], second[key]) for key in first)


def test_compared_with_a_quantized_reference(
    fp8: Path, plain: Path, package: Path, text: Path
) -> None:
    given = {"window": 32, "against": [fp8], "show_progress": False}
    ours, theirs = (evaluate(package, source, text, **given) for source in (fp8, plain))
    assert ours["reference_is_source"] and not theirs["reference_is_source"]
    assert 0 < ours["kl_mean"] == theirs["kl_mean"]
    for report in (ours, theirs):
        (other,) = report["against"]
        assert (other["kl_max"], other["top10_agreement"]) == (0, 1)
        # A float32 scale for 128 x 128.
        assert other["bits_per_expert_weight"] == pytest.approx(8 + 32 / 128**2, abs=1e-3)


def fp8_of_two_layers(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    value = checkpoints.config(num_experts=1, num_experts_per_tok=1)
    value["quantization_config"] = KINDS["fp8_block"].config
    return checkpoints.write_checkpoint(folder, config_value=value, weights=weights)


def stop_after_the_first_layer(
    monkeypatch: pytest.MonkeyPatch, source: Path, out: Path, **options: object
) -> None:
    original = job._write_layer

    def stopping(run: job.Job, folder: Path, layer: int, *rest: object) -> dict:
        if layer == 1:
            raise KeyboardInterrupt
        return original(run, folder, layer, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(job, "_write_layer", stopping)
        with pytest.raises(KeyboardInterrupt):
            convert(source, out, **options)


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """An FP8 checkpoint of two layers and an output whose conversion stopped after the first."""
    weights = quantized.quantize(KINDS["fp8_block"], checkpoints.tensors(experts=1))
    source = fp8_of_two_layers(tmp_path / "model", weights)
    stop_after_the_first_layer(monkeypatch, source, tmp_path / "out")
    return source, tmp_path / "out"


def test_cv_7a_resumed_to_the_same_bytes(stopped: tuple[Path, Path], tmp_path: Path) -> None:
    source, out = stopped
    assert job.prepare(source, out, FAST).plan["finished_layers"] == [0]
    convert(source, out)
    whole = convert(source, tmp_path / "whole")
    names = sorted(path.name for path in whole.iterdir())
    assert names == sorted(path.name for path in out.iterdir())
    assert all((whole / name).read_bytes() == (out / name).read_bytes() for name in names)


def test_cv_7b_a_scale_changed_meanwhile(stopped: tuple[Path, Path]) -> None:
    source, out = stopped
    name = f"{checkpoints.expert_key(1, 0, 'up_proj')}_scale_inv"
    shard, entry = open_checkpoint(source).tensors[name]
    data = bytearray((source / shard).read_bytes())
    data[entry.start] ^= 1
    (source / shard).write_bytes(data)
    with pytest.raises(FormatError, match=rf"source file {shard} was"):
        convert(source, out)


def test_qn_5a_a_carried_weight_that_is_decoded_later_than_scanned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the run that continues one which kept it, and by decode."""
    weights = quantized.quantize(KINDS["fp8_block"], checkpoints.tensors(experts=1))
    weights[f"{QUERY}_scale_inv"][0, 0] = float("nan")
    source, out = fp8_of_two_layers(tmp_path / "model", weights), tmp_path / "out"
    stop_after_the_first_layer(monkeypatch, source, out, keep_dense_format=True)
    with pytest.raises(FormatError, match=rf"weight {QUERY} does not fit into bfloat16"):
        convert(source, out)
    assert not out.exists()
    convert(source, out, keep_dense_format=True)
    with pytest.raises(FormatError, match=rf"weight {QUERY} does not fit into bfloat16"):
        decode_package(out, tmp_path / "dense", show_progress=False)
    assert not (tmp_path / "dense").exists()


@pytest.mark.parametrize("kind", ["fp8_block", "mxfp4_blocks", "nvfp4_packed", "int4_asymmetric"])
def test_experts_in_a_quantized_stack(tmp_path: Path, kind: str) -> None:
    """transformers' own stacks in a format, with gate before up, as the experts one by one."""
    experts, generator = 2, torch.Generator().manual_seed(0)
    said = {**KINDS[kind].config, "ignore": ["re:.*self_attn.*"]}
    value = small_config(num_experts=experts, quantization_config=said)
    plain = checkpoints.tensors(layers=1, experts=experts)
    stacked = {name: tensor for name, tensor in plain.items() if ".experts." not in name}
    for name, shape in (("gate_up_proj", (512, 128)), ("down_proj", (128, 256))):
        parts = [KINDS[kind].make(generator, *shape) for _ in range(experts)]
        name = f"model.layers.0.mlp.experts.{name}"
        stacked |= {name + suffix: part for suffix, part in quantized.stack(parts).items()}
    options = {"config_value": value, "weights": stacked}
    source = open_checkpoint(checkpoints.write_checkpoint(tmp_path / "model", **options))
    each = {name: tensor for name, tensor in plain.items() if ".experts." not in name}
    for expert in range(experts):
        both = read_weight(source, "model.layers.0.mlp.experts.gate_up_proj", expert)
        down = read_weight(source, "model.layers.0.mlp.experts.down_proj", expert)
        matrices = (both[:256].clone(), both[256:].clone(), down)
        for part, matrix in zip(checkpoints.PARTS, matrices, strict=True):
            each[checkpoints.expert_key(0, expert, part)] = matrix
    options = {"config_value": small_config(num_experts=experts), "weights": each}
    twin = checkpoints.write_checkpoint(tmp_path / "each", **options)
    name = "qsrt-layer-000.safetensors"
    found, expected = (
        load_file(convert(path, path.with_name(f"{path.name}-qsrt")) / name)
        for path in (source.path, twin)
    )
    assert all(torch.equal(found[key], expected[key]) for key in found)


def test_experts_are_found_by_their_names(fp8: Path, plain: Path) -> None:
    assert find_experts(open_checkpoint(fp8)) == find_experts(open_checkpoint(plain))
