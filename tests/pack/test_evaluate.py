"""How far a package is from its reference, on a text of a 64-character alphabet."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import checkpoints
import pytest
import torch
from architectures import write_model
from checkpoints import ALPHABET, config, write_checkpoint, write_tokenizer
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen3VLMoeConfig,
)

from qsrt_pack import job, plan
from qsrt_pack.encode.expert import Settings
from qsrt_pack.evaluate import describe, evaluate, models
from qsrt_pack.evaluate.scores import Totals, compare, histogram, interval, quantile
from qsrt_pack.evaluate.tokens import read_windows
from qsrt_pack.restore import decode_package
from qsrt_pack.validate import validate
from qsrt_runtime.format import schema
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.package import seal

TEXT = "The quick brown fox jumps over the lazy dog. Pack my box with 12 dozen liquor jugs. " * 5


def one_layer_model(folder: Path, *, tied: bool = False, seed: int = 0) -> Path:
    """A checkpoint of one layer of two experts, and a tokenizer."""
    weights = checkpoints.tensors(layers=1, experts=2, seed=seed)
    weights = {name: 4 * t if ".experts." in name else t for name, t in weights.items()}
    if tied:
        del weights["lm_head.weight"]
    value = config(
        num_hidden_layers=1, num_experts=2, num_experts_per_tok=1, tie_word_embeddings=tied
    )
    write_checkpoint(folder, config_value=value, weights=weights)
    write_tokenizer(folder)
    return folder


def packed(source: Path, out: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "probe", lambda _method, _device: 1e6)
        job.run(job.prepare(source, out, Settings(search="fast")), show_progress=False)
    return out


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return one_layer_model(tmp_path_factory.mktemp("evaluate") / "model")


@pytest.fixture(scope="module")
def package_of_source(source: Path) -> Path:
    return packed(source, source.with_name("package"))


@pytest.fixture(scope="module")
def dense(package_of_source: Path) -> Path:
    """What the package decodes to, exactly."""
    out = package_of_source.with_name("dense")
    decode_package(package_of_source, out, dtype="float32", show_progress=False)
    return out


@pytest.fixture(scope="module")
def text(source: Path) -> Path:
    path = source.with_name("text.txt")
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def report(package_of_source: Path, source: Path, text: Path) -> dict:
    return evaluate(package_of_source, source, text, window=32, show_progress=False)


def logits_of(folder: Path, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every whole window of the text, and its tokens: [n, window, 64], [n, window]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    count = len(TEXT) // window
    ids = torch.tensor([ALPHABET.index(character) for character in TEXT[: count * window]])
    ids = ids.view(count, window)
    with torch.inference_mode():
        return model(ids).logits, ids


def test_the_report_is_by_its_schema(report: dict, package_of_source: Path, text: Path) -> None:
    schema.check(report, "report", "report")
    assert report["kind"] == "eval"
    assert report["reference_is_source"] is True
    assert report["text_sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
    assert (report["window"], report["windows"]) == (32, len(TEXT) // 32)
    assert report["positions"] == 32 * (len(TEXT) // 32)
    assert report["expert_weights"] == 2 * 3 * 128 * 256
    checked = validate(package_of_source, show_progress=False)
    for key in ("seal_sha256", "bits_per_expert_weight", "package"):
        assert report[key] == checked[key]


def test_the_figures_are_those_of_the_two_models(report: dict, source: Path, dense: Path) -> None:
    (reference, ids), (other, _) = logits_of(source, 32), logits_of(dense, 32)
    p, q = (log_softmax(logits.double(), -1) for logits in (reference, other))
    kl = kl_div(q, p, log_target=True, reduction="none").sum(-1)
    assert 0 < report["kl_mean"] == pytest.approx(float(kl.mean()), rel=1e-3)
    assert report["kl_max"] == pytest.approx(float(kl.max()), rel=1e-3)
    same = (reference.argmax(-1) == other.argmax(-1)).double().mean()
    assert report["top1_agreement"] == pytest.approx(float(same))
    shared = [
        len(set(a.tolist()) & set(b.tolist())) / 10
        for a, b in zip(
            reference.topk(10).indices.flatten(0, 1),
            other.topk(10).indices.flatten(0, 1),
            strict=True,
        )
    ]
    assert report["top10_agreement"] == pytest.approx(sum(shared) / len(shared))
    for key, logits in (("reference_score", reference), ("package_score", other)):
        loss = float(cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
        assert report[key]["cross_entropy"] == pytest.approx(loss, rel=1e-5)
        assert report[key]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


def test_a_package_is_its_own_decoded_checkpoint(
    package_of_source: Path, dense: Path, text: Path, report: dict
) -> None:
    own = evaluate(package_of_source, dense, text, window=32, show_progress=False)
    assert own["reference_is_source"] is False
    # The same float32 model twice: log_softmax alone is off by 1e-6 or so.
    assert abs(own["kl_mean"]) < 1e-5 < report["kl_mean"]
    assert own["top1_agreement"] == own["top10_agreement"] == 1
    assert own["reference_score"] == own["package_score"] == report["package_score"]
    assert "not the checkpoint that was packed" in describe(own)
    assert "not the checkpoint that was packed" not in describe(report)


def test_another_model_is_far_away(package_of_source: Path, text: Path, report: dict) -> None:
    other = one_layer_model(text.with_name("other"), seed=1)
    far = evaluate(package_of_source, other, text, window=32, show_progress=False)
    assert far["kl_mean"] > 10 * report["kl_mean"]
    assert far["reference_is_source"] is False


def test_tied_embeddings(tmp_path: Path, text: Path) -> None:
    source = one_layer_model(tmp_path / "model", tied=True)
    package = packed(source, tmp_path / "package")
    decode_package(package, tmp_path / "dense", dtype="float32", show_progress=False)
    near = evaluate(package, source, text, window=64, windows=1, show_progress=False)
    own = evaluate(package, tmp_path / "dense", text, window=64, windows=1, show_progress=False)
    assert abs(own["kl_mean"]) < 1e-5 < near["kl_mean"] < 1


def test_nothing_is_printed(
    package_of_source: Path, source: Path, text: Path, capfd: pytest.CaptureFixture
) -> None:
    evaluate(package_of_source, source, text, window=64, windows=1, show_progress=False)
    assert capfd.readouterr() == ("", "")


def test_windows_are_counted_from_the_start(
    package_of_source: Path, source: Path, text: Path
) -> None:
    default = evaluate(package_of_source, source, text, show_progress=False)
    assert (default["window"], default["windows"]) == (128, len(TEXT) // 128)  # the longest context
    first = evaluate(package_of_source, source, text, window=16, windows=2, show_progress=False)
    assert (first["window"], first["windows"], first["positions"]) == (16, 2, 32)
    short = text.with_name("short.txt")
    short.write_text(TEXT[:47])
    again = evaluate(package_of_source, source, short, window=16, windows=9, show_progress=False)
    assert again["windows"] == 2
    for key in ("kl_mean", "kl_max", "package_score", "top10_agreement"):
        assert again[key] == first[key]


def test_a_text_that_is_too_short(package_of_source: Path, source: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT[:100])
    with pytest.raises(FormatError, match="has 100 tokens, a window takes 128"):
        evaluate(package_of_source, source, text, show_progress=False)


def test_a_window_beyond_the_models_context(
    package_of_source: Path, source: Path, text: Path
) -> None:
    with pytest.raises(FormatError, match="window of 129 tokens is longer than the model's 128"):
        evaluate(package_of_source, source, text, window=129, show_progress=False)


def _without_head(folder: Path) -> None:
    index = checkpoints.INDEX
    shards = {path: load_file(path) for path in folder.glob("*.safetensors")}
    for path, tensors in shards.items():
        if tensors.pop("lm_head.weight", None) is not None:
            save_file(tensors, path, metadata={"format": "pt"})
    checkpoints.edit_json(folder / index, lambda value: value["weight_map"].pop("lm_head.weight"))


def _edit_config(**changes: object) -> Callable[[Path], None]:
    return lambda folder: checkpoints.edit_json(
        folder / "config.json", lambda value: value.update(changes)
    )


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_without_head, r"missing keys, lm_head\.weight for one"),
        (_edit_config(vocab_size=65), "transformers cannot load .*vocab|vocabulary|mismatched"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "transformers cannot load .*Error"),
        (lambda f: (f / "tokenizer.json").unlink(), "transformers cannot load|makes no token"),
    ],
)
def test_a_reference_that_does_not_do(
    package_of_source: Path,
    source: Path,
    text: Path,
    tmp_path: Path,
    damage: Callable[[Path], object],
    said: str,
) -> None:
    reference = shutil.copytree(source, tmp_path / "reference")
    damage(reference)
    with pytest.raises(FormatError, match=said):
        evaluate(package_of_source, reference, text, show_progress=False)


@pytest.mark.parametrize("architectures", [None, ["NoSuchModel"]])
def test_a_package_that_transformers_has_no_class_for(
    package_of_source: Path, source: Path, text: Path, tmp_path: Path, architectures: object
) -> None:
    package = shutil.copytree(package_of_source, tmp_path / "package")
    _edit_config(architectures=architectures)(package)
    seal(package)
    with pytest.raises(FormatError, match=r"transformers cannot load .*package"):
        evaluate(package, source, text, show_progress=False)


def test_a_text_that_is_no_utf_8(package_of_source: Path, source: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"\xff\xfe")
    with pytest.raises(FormatError, match="text is not UTF-8 text"):
        evaluate(package_of_source, source, tmp_path / "text", show_progress=False)


def test_a_reference_that_is_none(package_of_source: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="it is a package already"):
        evaluate(package_of_source, package_of_source, text, show_progress=False)
    with pytest.raises(FormatError, match="is not a folder"):
        evaluate(package_of_source, tmp_path / "none", text, show_progress=False)


def test_a_damaged_package_is_not_evaluated(
    package_of_source: Path, source: Path, text: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(package_of_source, tmp_path / "copy")
    (copy / "qsrt-layer-000.json").write_text("{}")
    with pytest.raises(FormatError, match=r"qsrt-layer-000\.json is damaged"):
        evaluate(copy, source, text, window=32, show_progress=False)


@pytest.mark.parametrize("chunk", [1, 9, 1000, 5000])
def test_chunks_of_a_large_vocabulary_give_the_plain_formulas(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (3 * torch.randn(6, 2503, generator=generator) for _ in range(2))
    q = p + 0.3 * q
    tokens = torch.randint(2503, (5,), generator=generator)
    found = compare(p, q, tokens, chunk)
    log_p, log_q = (log_softmax(x.double(), -1) for x in (p, q))
    kl = kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(found.kl, kl, rtol=1e-10, atol=0)
    top_p, top_q = (x.topk(10).indices.tolist() for x in (p, q))
    same = [float(a[0] == b[0]) for a, b in zip(top_p, top_q, strict=True)]
    shared = [len({*a} & {*b}) / 10 for a, b in zip(top_p, top_q, strict=True)]
    assert found.top1.tolist() == same
    assert found.top10.tolist() == pytest.approx(shared)
    assert 0 < found.top10.mean() < 1
    for nll, logits in ((found.reference_nll, p), (found.nll, q)):
        loss = cross_entropy(logits[:5].double(), tokens, reduction="none")
        torch.testing.assert_close(nll, loss, rtol=1e-10, atol=0)


def test_totals_do_not_depend_on_the_cut_into_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(30, 7, generator=generator) for _ in range(2))
    tokens = torch.randint(7, (30,), generator=generator)
    figures = []
    for step in (30, 29, 4):
        totals = Totals()
        cut = [slice(first, first + step) for first in range(0, 30, step)]
        totals.add([compare(p[rows], q[rows], tokens[1:][rows]) for rows in cut])
        figures.append(
            (totals.figures(torch.zeros(1, dtype=torch.int64)), totals.reference_score())
        )
    assert figures[0][0]["top10_agreement"] == 1  # of all seven
    assert figures[0][0]["kl_mean_interval"] is None  # of one document
    for other, score in figures[1:]:
        assert other["kl_mean"] == pytest.approx(figures[0][0]["kl_mean"])
        assert other["score"] == pytest.approx(figures[0][0]["score"])
        assert score == pytest.approx(figures[0][1])


@pytest.mark.parametrize("share", [0, 0.25, 0.5, 0.99, 1])
def test_a_quantile_is_torchs(share: float) -> None:
    values = torch.rand(37, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert quantile(values.sort().values, share) == pytest.approx(float(values.quantile(share)))


def test_the_interval_is_of_documents() -> None:
    """Of means of n values it is about 1.96 deviations / sqrt(n) to both sides."""
    generator = torch.Generator().manual_seed(2)
    values = torch.rand(400, generator=generator)
    kl = [value.expand(8) for value in values]
    found = interval(kl, torch.arange(400))
    half = 1.96 * float(values.std()) / 20
    assert found["low"] == pytest.approx(float(values.mean()) - half, abs=0.15 * half)
    assert found["high"] == pytest.approx(float(values.mean()) + half, abs=0.15 * half)
    assert found == interval(kl, torch.arange(400))
    wider = interval([v.expand(8) for v in values.sort().values], torch.arange(400) // 20)
    assert wider["high"] - wider["low"] > 3 * (found["high"] - found["low"])


def test_the_histogram_counts_every_position() -> None:
    found = histogram(torch.tensor([0, 1e-9, 1.01e-6, 0.11, 0.12, 99.0, 1e5], dtype=torch.float64))
    edges, counts = found["edges"], found["counts"]
    assert (len(edges), sum(counts)) == (len(counts) + 1, 7)
    assert (edges[0], edges[-1]) == (pytest.approx(1e-6), pytest.approx(100))
    assert (counts[0], counts[-1]) == (3, 2)
    (at,) = [i for i, e in enumerate(edges) if e == pytest.approx(0.1)]
    assert counts[at] == 2


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of the models that are loaded, in order."""
    found: list[Path] = []
    load = models.load

    def see(model: models.Model, *arguments: object) -> object:
        found.append(model.path)
        return load(model, *arguments)

    monkeypatch.setattr(models, "load", see)
    return found


def test_the_reference_runs_once_for_a_cache(
    package_of_source: Path, source: Path, text: Path, report: dict, tmp_path: Path, loaded: list
) -> None:
    cache = tmp_path / "logits.safetensors"
    given = {"window": 32, "cache": cache, "show_progress": False}
    found = [evaluate(package_of_source, source, text, **given) for _ in range(2)]
    assert loaded == [source, package_of_source, package_of_source]
    for each in found:
        assert {**each, "seconds": 0} == {**report, "seconds": 0}
    logits, _ = logits_of(source, 32)
    torch.testing.assert_close(load_file(cache)["logits"], logits)
    assert [path.name for path in tmp_path.iterdir()] == ["logits.safetensors"]


def test_a_cache_that_cannot_be_written_is_seen_first(
    package_of_source: Path, tmp_path: Path
) -> None:
    for cache, message in (
        (package_of_source / "logits", f"lies in the package {package_of_source}, which is sealed"),
        (tmp_path / ("n" * 250), "the name has 250 bytes, expected at most 239; choose"),
        (tmp_path / "none" / "logits", "none is not a folder; make it"),
    ):
        with pytest.raises(FormatError, match=message):
            evaluate(package_of_source, tmp_path, tmp_path, cache=cache, show_progress=False)


def test_a_cache_of_something_else_is_refused(
    package_of_source: Path, source: Path, dense: Path, text: Path, tmp_path: Path, loaded: list
) -> None:
    cache = tmp_path / "logits.safetensors"
    given = {"cache": cache, "show_progress": False}
    evaluate(package_of_source, source, text, window=32, windows=2, **given)
    before = cache.read_bytes()
    del loaded[:]
    for reference, window, key in (
        (dense, 32, "reference_sha256"),
        (source, 64, "tokens_sha256"),
        (source, 16, "tokens_sha256"),
    ):
        with pytest.raises(FormatError, match=f"of another .*: {key} is .*; delete it"):
            evaluate(package_of_source, reference, text, window=window, windows=2, **given)
    cache.write_bytes(before[:-1])
    with pytest.raises(FormatError, match=r"logits\.safetensors.*(truncated|ends|size)"):
        evaluate(package_of_source, source, text, window=32, windows=2, **given)
    save_file({"logits": torch.zeros(2, 32, 64)}, cache)
    with pytest.raises(FormatError, match="of another format: schema is None"):
        evaluate(package_of_source, source, text, window=32, windows=2, **given)
    assert loaded == []


def test_a_failed_reference_leaves_no_cache(
    package_of_source: Path, source: Path, text: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(source, tmp_path / "model")
    shard = broken / "model-00001-of-00002.safetensors"
    weights = load_file(shard)
    name = next(name for name in weights if "self_attn" in name)
    weights[name] = torch.full_like(weights[name], torch.nan)
    save_file(weights, shard, metadata={"format": "pt"})
    (tmp_path / "cache").mkdir()
    cache = tmp_path / "cache" / "logits"
    with pytest.raises(FormatError, match="model: the model gives logits that are not finite"):
        evaluate(package_of_source, broken, text, cache=cache, show_progress=False)
    assert [*cache.parent.iterdir()] == []


def test_a_full_disk_is_seen_before_anything_runs(
    package_of_source: Path,
    source: Path,
    text: Path,
    tmp_path: Path,
    loaded: list,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 0, 10**4))
    cache = tmp_path / "logits"
    with pytest.raises(FormatError, match=r"take 16,384 bytes, .* has 10,000 free; name another"):
        evaluate(
            package_of_source, source, text, window=32, windows=2, cache=cache, show_progress=False
        )
    assert loaded == []


def test_others_stand_in_one_table(
    package_of_source: Path, source: Path, dense: Path, text: Path, report: dict, loaded: list
) -> None:
    others = (dense, package_of_source, source)
    found = evaluate(
        package_of_source, source, text, window=32, against=others, show_progress=False
    )
    assert loaded == [source, package_of_source, *others]
    decoded, again, itself = found["against"]
    assert [item["name"] for item in found["against"]] == ["dense", "package", "model"]
    assert [item["kind"] for item in found["against"]] == ["checkpoint", "package", "checkpoint"]
    for key in ("kl_mean", "kl_p99", "kl_histogram", "stored_bytes", "bits_per_expert_weight"):
        assert again[key] == found[key]
    for key in ("kl_mean", "kl_p99", "top1_agreement"):
        assert again[key] == report[key]
        assert decoded[key] == pytest.approx(report[key], rel=1e-4)
    assert again["score"] == report["package_score"]
    assert (itself["kl_max"], itself["top1_agreement"]) == (0, 1)
    assert itself["score"] == report["reference_score"]
    assert (decoded["bits_per_expert_weight"], itself["bits_per_expert_weight"]) == (32, 16)
    for item, folder in zip(found["against"], others, strict=True):
        shards = [*folder.glob("*.safetensors")]
        assert item["stored_bytes"] == sum(path.stat().st_size for path in shards)
    *_, head, own, first, second, third = describe(found).splitlines()
    assert head.split()[0] == "candidate"
    assert len({len(line) for line in (head, own, first, second, third)}) == 1
    assert [line.split()[0] for line in (own, first, third)] == ["package", "dense", "model"]
    assert f"{decoded['kl_p99']:.5f}" in first and "32.0000" in first


def test_another_of_another_vocabulary_is_refused(
    package_of_source: Path, source: Path, text: Path, tmp_path: Path, loaded: list
) -> None:
    other = shutil.copytree(source, tmp_path / "other")
    _edit_config(vocab_size=65)(other)
    with pytest.raises(FormatError, match=r"model has a vocabulary of 64, .*other of 65"):
        evaluate(package_of_source, source, text, against=[other], show_progress=False)
    with pytest.raises(FormatError, match="none is not a folder"):
        missing = [tmp_path / "none"]
        evaluate(package_of_source, source, text, against=missing, show_progress=False)
    assert loaded == []


def test_the_noise_floor_is_the_reference_in_bfloat16(
    package_of_source: Path, source: Path, text: Path, report: dict
) -> None:
    given = {"window": 32, "noise_floor": True, "show_progress": False}
    found = evaluate(package_of_source, source, text, **given)
    (p, ids), model = logits_of(source, 32), AutoModelForCausalLM.from_pretrained(source)
    assert model.dtype == torch.bfloat16
    with torch.inference_mode():
        q = torch.cat([model.eval()(row[None]).logits for row in ids]).double()
    p, q = log_softmax(p.double(), -1), log_softmax(q, -1)
    kl = kl_div(q, p, log_target=True, reduction="none").sum(-1)
    assert found["noise_floor"]["kl_mean"] == pytest.approx(float(kl.mean()), rel=1e-4)
    assert 0 < found["noise_floor"]["kl_mean"] < 0.1 * found["kl_mean"]
    assert report["noise_floor"] is None
    assert "noise floor" in describe(found) and "noise floor" not in describe(report)


def test_percentiles_interval_and_histogram_are_of_the_positions(
    report: dict, source: Path, dense: Path
) -> None:
    (reference, _), (other, _) = logits_of(source, 32), logits_of(dense, 32)
    p, q = (log_softmax(logits.double(), -1) for logits in (reference, other))
    kl = kl_div(q, p, log_target=True, reduction="none").sum(-1)
    for key, share in (("kl_median", 0.5), ("kl_p90", 0.9), ("kl_p99", 0.99)):
        assert report[key] == pytest.approx(float(kl.quantile(share)), rel=1e-3)
    assert sum(report["kl_histogram"]["counts"]) == report["positions"] == kl.numel()
    found, half = report["kl_mean_interval"], 2 * float(kl.mean(1).std()) / len(kl) ** 0.5
    assert report["documents"] == len(kl)
    assert float(kl.mean()) - 1.5 * half < found["low"] < float(kl.mean())
    assert float(kl.mean()) < found["high"] < float(kl.mean()) + 1.5 * half


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint16])
def test_tokens_in_a_file_are_those_of_the_text(
    package_of_source: Path,
    source: Path,
    text: Path,
    report: dict,
    tmp_path: Path,
    dtype: torch.dtype,
) -> None:
    tokens = tmp_path / "tokens.safetensors"
    ids = torch.tensor([ALPHABET.index(character) for character in TEXT])
    save_file({"tokens": ids.to(dtype)}, tokens)
    found = evaluate(package_of_source, source, tokens, window=32, show_progress=False)
    assert found["text_sha256"] == hashlib.sha256(tokens.read_bytes()).hexdigest()
    for key in ("kl_mean", "kl_p99", "documents", "positions", "package_score"):
        assert found[key] == report[key]


def test_rows_of_tokens_are_documents(tmp_path: Path) -> None:
    path = tmp_path / "tokens.safetensors"
    save_file({"tokens": torch.arange(21).view(3, 7)}, path)
    found = read_windows(path, tmp_path, 21, None, 3, None)
    assert found.tokens.tolist() == [
        *([0, 1, 2], [3, 4, 5], [7, 8, 9], [10, 11, 12], [14, 15, 16], [17, 18, 19])
    ]
    assert found.documents.tolist() == [0, 0, 1, 1, 2, 2]
    assert read_windows(path, tmp_path, 21, None, 3, 3).documents.tolist() == [0, 0, 1]
    save_file({"tokens": torch.arange(21)}, path)
    flat = read_windows(path, tmp_path, 21, None, 3, None)
    assert (flat.tokens.tolist()[6], flat.documents.tolist()) == ([18, 19, 20], [*range(7)])
    assert flat.digest != found.digest != read_windows(path, tmp_path, 21, None, 7, None).digest


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"ids": torch.arange(9)}, "has no tensor 'tokens'"),
        ({"tokens": torch.ones(9)}, r"tokens is F32 \[9\], expected one of I64, I32, U16"),
        ({"tokens": torch.zeros(2, 2, 2, dtype=torch.int64)}, r"is I64 \[2, 2, 2\], expected"),
        ({"tokens": torch.zeros(0, 9, dtype=torch.int64)}, r"is I64 \[0, 9\], expected"),
        ({"tokens": torch.tensor([0, 63, 64])}, r"tokens\[2\] is 64, the vocabulary has 64"),
        ({"tokens": torch.tensor([[0, 1], [-1, 0]])}, r"tokens\[1, 0\] is -1, the vocabulary"),
        ({"tokens": torch.arange(9)}, "has 9 tokens, a window takes 10"),
    ],
)
def test_files_of_tokens_that_do_not_do(tmp_path: Path, tensors: dict, said: str) -> None:
    path = tmp_path / "tokens.safetensors"
    save_file(tensors, path)
    with pytest.raises(FormatError, match=said):
        read_windows(path, tmp_path, 64, None, 10, None)


def test_describe_is_a_table(report: dict) -> None:
    lines = describe(report).splitlines()
    assert f"{report['kl_mean']:.5f} nats" in lines[0]
    assert len({line.index("  ") > 0 for line in lines}) == 1
    assert any(f"{report['positions']:,} in windows of 32" in line for line in lines)


@pytest.mark.parametrize("apart", [False, True])
def test_layers_of_next_token_prediction_take_no_part(
    source: Path, package_of_source: Path, text: Path, tmp_path: Path, apart: bool
) -> None:
    more = load_file(source / "model-00001-of-00002.safetensors")
    more |= load_file(source / "model-00002-of-00002.safetensors")
    new = "mtp.layers.0." if apart else "model.layers.1."
    more |= {n.replace("model.layers.0.", new): t.clone() for n, t in more.items() if ".0." in n}
    value = json.loads((source / "config.json").read_text())
    value |= {} if apart else {"num_nextn_predict_layers": 1}
    model = write_checkpoint(tmp_path / "model", config_value=value, weights=more)
    write_tokenizer(model)
    report = evaluate(packed(model, tmp_path / "p"), model, text, show_progress=False)
    expected = evaluate(package_of_source, source, text, show_progress=False)
    assert report["kl_mean"] == pytest.approx(expected["kl_mean"], rel=1e-6)


def test_no_cache_is_asked_for(text: Path, tmp_path: Path) -> None:
    """A model of linear attention alone has none that transformers can count."""
    write_model(tmp_path / "model", "qwen3_next")
    write_tokenizer(tmp_path / "model")
    package = packed(tmp_path / "model", tmp_path / "package")
    report = evaluate(package, tmp_path / "model", text, windows=1, show_progress=False)
    assert 0 < report["kl_mean"] < 0.1


def test_a_model_that_transformers_cannot_run(text: Path, tmp_path: Path) -> None:
    """Llama4ForConditionalGeneration needs images."""
    write_model(tmp_path / "model", "llama4")
    write_tokenizer(tmp_path / "model")
    package = packed(tmp_path / "model", tmp_path / "package")
    with pytest.raises(FormatError, match=r"transformers cannot run .*model: AttributeError"):
        evaluate(package, tmp_path / "model", text, windows=1, show_progress=False)


def test_a_model_of_images_and_text(text: Path, tmp_path: Path) -> None:
    sizes = {
        **{"hidden_size": 128, "num_hidden_layers": 1, "vocab_size": 64, "head_dim": 32},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 256},
        **{"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 256},
        "max_position_embeddings": 64,
    }
    vision = {
        **{"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2},
        **{"out_hidden_size": 128, "patch_size": 4, "deepstack_visual_indexes": [0]},
    }
    whole = Qwen3VLMoeConfig(text_config=sizes, vision_config=vision)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(whole).bfloat16()
    model.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    package = packed(tmp_path / "model", tmp_path / "package")
    report = evaluate(package, tmp_path / "model", text, show_progress=False)
    assert 0 < report["kl_mean"] < 0.1
    assert report["reference_is_source"]
