"""CF-6: experts of sizes that are padded, from checkpoint to package to outputs."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import checkpoints
import pytest
import torch
from click.testing import CliRunner
from layers import BOUND, DEVICES, error, place
from packages import write_package
from safetensors.torch import load_file
from test_round_trip import experts_forward

from qsrt_pack import job, plan
from qsrt_pack.calibration import calibrate
from qsrt_pack.cli import main
from qsrt_pack.encode.expert import Settings
from qsrt_pack.evaluate import evaluate
from qsrt_pack.inspect import describe, inspect
from qsrt_pack.restore import DensePackage, decode_package, source_order
from qsrt_pack.statistics import Statistics
from qsrt_pack.validate import validate
from qsrt_runtime import load_package, moe_forward, moe_forward_reference
from qsrt_runtime.arguments import padded_rows
from qsrt_runtime.format import decode, manifest, paths, schema
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.evidence import low_to_high
from qsrt_runtime.format.geometry import Geometry, TrueSizes
from qsrt_runtime.format.package import open_package, read_evidence, read_package_layer, seal
from qsrt_runtime.format.slab import unpack_expert
from qsrt_runtime.moe_kernels import moe_forward_kernels

SIZES = TrueSizes(hidden=96, intermediate=704)
STORED = Geometry(hidden=128, intermediate=768, experts=2)
FAST = Settings(search="fast")


def config(sizes: TrueSizes, **changes: object) -> dict:
    value = {
        "hidden_size": sizes.hidden,
        "moe_intermediate_size": sizes.intermediate,
        "num_experts": 2,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
    }
    return checkpoints.config(**(value | changes))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one layer of two experts of 96 x 704. Never written to."""
    weights = checkpoints.tensors(
        layers=1, experts=2, hidden=SIZES.hidden, intermediate=SIZES.intermediate
    )
    folder = tmp_path_factory.mktemp("sizes") / "model"
    return checkpoints.write_checkpoint(folder, config_value=config(SIZES), weights=weights)


@pytest.fixture(scope="module")
def odd(source: Path) -> Path:
    """Its package. Never written to."""
    out = source.parent / "out"
    job.run(job.prepare(source, out, FAST), show_progress=False)
    return out


@pytest.fixture(autouse=True)
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring the speed takes seconds."""
    monkeypatch.setattr(plan, "probe", lambda _method, _device: 1e6)


@pytest.fixture
def memory_of_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN, so that what is read before it is written shows."""
    real = torch.empty

    def empty(*arguments: object, **options: object) -> torch.Tensor:
        found = real(*arguments, **options)
        return found.fill_(float("nan")) if found.is_floating_point() else found

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def routes(tokens: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, width, generator=generator)
    ids = torch.stack([torch.randperm(2, generator=generator) for _ in range(tokens)])
    return x, ids, torch.rand(tokens, 2, generator=generator)


def test_cf_6a_the_manifest_states_true_and_stored_sizes(odd: Path) -> None:
    fields = json.loads((odd / "qsrt-manifest.json").read_text())["geometry"]
    assert (fields["true_hidden_size"], fields["true_intermediate_size"]) == (96, 704)
    assert (fields["hidden_size"], fields["intermediate_size"]) == (128, 768)
    assert json.loads((odd / "config.json").read_text())["hidden_size"] == 96
    report = validate(odd, deep=True, show_progress=False)
    assert report["expert_weights"] == 2 * 3 * 96 * 704
    found = inspect(odd, show_progress=False)
    assert (found["true_hidden_size"], found["true_intermediate_size"]) == (96, 704)
    assert found["bits_per_expert_weight"] == report["bits_per_expert_weight"]
    assert "96 x 704 (padded to 128 x 768), top-2, silu: 405,504 weights" in describe(found)


def test_sizes_that_fit_are_stated_once(clean_package: Path) -> None:
    fields = json.loads((clean_package / "qsrt-manifest.json").read_text())["geometry"]
    assert not [name for name in fields if name.startswith("true_")]


def test_cf_6a_decode_gives_the_true_sizes_back(source: Path, odd: Path, tmp_path: Path) -> None:
    decode_package(odd, tmp_path / "dense", show_progress=False)
    decoded, weights = {}, {}
    for tensors, folder in ((decoded, tmp_path / "dense"), (weights, source)):
        for shard in folder.glob("*.safetensors"):
            tensors |= load_file(shard)
    assert decoded.keys() == weights.keys()
    for name, weight in weights.items():
        assert decoded[name].shape == weight.shape
        limit = 0.18 if ".experts." in name else 0  # 3 bits by the fast search: 0.02 squared
        assert relative(decoded[name], weight) <= limit


def test_cf_6b_padding_inside_gate_and_inside_up(odd: Path) -> None:
    package = open_package(odd)
    layer, evidence = read_package_layer(package, 0), read_evidence(package, 0)
    source = checkpoints.tensors(layers=1, experts=2, hidden=96, intermediate=704)
    for expert in range(2):
        where = evidence["experts"][expert]["low_to_high"]
        order = low_to_high(where, 768, "test")
        assert sorted(order[:64].tolist()) == list(range(704, 768))  # least important
        coded = unpack_expert(layer, expert)
        for suh, svh in ((coded.w1.suh, coded.w1.svh), (coded.w3.suh, coded.w3.svh)):
            assert (int((suh == 0).sum()), int((svh == 0).sum())) == (32, 64)
        assert (int((coded.w2.suh == 0).sum()), int((coded.w2.svh == 0).sum())) == (64, 32)
        dense = source_order(decode.dense_expert(coded), order)
        for name, part in zip(("w1", "w3", "w2"), checkpoints.PARTS, strict=True):
            padded = dense[name].T if name == "w2" else dense[name]  # [768, 128]
            assert not padded[704:].any()
            assert not padded[:, 96:].any()
            weight = source[checkpoints.expert_key(0, expert, part)]
            weight = weight.T if name == "w2" else weight
            assert relative(padded[:704, :96], weight) < 0.18
            assert relative(padded[640:704, :96], weight[640:]) < 0.2  # up to the border


def test_cf_6a_the_experts_run_at_the_true_width(odd: Path, memory_of_nan: None) -> None:
    package, dense = load_package(odd), DensePackage(odd)
    assert package.true_sizes == SIZES
    assert package.geometry == STORED
    weights = {name: dense.expert_weight(name) for name in dense.experts}
    x, ids, gates = routes(7, 96)
    expected = experts_forward(weights, 0, x, ids, gates)
    for forward in (moe_forward, moe_forward_reference):
        found = forward(x, package.layers[0], ids, gates)
        assert found.shape == (7, 96)
        assert found.is_contiguous()
        assert relative(found, expected) < 1e-5


@pytest.mark.parametrize(
    ("hidden", "intermediate"),
    [(160, 704), (128, 768), (96, 1408), (200, 1536), (96, 2880), (2880, 256), (2688, 250), (1, 1)],
)
def test_cf_6a_sizes(tmp_path: Path, memory_of_nan: None, hidden: int, intermediate: int) -> None:
    sizes = TrueSizes(hidden, intermediate)
    folder = write_package(tmp_path / "p", sizes.padded(2), true_sizes=sizes)
    package = load_package(folder)
    layer, x = package.layers[0], routes(3, hidden)
    weights = {}
    for expert in range(2):
        dense = decode.dense_expert(unpack_expert(layer, expert))
        kept = dense["w1"].any(1) | dense["w3"].any(1) | dense["w2"].any(0)
        assert int(kept.sum()) == intermediate
        for name, part in zip(("w1", "w3", "w2"), checkpoints.PARTS, strict=True):
            weight = dense[name].T if name == "w2" else dense[name]
            assert not weight[:, hidden:].any()
            weight = weight[kept, :hidden]
            key = checkpoints.expert_key(0, expert, part)
            weights[key] = weight.T if name == "w2" else weight
    expected = experts_forward(weights, 0, *x)
    for forward in (moe_forward, moe_forward_reference):
        found = forward(x[0], layer, *x[1:])
        assert found.shape == (3, hidden)
        assert relative(found, expected) < 1e-5


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("sizes", [TrueSizes(96, 200), TrueSizes(200, 704)])
def test_cf_6a_kernels(
    tmp_path: Path, memory_of_nan: None, device: str, dtype: torch.dtype, sizes: TrueSizes
) -> None:
    """The kernels run on stored sizes; on a GPU moe_forward takes rows there and back."""
    folder = write_package(tmp_path / "p", sizes.padded(2), true_sizes=sizes)
    layer = load_package(folder, device=place(device)).layers[0]
    x, ids, gates = (t.to(layer.atoms.device) for t in routes(3, sizes.hidden))
    x = x.to(dtype)
    if device == "cpu":  # where moe_forward runs the reference
        rows, stored = padded_rows(x, layer), replace(layer, hidden_padding=0)
        found = moe_forward_kernels(rows, stored, ids, gates)
        assert not found[:, sizes.hidden :].any()
        found = found[:, : sizes.hidden]
    else:
        found = moe_forward(x, layer, ids, gates)
    assert error(found, moe_forward_reference(x.float(), layer, ids, gates)) < BOUND[dtype]


@pytest.mark.parametrize("forward", [moe_forward, moe_forward_reference])
@pytest.mark.parametrize("width", [128, 95])
def test_rows_of_another_width_are_refused(odd: Path, forward: Callable, width: int) -> None:
    layer = load_package(odd).layers[0]
    _, ids, gates = routes(2, 96)
    with pytest.raises(ValueError, match=rf"x has shape \[2, {width}\], expected \[T, 96\]"):
        forward(torch.zeros(2, width), layer, ids, gates)


def test_a_padded_layer_compiles(odd: Path) -> None:
    layer = load_package(odd).layers[0]
    x, ids, gates = routes(5, 96)
    compiled = torch.compile(
        lambda x: moe_forward(x, layer, ids, gates), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(x), moe_forward(x, layer, ids, gates))


def test_a_padded_package_in_transformers(odd: Path, tmp_path: Path) -> None:
    integration = pytest.importorskip("qsrt_runtime.integrations.transformers")
    from transformers import AutoModelForCausalLM

    decode_package(odd, tmp_path / "dense", dtype="float32", show_progress=False)
    packed, dense = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (odd, tmp_path / "dense")
    )
    assert any(isinstance(m, integration.PackedExperts) for m in packed.modules())
    ids = torch.arange(1, 21)[None]
    with torch.inference_mode():
        expected = dense(ids).logits
        assert relative(packed(ids).logits, expected) < 1e-5
        plain = packed.dequantize()
        assert plain.model.layers[0].mlp.experts.gate_up_proj.shape == (2, 2 * 704, 96)
        assert relative(plain(ids).logits, expected) < 1e-5


def test_the_plan_states_what_padding_costs(source: Path, tmp_path: Path) -> None:
    found = job.prepare(source, tmp_path / "out", FAST).plan
    assert (found["true_hidden_size"], found["true_intermediate_size"]) == (96, 704)
    assert (found["hidden_size"], found["intermediate_size"]) == (128, 768)
    assert found["padding_overhead"] == (128 * 768) / (96 * 704)
    assert found["expert_weights"] == 2 * 3 * 96 * 704
    run = [main, ["convert", str(source), str(tmp_path / "out"), "--dry-run", "--search", "fast"]]
    text = CliRunner().invoke(*run).output
    assert "padded      with zeros to 128 x 768: 45.5 % more expert bytes" in text
    run[1].append("--json")
    assert json.loads(CliRunner().invoke(*run).stdout)["padding_overhead"] == 128 * 768 / 96 / 704


def test_a_size_that_fits_costs_nothing(clean_checkpoint: Path, tmp_path: Path) -> None:
    assert job.prepare(clean_checkpoint, tmp_path / "out", FAST).plan["padding_overhead"] == 1
    run = [main, ["convert", str(clean_checkpoint), str(tmp_path / "out"), "--dry-run"]]
    assert "padded" not in CliRunner().invoke(*run).output


def test_the_published_loader_gets_no_padded_package(source: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"96 x 704 are stored padded.*leave out --loader kquant"):
        job.prepare(source, tmp_path / "out", FAST, loader="kquant")
    assert not (tmp_path / "out").exists()


def resealed(folder: Path, layer: bytes) -> None:
    """Give a package another layer file, and redo every digest."""
    name = manifest.layer_file_name(0)
    (folder / name).write_bytes(layer)
    digest = paths.sha256_file(folder / name)
    evidence = folder / manifest.evidence_file_name(0)
    value = json.loads((folder / manifest.MANIFEST).read_text())
    value["layers"]["0"]["sha256"] = digest
    (folder / manifest.MANIFEST).write_bytes(schema.dump(value))
    value = json.loads(evidence.read_text())
    value["safetensors_sha256"] = digest
    evidence.write_bytes(schema.dump(value))
    seal(folder)


@pytest.mark.parametrize("side", ["hidden", "intermediate"])
def test_padding_that_is_not_zero_is_refused(tmp_path: Path, side: str) -> None:
    sizes = TrueSizes(96, 200)
    folder = write_package(tmp_path / "p", sizes.padded(2), true_sizes=sizes)
    layer = read_package_layer(open_package(folder), 0)
    scales, atoms = layer.shared_scales.clone(), layer.atoms.clone()
    if side == "hidden":
        scales[2, 1, 96] = 0.5
    else:
        local = atoms[:, 36 * 128 : 36 * 128 + 192].view(torch.float16)
        local[local == 0] = 0.5
    data = bytearray((folder / manifest.layer_file_name(0)).read_bytes())
    size = layer.atoms.nbytes
    data[len(data) - size :] = atoms.numpy().tobytes()
    at = len(data) - size - 4096
    data[at : at + scales.nbytes] = scales.numpy().tobytes()
    resealed(folder, bytes(data))
    for read in (lambda: validate(folder, show_progress=False), lambda: load_package(folder)):
        with pytest.raises(FormatError, match=f"scales of padded {side} channels are not all 0"):
            read()


@pytest.fixture(scope="module")
def odd_text(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Statistics]:
    """A checkpoint of experts of 96 x 200 with a tokenizer, and its statistics of a text."""
    example, folder = repository / "examples/tiny_moe", tmp_path_factory.mktemp("text")
    vocabulary = json.loads((example / "model/config.json").read_text())["vocab_size"]
    weights = checkpoints.tensors(layers=1, experts=2, hidden=96, intermediate=200)
    generator = torch.Generator().manual_seed(1)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.randn(vocabulary, 96, generator=generator).bfloat16()
    value = config(TrueSizes(96, 200), vocab_size=vocabulary, num_experts_per_tok=1)
    source = checkpoints.write_checkpoint(folder / "model", config_value=value, weights=weights)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(example / "model" / name, source)
    stats = folder / "stats"
    given = {"window": 64, "windows": 40, "show_progress": False}
    return source, calibrate(source, example / "calib.txt", stats, **given)


@pytest.mark.parametrize("modes", ["R0", "all"])
def test_cf_6a_calibrated(
    repository: Path, odd_text: tuple[Path, Statistics], tmp_path: Path, modes: str
) -> None:
    """Statistics are of the true sizes; nothing is known of padding, and nothing is lost by it."""
    source, statistics = odd_text
    layer = statistics.layer(0)
    assert layer.rows.shape[1] == layer.moments.shape[1] == 96
    settings = replace(FAST, calibration_sha256=statistics.digest, modes=modes)
    out = tmp_path / "out"
    given = job.prepare(source, out, settings, statistics=statistics)
    evidence = job.run(given, show_progress=False)
    validate(out, deep=True, show_progress=False)
    dense = DensePackage(out)
    for entry in evidence[0]["experts"]:
        assert entry["fallback"] is None
        assert 0 < entry["functional_nmse"] < 0.1
    for name in dense.experts:
        assert torch.isfinite(dense.expert_weight(name)).all()
    x, ids, gates = routes(64, 96)
    weights = checkpoints.tensors(layers=1, experts=2, hidden=96, intermediate=200)
    expected = experts_forward(weights, 0, x, ids, gates)
    found = moe_forward(x, load_package(out).layers[0], ids, gates)
    assert relative(found, expected) < 0.35
    text = repository / "examples/tiny_moe/eval.txt"
    report = evaluate(out, source, text, window=64, windows=2, show_progress=False)
    assert report["expert_weights"] == 2 * 3 * 96 * 200
    assert 0 < report["kl_mean"] < 0.1
