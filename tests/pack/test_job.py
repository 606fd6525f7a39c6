"""Whole conversions of small models, and what a failure leaves."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import checkpoints
import pytest
import torch
from checkpoints import PARTS, config, expert_key, write_checkpoint
from safetensors.torch import load_file

from qsrt_pack import job, plan, produce
from qsrt_pack.encode.expert import Settings
from qsrt_pack.restore import DensePackage
from qsrt_pack.source.checkpoint import digest_files, open_checkpoint
from qsrt_pack.validate import validate
from qsrt_runtime import load_package
from qsrt_runtime.format import schema
from qsrt_runtime.format.container import read_layer
from qsrt_runtime.format.errors import FormatError

FAST = Settings(search="fast")
Weights = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's speed is none of these tests' business."""
    monkeypatch.setattr(plan, "probe", lambda _method, _device: 1e6)


def convert(
    source: Path, out: Path, settings: Settings = FAST, *, loader: str = "qsrt", overwrite=False
) -> Path:
    prepared = job.prepare(source, out, settings, loader=loader, overwrite=overwrite)
    job.run(prepared, show_progress=False)
    return out


def small_config(experts: int = 2, **changes: object) -> dict:
    """Of one layer."""
    counts = {"num_hidden_layers": 1, "num_experts": experts, "num_experts_per_tok": 1}
    return config(**counts | changes)


def small_checkpoint(folder: Path, weights: Weights | None = None, **changes: object) -> Path:
    """A checkpoint of one layer of two experts, or of these tensors."""
    weights = weights or checkpoints.tensors(layers=1, experts=2)
    return write_checkpoint(folder, config_value=small_config(**changes), weights=weights)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one layer of one expert. Not to be written to."""
    weights = checkpoints.tensors(layers=1, experts=1)
    folder = tmp_path_factory.mktemp("small") / "model"
    return write_checkpoint(folder, config_value=small_config(1), weights=weights)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def base_tensors(package: Path) -> Weights:
    return {
        name: tensor
        for shard in sorted(package.glob("model-*.safetensors"))
        for name, tensor in load_file(shard).items()
    }


def nmse(source: torch.Tensor, decoded: torch.Tensor) -> float:
    source = source.float()
    return float((source - decoded).square().sum() / source.square().sum())


def assert_nothing_was_made(source: Path, out: Path, message: str, overwrite=False) -> None:
    """Converting fails with this message and leaves the output's place as it was."""
    before = sorted(path.name for path in out.parent.iterdir())
    kept = contents(out) if out.exists() else None
    with pytest.raises(FormatError, match=message):
        convert(source, out, overwrite=overwrite)
    assert sorted(path.name for path in out.parent.iterdir()) == before
    assert kept == (contents(out) if out.exists() else None)


def test_the_clean_checkpoint_converts(clean_checkpoint: Path, clean_package: Path) -> None:
    report = validate(clean_package, deep=True, show_progress=False)
    assert (report["layers"], report["experts"]) == (2, 8)
    assert sorted(path.name for path in clean_package.iterdir()) == [
        ".gitattributes",
        "MANIFEST.sha256",
        "QSRT_COMPLETE.json",
        "config.json",
        "generation_config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "qsrt-layer-000.json",
        "qsrt-layer-000.safetensors",
        "qsrt-layer-001.json",
        "qsrt-layer-001.safetensors",
        "qsrt-manifest.json",
    ]
    manifest = json.loads((clean_package / "qsrt-manifest.json").read_text())
    digests = digest_files(open_checkpoint(clean_checkpoint))
    assert manifest["source"]["source_sha256"] == schema.digest(digests)


def test_every_decoded_expert_is_near_its_source(clean_package: Path) -> None:
    dense, source = DensePackage(clean_package), checkpoints.tensors()
    assert len(dense.experts) == 24
    for name in dense.experts:
        assert nmse(source[name], dense.expert_weight(name)) < 0.03


def test_everything_else_is_carried_to_the_bit(clean_package: Path) -> None:
    carried = base_tensors(clean_package)
    expected = {n: t for n, t in checkpoints.tensors().items() if ".experts." not in n}
    assert carried.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(carried[name].view(torch.int16), tensor.view(torch.int16))
    generation = (clean_package / "generation_config.json").read_bytes()
    assert generation == b'{"eos_token_id": 0}\n'


def test_same_source_same_bytes(small: Path, tmp_path: Path) -> None:
    first, second = (contents(convert(small, tmp_path / name)) for name in "ab")
    assert first == second
    other = contents(convert(small, tmp_path / "c", Settings(seed=1, search="fast")))
    layer = "qsrt-layer-000.safetensors"
    assert other[layer] != first[layer]
    assert other["model-00001-of-00001.safetensors"] == first["model-00001-of-00001.safetensors"]


def test_cv_3c_experts_keep_their_numbers(tmp_path: Path) -> None:
    weights = checkpoints.tensors(layers=1, experts=12)
    weights = {name: weights[name] for name in sorted(weights)}  # 0, 1, 10, 11, 2, ...
    source = small_checkpoint(tmp_path / "model", weights, experts=12)
    dense = DensePackage(convert(source, tmp_path / "out"))
    for expert in range(12):
        decoded = dense.expert_weight(expert_key(0, expert, "up_proj"))
        errors = [nmse(weights[expert_key(0, e, "up_proj")], decoded) for e in range(12)]
        assert errors.pop(expert) < 0.03
        assert min(errors) > 1


def test_cv_4a_shards_do_not_matter(tmp_path: Path) -> None:
    weights = checkpoints.tensors(layers=1, experts=2)
    shard_of = {expert_key(0, e, p): n for e in range(2) for n, p in enumerate(PARTS, 1)}
    value = small_config()
    apart = write_checkpoint(
        tmp_path / "3", weights=weights, config_value=value, shards=3, shard_of=shard_of
    )
    one = write_checkpoint(tmp_path / "1", weights=weights, config_value=value, shards=1)
    packages = [convert(source, tmp_path / f"{source.name}-out") for source in (apart, one)]
    layers = [read_layer(package / "qsrt-layer-000.safetensors") for package in packages]
    for part in ("atoms", "format_codes", "shared_scales"):
        assert torch.equal(getattr(layers[0], part), getattr(layers[1], part))
    assert layers[0].source_sha256 != layers[1].source_sha256
    shards = [contents(package)["model-00001-of-00001.safetensors"] for package in packages]
    assert shards[0] == shards[1]


@pytest.mark.parametrize("plural", ["", "s"])
def test_cv_6_only_routed_experts_are_packed(tmp_path: Path, plural: str) -> None:
    weights = checkpoints.tensors(layers=1, experts=1)
    prefix = "model.layers.0.mlp.shared_expert"
    for part in PARTS:
        weights[f"{prefix}{plural}.{part}.weight"] = weights[expert_key(0, 0, part)] + 1
    weights[f"{prefix}_gate.weight"] = torch.ones(1, 128, dtype=torch.bfloat16)
    weights["model.layers.0.self_attn.q_proj.weight"] = torch.randn(256, 256).half()
    source = small_checkpoint(tmp_path / "model", weights, experts=1)
    carried = base_tensors(convert(source, tmp_path / "out"))
    assert carried.keys() == {name for name in weights if ".experts." not in name}
    for name, tensor in carried.items():
        assert tensor.dtype == weights[name].dtype
        assert torch.equal(tensor.view(torch.int16), weights[name].view(torch.int16))


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    weights = checkpoints.tensors(layers=1, experts=1)
    del weights["lm_head.weight"]
    source = small_checkpoint(tmp_path / "model", weights, experts=1, tie_word_embeddings=True)
    out = convert(source, tmp_path / "out")
    assert base_tensors(out).keys() == {name for name in weights if ".experts." not in name}
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True


def test_st_2d_empty_and_rank_0_tensors_are_carried(tmp_path: Path) -> None:
    weights = checkpoints.tensors(layers=1, experts=1)
    weights |= {"marker": torch.empty(0), "scalar": torch.tensor(7, dtype=torch.uint8)}
    source = small_checkpoint(tmp_path / "model", weights, experts=1)
    carried = base_tensors(convert(source, tmp_path / "out"))
    assert carried["marker"].shape == (0,)
    assert carried["scalar"].shape == ()
    assert carried["scalar"].item() == 7


def test_st_7a_a_cache_snapshot_converts(small: Path, tmp_path: Path) -> None:
    folder, blobs = tmp_path / "snapshots" / "0123abcd", tmp_path / "blobs"
    shutil.copytree(small, blobs)
    folder.mkdir(parents=True)
    for file in blobs.iterdir():
        (folder / file.name).symlink_to(Path("../../blobs") / file.name)
    out = convert(folder, tmp_path / "out")
    assert contents(out) == contents(convert(small, tmp_path / "plain"))
    assert not any(path.is_symlink() for path in out.iterdir())
    assert contents(blobs) == contents(small)


def test_side_files_are_carried_in_their_folders(small: Path, tmp_path: Path) -> None:
    source = shutil.copytree(small, tmp_path / "model")
    (source / "assets").mkdir()
    (source / "assets" / "logo.png").write_bytes(b"\x89PNG")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "modeling_x.py").write_text("raise SystemExit")
    out = convert(source, tmp_path / "out")
    assert (out / "assets" / "logo.png").read_bytes() == b"\x89PNG"
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not (out / "modeling_x.py").exists()
    validate(out, show_progress=False)


def test_a_side_file_with_a_packages_name_is_refused(small: Path, tmp_path: Path) -> None:
    source = shutil.copytree(small, tmp_path / "model")
    (source / "qsrt-layer-000.json").write_text("{}")
    assert_nothing_was_made(source, tmp_path / "out", "it is a package already")


def test_the_published_loaders_spelling(small: Path, tmp_path: Path) -> None:
    ours, theirs = (
        convert(small, tmp_path / loader, loader=loader) for loader in ("qsrt", "kquant")
    )
    quantization = json.loads((theirs / "config.json").read_text())["quantization_config"]
    assert (quantization["quant_method"], quantization["quant_algo"]) == ("modelopt", "NVFP4")
    assert quantization["kept_format"] == "mxfp4_e8m0k32"
    validate(theirs, show_progress=False)
    a, b = contents(ours), contents(theirs)
    changed = {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)}
    assert changed == {"config.json", "MANIFEST.sha256", "QSRT_COMPLETE.json"}


def test_modes_of_choice_are_kept_where_they_help(tmp_path: Path) -> None:
    weights = checkpoints.tensors(layers=1, experts=2)
    weights[expert_key(0, 1, "down_proj")][:, ::2] *= 16
    weights[expert_key(0, 1, "down_proj")][:, 128:] *= 16
    source = small_checkpoint(tmp_path / "model", weights)
    out = convert(source, tmp_path / "out", Settings(search="fast", modes="all"))
    validate(out, deep=True, show_progress=False)
    evidence = json.loads((out / "qsrt-layer-000.json").read_text())["experts"]
    assert [(e["mode13"], e["mode2"]) for e in evidence] == [("R0", "R0"), ("R0", "R1")]
    dense = DensePackage(out)
    for name in dense.experts:
        assert nmse(weights[name], dense.expert_weight(name)) < 0.03


def test_qn_3a_an_expert_of_zeros(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = checkpoints.tensors(layers=1, experts=2)
    for part in PARTS:
        weights[expert_key(0, 0, part)].zero_()
    with caplog.at_level(logging.WARNING, "qsrt_pack"):
        out = convert(small_checkpoint(tmp_path / "model", weights), tmp_path / "out")
    assert [r.message for r in caplog.records] == ["layer 0 expert 0: w1, w2, w3 all zero"]
    validate(out, deep=True, show_progress=False)
    dense = DensePackage(out)
    for part in PARTS:
        assert not dense.expert_weight(expert_key(0, 0, part)).any()
        name = expert_key(0, 1, part)
        assert nmse(weights[name], dense.expert_weight(name)) < 0.03
    evidence = json.loads((out / "qsrt-layer-000.json").read_text())["experts"]
    assert [e["zero_matrices"] for e in evidence] == [["w1", "w2", "w3"], []]
    assert load_package(out).layers[0].geometry.experts == 2


def test_qn_3b_zeros_among_normal_values(tmp_path: Path) -> None:
    weights = checkpoints.tensors(layers=1, experts=1)
    gate, up, down = (expert_key(0, 0, part) for part in PARTS)
    weights[gate][9] = 0
    weights[down][:, 200] = 0
    weights[up].view(-1)[1024:1280] = 0
    source = small_checkpoint(tmp_path / "model", weights, experts=1)
    dense = DensePackage(convert(source, tmp_path / "out"))
    assert not dense.expert_weight(gate)[9].any()
    assert not dense.expert_weight(down)[:, 200].any()
    block = dense.expert_weight(up).flatten()[1024:1280]
    assert block.square().mean() < 0.04 * weights[up].float().square().mean()
    for name in (gate, up, down):
        assert nmse(weights[name], dense.expert_weight(name)) < 0.03


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_qn_5a_weights_that_are_not_finite(tmp_path: Path, value: float) -> None:
    weights = checkpoints.tensors()
    name = expert_key(1, 2, "down_proj")
    weights[name][3, 5] = weights[name][100, 0] = value
    source = write_checkpoint(tmp_path / "model", weights=weights)
    message = rf"tensor {name} holds {value} at \[3, 5\]"
    assert_nothing_was_made(source, tmp_path / "out", message)


def test_scales_beyond_float16_name_the_tensor(tmp_path: Path) -> None:
    weights = checkpoints.tensors(layers=1, experts=2)
    name = expert_key(0, 1, "up_proj")
    weights[name] *= 1e12
    source = small_checkpoint(tmp_path / "model", weights)
    assert_nothing_was_made(source, tmp_path / "out", f"tensor {name}: .* is beyond float16")


def fail_at(call: int, error: BaseException, real: Callable = produce.expert_steps) -> Callable:
    """expert_steps that fails when it is called for the nth time."""
    calls = 0

    def failing(*arguments: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        return real(*arguments, **options)

    return failing


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError("no space left"), ArithmeticError()]
)
@pytest.mark.parametrize("old", [False, True])
def test_a_failure_in_the_middle_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, old: bool
) -> None:
    source, out = small_checkpoint(tmp_path / "model"), tmp_path / "out"
    before = contents(source)
    if old:
        out.mkdir()
        (out / "precious").write_text("kept")
    monkeypatch.setattr(produce, "expert_steps", fail_at(2, error))
    with pytest.raises(type(error)):
        convert(source, out, overwrite=old)
    assert sorted(p.name for p in tmp_path.iterdir()) == (["model", "out"] if old else ["model"])
    assert not old or contents(out) == {"precious": b"kept"}
    assert contents(source) == before


def test_too_small_a_disk_is_seen_first(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda _path: SimpleNamespace(free=1000))
    with pytest.raises(FormatError, match=r"has 1,000 bytes free, .* are to be written"):
        job.prepare(small, tmp_path / "out", FAST)
    assert list(tmp_path.iterdir()) == []


def test_pk_4c_overwrite_replaces_whole(small: Path, clean_package: Path, tmp_path: Path) -> None:
    out = shutil.copytree(clean_package, tmp_path / "out")
    assert_nothing_was_made(small, out, "is not empty")
    convert(small, out, overwrite=True)
    assert contents(out) == contents(convert(small, tmp_path / "fresh"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "out"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("place", [".", "out", "..", "../.."])
def test_source_and_output_lie_apart(
    small: Path, tmp_path: Path, place: str, overwrite: bool
) -> None:
    source = shutil.copytree(small, tmp_path / "a" / "model")
    before = contents(tmp_path)
    with pytest.raises(FormatError, match="lie inside each other"):
        job.prepare(source, source / place, FAST, overwrite=overwrite)
    assert contents(tmp_path) == before


def test_a_package_is_no_source(clean_package: Path, tmp_path: Path) -> None:
    assert_nothing_was_made(clean_package, tmp_path / "out", "it is a package already")


def test_describe_names_what_matters(clean_checkpoint: Path, tmp_path: Path) -> None:
    prepared = job.prepare(clean_checkpoint, tmp_path / "out", FAST)
    text = plan.describe(prepared.plan)
    for part in (str(clean_checkpoint), str(tmp_path / "out"), "2 layers (0..1) x 4", "786,432"):
        assert part in text
    assert "not carried" not in text
    assert "not carried x.py" in plan.describe(prepared.plan | {"left_out_files": ["x.py"]})


def test_a_source_that_changes_during_the_run_is_refused(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shutil.copytree(small, tmp_path / "model")
    real = produce.expert_steps

    def encode(*arguments: object, **options: object) -> object:
        shard = min(source.glob("*.safetensors"))
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
        return real(*arguments, **options)

    monkeypatch.setattr(produce, "expert_steps", encode)
    with pytest.raises(FormatError, match="model changed since it was opened"):
        job.run(job.prepare(source, tmp_path / "out", FAST), show_progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_source_that_changes_before_the_run_is_refused(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(produce, "expert_steps", fail_at(1, AssertionError("encoded")))
    source = shutil.copytree(small, tmp_path / "model")
    prepared = job.prepare(source, tmp_path / "out", FAST)
    config = source / "config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(FormatError, match="model changed since it was opened"):
        job.run(prepared, show_progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("hidden_side", ["layer", "expert"])
def test_the_hidden_side_is_the_layers_or_each_experts(tmp_path: Path, hidden_side: str) -> None:
    weights = checkpoints.tensors(layers=1, experts=3)
    for part in PARTS:
        weights[expert_key(0, 1, part)] *= 100
        weights[expert_key(0, 2, part)] /= 100
    source = small_checkpoint(tmp_path / "model", weights, experts=3)
    settings = Settings(search="fast", hidden_side=hidden_side)
    out = convert(source, tmp_path / "out", settings)
    validate(out, deep=True, show_progress=False)
    w1, w3, w2 = read_layer(out / "qsrt-layer-000.safetensors").shared_scales
    same = {len(rows.unique(dim=0)) == 1 for rows in (torch.cat([w1, w3]), w2)}
    assert same == {hidden_side == "layer"}
    dense = DensePackage(out)
    for name in dense.experts:
        assert nmse(weights[name], dense.expert_weight(name)) < 0.03
