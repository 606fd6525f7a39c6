"""Calibration on the bundled model: made, resumed, refused, and worth having."""

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from architectures import write_model
from checkpoints import edit_json, expert_key, write_tokenizer
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from qsrt_pack import calibration, job, plan, produce
from qsrt_pack.calibration import calibrate
from qsrt_pack.cli import main
from qsrt_pack.encode.expert import Settings
from qsrt_pack.evaluate import evaluate
from qsrt_pack.guide import NO_LAYER_ROWS, NO_ROWS
from qsrt_pack.output import state_file
from qsrt_pack.statistics import DOCUMENT, open_statistics
from qsrt_pack.validate import validate
from qsrt_runtime.format import paths
from qsrt_runtime.format.errors import FormatError

LAYERS, EXPERTS, HIDDEN = 2, 4, 128


@pytest.fixture(autouse=True)
def no_probe(monkeypatch):
    monkeypatch.setattr(plan, "probe", lambda _method, _device: 1e6)


@pytest.fixture(scope="session")
def text(repository):
    return repository / "examples/tiny_moe/calib.txt"


@pytest.fixture(scope="session")
def model(example):
    return example[0]


def run(model, text, out, **options):
    return calibrate(model, text, out, **({"windows": 6, "show_progress": False} | options))


@pytest.fixture(scope="module")
def statistics(model, text, tmp_path_factory):
    """Six windows. Never written to."""
    return run(model, text, tmp_path_factory.mktemp("calibration") / "stats")


@pytest.fixture
def damaged(statistics, tmp_path):
    """A copy to damage."""
    return shutil.copytree(statistics.path, tmp_path / "stats")


def settings(statistics, **changes):
    return Settings(search="fast", calibration_sha256=statistics.digest, **changes)


def convert(model, out, statistics, **changes):
    given = settings(statistics, **changes)
    prepared = job.prepare(model, out, given, statistics=statistics)
    return job.run(prepared, show_progress=False)


def layer_files(out):
    return {path.name: path.read_bytes() for path in sorted(out.glob("qsrt-layer-*"))}


def test_what_is_kept(statistics):
    names = {f"{kind}-00{layer}.safetensors" for kind in ("layer", "gradients") for layer in (0, 1)}
    assert {path.name for path in statistics.path.iterdir()} == names | {DOCUMENT}
    assert set(statistics.document["files"]) == names
    window = statistics.document["settings"]["window"]
    for number in range(LAYERS):
        layer = statistics.layer(number)
        assert layer.rows.shape == layer.gradients.shape == (6 * window, HIDDEN)
        assert int(layer.tokens.sum()) == 6 * window * layer.ids.shape[1]
        assert statistics.document["layers"][str(number)] == {
            "tokens": layer.tokens.tolist(),
            "dropped": 0,
        }
        assert layer.documents.unique().tolist() == list(range(6))
        assert layer.gradients.any()
        torch.testing.assert_close(layer.gates.sum(1), torch.ones(6 * window))


def test_without_the_backward_pass(model, text, tmp_path, statistics):
    found = run(model, text, tmp_path / "stats", backward=False)
    assert sorted(found.document["files"]) == ["layer-000.safetensors", "layer-001.safetensors"]
    assert found.layer(1).gradients.shape == (0, HIDDEN)
    assert torch.equal(found.layer(1).rows, statistics.layer(1).rows)
    assert found.digest != statistics.digest


@pytest.mark.parametrize("stopped", ["forward 0", "forward 1", "backward 1", "backward 0"])
def test_a_stopped_run_is_continued(model, text, tmp_path, statistics, monkeypatch, stopped):
    kind, layer = stopped.split()
    name = f"_{kind}_layer"
    original = getattr(calibration._Run, name)

    def failing(self, number, moved):
        if number == int(layer):
            raise OSError("no space left")
        original(self, number, moved)

    with monkeypatch.context() as patch:
        patch.setattr(calibration._Run, name, failing)
        with pytest.raises(OSError, match="no space left"):
            run(model, text, tmp_path / "stats")
    assert not (tmp_path / "stats").exists()
    ran = []

    def counted(self, number, moved):
        ran.append(number)
        original(self, number, moved)

    monkeypatch.setattr(calibration._Run, name, counted)
    found = run(model, text, tmp_path / "stats")
    assert ran == (list(range(int(layer), 2)) if kind == "forward" else [1, 0][1 - int(layer) :])
    assert found.document == statistics.document
    assert not state_file(tmp_path / "stats").exists()


def test_a_run_of_other_input_is_not_continued(model, text, tmp_path, monkeypatch):
    def failing(_self, _number, _moved):
        raise OSError

    with monkeypatch.context() as patch:
        patch.setattr(calibration._Run, "_backward_layer", failing)
        with pytest.raises(OSError):
            run(model, text, tmp_path / "stats")
    with pytest.raises(FormatError, match=r"stats\.partial holds the work of another calibration"):
        run(model, text, tmp_path / "stats", windows=5)
    run(model, text, tmp_path / "stats")


def test_what_is_whole_is_not_made_again(model, text, tmp_path, statistics, monkeypatch):
    out = shutil.copytree(statistics.path, tmp_path / "stats")
    with monkeypatch.context() as patch:
        patch.setattr(calibration._Run, "forward", None)
        assert run(model, text, out) == replace(statistics, path=out)
    other = tmp_path / "other"
    other.write_bytes(text.read_bytes()[1000:])
    with pytest.raises(FormatError, match=r"another calibration: setting text_sha256 was .{50}"):
        run(model, other, out)
    with pytest.raises(FormatError, match=r"windows was 6 and is 5\. Delete that .*--calibration"):
        run(model, text, out, windows=5)
    assert open_statistics(out).digest == statistics.digest
    assert run(model, text, out, windows=5, overwrite=True).digest != statistics.digest


@pytest.mark.parametrize("backward", [False, True])
def test_stopped_at_any_step(model, text, tmp_path, monkeypatch, backward):
    """Killed before or after any change of the state or removal of a file, it goes on."""
    expected = run(model, text, tmp_path / "whole", windows=2, backward=backward)
    originals = {name: getattr(calibration._Run, name) for name in ("_write_state", "_forget")}
    left = [0]  # moments before the kill

    def stopping(name):
        def step(self, *arguments):
            for moment in ("before", "after"):
                if moment == "after":
                    originals[name](self, *arguments)
                left[0] -= 1
                if left[0] == 0:
                    raise KeyboardInterrupt

        return step

    for moment in range(1, 100, 3):
        left[0] = moment
        with monkeypatch.context() as patch:
            for name in originals:
                patch.setattr(calibration._Run, name, stopping(name))
            try:
                run(model, text, tmp_path / "out", windows=2, backward=backward)
            except KeyboardInterrupt:
                stopped = moment
        found = run(model, text, tmp_path / "out", windows=2, backward=backward)
        assert found.document == expected.document
        shutil.rmtree(tmp_path / "out")
        if left[0] > 0:
            break
    assert stopped > 12


def test_a_checkpoint_that_changes(model, text, tmp_path, monkeypatch):
    source = shutil.copytree(model, tmp_path / "model")
    original = calibration._Run._forward_layer

    def forward(self, layer, moved):
        os.utime(min(source.glob("*.safetensors")))
        original(self, layer, moved)

    monkeypatch.setattr(calibration._Run, "_forward_layer", forward)
    with pytest.raises(FormatError, match="changed since it was opened"):
        run(source, text, tmp_path / "stats")
    assert not (tmp_path / "stats").exists()


def test_disk_that_is_too_small(model, text, tmp_path, monkeypatch):
    usage = shutil._ntuple_diskusage(10**9, 10**9, 1000)
    monkeypatch.setattr(calibration.shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(FormatError, match=r"1,000 bytes free, calibrating takes .*--no-backward"):
        run(model, text, tmp_path / "stats")
    assert sorted(path.name for path in tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("vocab_size"), "vocab_size is None"),
        (lambda c: c.update(head_dim=16), "transformers does not take the checkpoint"),
    ],
)
def test_config_that_does_not_fit(model, text, tmp_path, change, message):
    source = shutil.copytree(model, tmp_path / "model")
    edit_json(source / "config.json", change)
    with pytest.raises(FormatError, match=message):
        run(source, text, tmp_path / "stats")


def test_config_with_a_list_of_layers(model, text, tmp_path, statistics):
    source = shutil.copytree(model, tmp_path / "model")
    edit_json(source / "config.json", lambda c: c.update(layer_types=["full_attention"] * LAYERS))
    found = run(source, text, tmp_path / "stats")
    assert found.document["files"] == statistics.document["files"]


def test_infinite_rows_are_counted(model, text, tmp_path, monkeypatch, caplog):  # QN-5b
    original = calibration._Run._embed

    def spoiled(self):
        original(self)
        rows = self._residual("hidden-000.bin")
        rows[2, -1, 5] = torch.inf  # attention gives it a weight of 0, and 0 times it is no number
        self._record("hidden-000.bin")

    monkeypatch.setattr(calibration._Run, "_embed", spoiled)
    found = run(model, text, tmp_path / "stats")
    window = found.document["settings"]["window"]
    for number in range(LAYERS):
        assert found.document["layers"][str(number)]["dropped"] == window
        layer = found.layer(number)
        assert all(value.isfinite().all() for value in (layer.rows, layer.gradients, layer.moments))
    assert f"{window} rows are not finite and left out" in caplog.text
    convert(model, tmp_path / "out", found)


def test_calibrated_package_is_better(model, text, repository, example, tmp_path):
    found = run(model, text, tmp_path / "stats", windows=None)
    evidence = convert(model, tmp_path / "out", found)
    validate(tmp_path / "out", deep=True, show_progress=False)
    held_out = repository / "examples/tiny_moe/eval.txt"
    plain, better = (
        evaluate(out, model, held_out, windows=24, show_progress=False)
        for out in (example[1], tmp_path / "out")
    )
    assert better["kl_mean"] < 0.8 * plain["kl_mean"]
    assert better["top1_agreement"] > plain["top1_agreement"]
    assert better["bits_per_expert_weight"] == plain["bits_per_expert_weight"]
    for layer, document in evidence.items():
        tokens = found.document["layers"][str(layer)]["tokens"]
        assert [entry["tokens"] for entry in document["experts"]] == tokens
        assert {entry["fallback"] for entry in document["experts"]} == {None}
        # On the few rows of validation documents: 31 windows of which 1 in 16 is one.
        judged = [entry["functional_nmse"] for entry in document["experts"]]
        assert all(0.001 < error < 0.2 for error in judged)


def test_the_digest_is_part_of_the_fingerprint(model, statistics, tmp_path):
    convert(model, tmp_path / "out", statistics)
    manifest = json.loads((tmp_path / "out/qsrt-manifest.json").read_text())
    stated = manifest["producer"]["encoder"]["settings"]["calibration_sha256"]
    assert stated == statistics.digest == paths.sha256_file(statistics.path / DOCUMENT)


def test_bytes_do_not_depend_on_threads(model, statistics, tmp_path):
    threads = torch.get_num_threads()
    made = []
    for count in (1, 2):
        torch.set_num_threads(count)
        convert(model, tmp_path / str(count), statistics)
        made.append(layer_files(tmp_path / str(count)))
    torch.set_num_threads(threads)
    assert made[0] == made[1]


def without(statistics, path, experts):
    """Statistics in which some experts of layer 1 get no row."""
    out = shutil.copytree(statistics.path, path)
    name = "layer-001.safetensors"
    tensors = load_file(out / name)
    ids = tensors["ids"]
    ids[torch.isin(ids, torch.tensor(experts))] = -1
    tensors["tokens"][experts] = 0
    if len(experts) == EXPERTS:
        tensors["moments"].zero_()
        tensors["weights"].zero_()
    save_file(tensors, out / name)
    document = json.loads((out / DOCUMENT).read_text())
    document["files"][name] = paths.sha256_file(out / name)
    (out / DOCUMENT).write_text(json.dumps(document))
    return open_statistics(out)


def test_experts_without_rows(model, statistics, tmp_path):  # QN-1a
    found = without(statistics, tmp_path / "stats", [0, 3])
    evidence = convert(model, tmp_path / "out", found)
    entries = evidence[1]["experts"]
    assert [entry["tokens"] == 0 for entry in entries] == [True, False, False, True]
    assert [entry["fallback"] for entry in entries] == [NO_ROWS, None, None, NO_ROWS]
    assert entries[0]["functional_nmse"] is entries[3]["functional_nmse"] is None
    validate(tmp_path / "out", deep=True, show_progress=False)


def test_a_layer_without_rows(model, statistics, tmp_path):  # QN-1b
    found = without(statistics, tmp_path / "stats", list(range(EXPERTS)))
    evidence = convert(model, tmp_path / "out", found)
    assert {entry["fallback"] for entry in evidence[1]["experts"]} == {NO_LAYER_ROWS}
    assert {entry["fallback"] for entry in evidence[0]["experts"]} == {None}
    validate(tmp_path / "out", deep=True, show_progress=False)


@pytest.mark.parametrize("kind", ["three", "zero columns", "equal"])
def test_degenerate_rows(model, statistics, tmp_path, kind):  # QN-6a, QN-6b
    name = "layer-000.safetensors"
    out = shutil.copytree(statistics.path, tmp_path / "stats")
    tensors = load_file(out / name)
    rows = tensors["rows"]
    if kind == "three":
        tensors["ids"][3:] = -1
    elif kind == "zero columns":
        rows[:, 20:30] = 0
        rows[:, 7] = rows[:, 6]
    else:
        rows[:] = rows[:1].clone()
    x = rows[(tensors["ids"] >= 0).any(1)].float()
    tensors["moments"][:] = x.T @ x
    save_file(tensors, out / name)
    document = json.loads((out / DOCUMENT).read_text())
    document["files"][name] = paths.sha256_file(out / name)
    (out / DOCUMENT).write_text(json.dumps(document))
    found = open_statistics(out)
    for place in ("a", "b"):
        convert(model, tmp_path / place, found)
    assert layer_files(tmp_path / "a") == layer_files(tmp_path / "b")
    validate(tmp_path / "a", deep=True, show_progress=False)


@pytest.mark.parametrize("matrix", ["gate_proj", "up_proj", "down_proj"])
def test_a_matrix_of_zeros(model, text, tmp_path, matrix):
    source = shutil.copytree(model, tmp_path / "model")
    name = expert_key(0, 1, matrix)
    shard = next(path for path in source.glob("*.safetensors") if name in load_file(path))
    tensors = load_file(shard)
    tensors[name].zero_()
    save_file(tensors, shard, metadata={"format": "pt"})
    found = run(source, text, tmp_path / "stats")
    evidence = convert(source, tmp_path / "out", found)
    zero = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[matrix]
    assert evidence[0]["experts"][1]["zero_matrices"] == [zero]
    validate(tmp_path / "out", deep=True, show_progress=False)


def test_statistics_of_other_shapes(damaged, model, tmp_path):
    name = "layer-000.safetensors"
    tensors = load_file(damaged / name)
    tensors["gates"] = tensors["gates"][:10].clone()
    save_file(tensors, damaged / name)
    edit_json(
        damaged / DOCUMENT,
        lambda d: d["files"].update({name: paths.sha256_file(damaged / name)}),
    )
    with pytest.raises(FormatError, match=r"gates has shape \[10, 2\], expected"):
        convert(model, tmp_path / "out", open_statistics(damaged))


def test_all_rate_modes_are_packed(model, text, tmp_path, monkeypatch, caplog):
    found = run(model, text, tmp_path / "stats", windows=40)
    asked, original = [], produce.make_guide

    def noted(*arguments, held_out):
        asked.append(held_out)
        return original(*arguments, held_out=held_out)

    monkeypatch.setattr(produce, "make_guide", noted)
    evidence = convert(model, tmp_path / "out", found, modes="all")
    assert asked == LAYERS * EXPERTS * [
        True,
        False,
    ]  # chosen by what is held out, then coded by all
    assert not caplog.records
    chosen = {(e["mode13"], e["mode2"]) for d in evidence.values() for e in d["experts"]}
    assert chosen <= {(a, b) for a in ("R0", "R1") for b in ("R0", "R1")}
    validate(tmp_path / "out", deep=True, show_progress=False)


def test_too_few_documents_to_choose_modes(model, statistics, tmp_path, caplog):
    assert statistics.missing_parts() == ["validation"]
    given = settings(statistics, modes="all")
    job.prepare(model, tmp_path / "out", given, statistics=statistics)
    assert "no documents for validation" in caplog.text


def test_the_plan_knows_of_the_statistics(model, statistics, tmp_path):
    plain = job.prepare(model, tmp_path / "out", Settings(search="fast")).plan
    given = settings(statistics)
    found = job.prepare(model, tmp_path / "out", given, statistics=statistics).plan
    assert (plain["calibration"], found["calibration"]) == (None, str(statistics.path))
    size = sum(path.stat().st_size for path in statistics.path.glob("*.safetensors"))
    assert (plain["calibration_bytes"], found["calibration_bytes"]) == (None, size)
    assert f"calibrated  by {statistics.path}, {size:,} bytes\n" in plan.describe(found)
    assert "calibrated  no\n" in plan.describe(plain)
    assert found["seconds"] > 2 * plain["seconds"]
    files = [path.stat().st_size for path in statistics.path.glob("*-000.safetensors")]
    rows = max(statistics.layer(0).tokens.max(), statistics.layer(1).tokens.max())
    assert found["memory_bytes"] - plain["memory_bytes"] > sum(files) + 8 * rows * HIDDEN


@pytest.mark.parametrize("name", ["deepseek_v3", "lfm2_moe", "bailing_hybrid"])
def test_other_architectures(name, text, tmp_path):
    """Statistics of a model with a dense layer and one of next-token prediction; then packed."""
    write_model(tmp_path / "model", name)
    write_tokenizer(tmp_path / "model")
    path = tmp_path / "model/model.safetensors"
    tensors = load_file(path)
    more = {k.replace(".layers.1.", ".layers.2."): t for k, t in tensors.items() if ".1." in k}
    save_file(tensors | {k: t.clone() for k, t in more.items()}, path, {"format": "pt"})
    edit_json(tmp_path / "model/config.json", lambda c: c.update(num_nextn_predict_layers=1))
    found = run(tmp_path / "model", text, tmp_path / "stats", window=16, windows=40)
    assert [*found.document["layers"]] == ["1"]
    rows = found.layer(1)
    assert rows.rows.shape == rows.gradients.shape == (640, HIDDEN)
    assert rows.gradients.any()
    evidence = convert(tmp_path / "model", tmp_path / "package", found)
    assert [*evidence] == [1, 2]
    tokens = [[entry["tokens"] for entry in evidence[layer]["experts"]] for layer in (1, 2)]
    assert tokens == [rows.tokens.tolist(), [None, None]]
    validate(tmp_path / "package", deep=True, show_progress=False)


def test_a_folder_of_other_things_is_kept(model, text, tmp_path):
    (tmp_path / "stats").mkdir()
    (tmp_path / "stats/thesis").write_text("")
    with pytest.raises(FormatError, match=r"stats is not empty and holds no calibration\.json"):
        run(model, text, tmp_path / "stats")
    assert run(model, text, tmp_path / "stats", windows=1, overwrite=True)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "is not a file; give a UTF-8 text"),
        (b"", "has 0 tokens, a window takes"),
        (b" \n\n ", "tokens, a window takes"),
        (b"A few words.", "give a longer text, or to calibrate or eval a shorter --window"),
        (b"\xff\xfe", "is not UTF-8 text"),
    ],
)
def test_text_that_does_not_serve(model, tmp_path, data, message):
    """Said before the work and by a dry run alike."""
    path = tmp_path / "text"
    if data is not None:
        path.write_bytes(data)
    before = list(tmp_path.iterdir())
    for options in ([], ["--dry-run"]):
        arguments = ["convert", str(model), str(tmp_path / "out"), "--calibration", str(path)]
        done = CliRunner().invoke(main, [*arguments, *options])
        assert (done.exit_code, done.stdout) == (1, "")
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
        assert list(tmp_path.iterdir()) == before


def test_dry_run_with_a_text(model, text, tmp_path, caplog):
    words, other, out = tmp_path / "words.txt", tmp_path / "other.txt", tmp_path / "out"
    words.write_bytes(text.read_bytes()[:20_000])
    other.write_bytes(text.read_bytes()[20_000:40_000])
    before = set(tmp_path.iterdir())
    arguments = ["convert", str(model), str(out), "--json", "--calibration"]
    planned = CliRunner().invoke(main, [*arguments, str(words), "--dry-run"])
    assert planned.exit_code == 0
    assert "not planned: the calibration with" in caplog.text
    assert set(tmp_path.iterdir()) == before
    run(model, words, out.with_name("out.calibration"), windows=None)
    caplog.clear()
    planned = CliRunner().invoke(main, [*arguments, str(words), "--dry-run"])
    assert json.loads(planned.stdout)["calibration"] == str(out.with_name("out.calibration"))
    assert caplog.text == ""
    for options in ([], ["--dry-run"]):
        refused = CliRunner().invoke(main, [*arguments, str(other), *options])
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert "out.calibration holds the statistics of another calibration" in refused.stderr
        assert "setting text_sha256 was " in refused.stderr
        assert "--overwrite" not in refused.stderr
    assert set(tmp_path.iterdir()) == before | {out.with_name("out.calibration")}
    planned = CliRunner().invoke(main, [*arguments, str(other), "--dry-run", "--overwrite"])
    assert json.loads(planned.stdout)["calibration"] is None
    assert "not planned: the calibration with" in caplog.text


def test_dry_run_where_another_calibration_was_stopped(model, text, tmp_path, monkeypatch):
    def failing(_self, _number, _moved):
        raise OSError

    with monkeypatch.context() as patch:
        patch.setattr(calibration._Run, "_backward_layer", failing)
        with pytest.raises(OSError):
            run(model, text, tmp_path / "stats", windows=5)
    device, message = torch.device("cpu"), r"stats\.partial holds the work of another .*windows was"
    assert calibration.planned(model, text, tmp_path / "new", device=device) is None
    with pytest.raises(FormatError, match=message):
        calibration.planned(model, text, tmp_path / "stats", device=device)


def test_another_calibration_does_not_continue_a_conversion(
    model, statistics, text, tmp_path, monkeypatch
):  # CV-7b
    original = job._write_layer

    def failing(prepared, folder, layer, *others):
        if layer == 1:
            raise OSError("no space left")
        return original(prepared, folder, layer, *others)

    with monkeypatch.context() as patch:
        patch.setattr(job, "_write_layer", failing)
        with pytest.raises(OSError, match="no space left"):
            convert(model, tmp_path / "out", statistics)
    other = run(model, text, tmp_path / "other", windows=5)
    with pytest.raises(FormatError, match="setting calibration_sha256 was"):
        convert(model, tmp_path / "out", other)
    convert(model, tmp_path / "out", statistics)
    convert(model, tmp_path / "whole", statistics)
    assert layer_files(tmp_path / "out") == layer_files(tmp_path / "whole")


def test_statistics_of_another_checkpoint(clean_checkpoint, statistics, tmp_path):
    given = settings(statistics)
    with pytest.raises(FormatError, match=r"stats was made from another checkpoint: source file"):
        job.prepare(clean_checkpoint, tmp_path / "out", given, statistics=statistics)
    assert list(tmp_path.iterdir()) == []


def test_statistics_of_another_config(model, statistics, tmp_path):
    source = shutil.copytree(model, tmp_path / "model")
    edit_json(source / "config.json", lambda c: c.update(rope_theta=12345.0))
    with pytest.raises(FormatError, match=r"another checkpoint: source file config\.json was"):
        job.prepare(source, tmp_path / "out", settings(statistics), statistics=statistics)


def test_statistics_of_other_weights(model, statistics, tmp_path):
    """What prepare does not read, run does."""
    source = shutil.copytree(model, tmp_path / "model")
    shard = min(source.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    given = settings(statistics)
    prepared = job.prepare(source, tmp_path / "out", given, statistics=statistics)
    with pytest.raises(FormatError, match=f"another checkpoint: source file {shard.name} was"):
        job.run(prepared, show_progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["layer-001.safetensors", "gradients-000.safetensors"])
def test_damaged_statistics(model, damaged, tmp_path, monkeypatch, name):
    data = bytearray((damaged / name).read_bytes())
    data[-1] ^= 1
    (damaged / name).write_bytes(data)
    monkeypatch.setattr(job, "_write_layers", None)  # it is seen before anything is encoded
    with pytest.raises(FormatError, match=f"{name} is damaged"):
        convert(model, tmp_path / "out", open_statistics(damaged))
    assert not (tmp_path / "out").exists()


def test_statistics_damaged_while_converting(model, damaged, tmp_path, monkeypatch):
    original = job._write_layer

    def spoiling(*arguments):
        os.truncate(damaged / "layer-001.safetensors", 1000)
        return original(*arguments)

    monkeypatch.setattr(job, "_write_layer", spoiling)
    with pytest.raises(FormatError, match=r"layer-001\.safetensors is damaged"):
        convert(model, tmp_path / "out", open_statistics(damaged))


def test_missing_statistics(damaged):
    (damaged / "gradients-000.safetensors").unlink()
    expected = r"gradients-000\.safetensors is missing, calibration\.json lists it; "
    with pytest.raises(FormatError, match=expected + ".*calibrate again"):
        open_statistics(damaged)


def test_a_link_among_the_statistics(damaged, tmp_path):
    name = "gradients-000.safetensors"
    (damaged / name).rename(tmp_path / name)
    (damaged / name).symlink_to(tmp_path / name)
    with pytest.raises(FormatError, match=f"{name} is a link to"):
        open_statistics(damaged)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_are_as_readable_as_the_umask_says(model, text, tmp_path, umask):
    before = os.umask(umask)
    try:
        found = run(model, text, tmp_path / "stats", windows=1)
    finally:
        os.umask(before)
    assert len(found.document["files"]) == 2 * LAYERS
    modes = {path.stat().st_mode & 0o777 for path in found.path.iterdir()}
    assert modes == {0o666 & ~umask}


def test_folder_that_holds_no_statistics(tmp_path):
    with pytest.raises(FormatError, match=r"calibration\.json"):
        open_statistics(tmp_path)


def test_from_the_command_line(model, text, tmp_path):
    source = shutil.copytree(model, tmp_path / "model")
    words = tmp_path / "words.txt"
    words.write_bytes(text.read_bytes()[:40_000])
    runner = CliRunner()
    asked = ["-q", "calibrate", str(source), "--text", str(words), "-o", str(tmp_path / "stats")]
    done = runner.invoke(main, asked)
    assert (done.exit_code, done.output) == (0, "")
    common = ["-q", "convert", str(source), "--search", "fast", "--calibration"]
    for given, out in ((tmp_path / "stats", "a"), (words, "b")):
        done = runner.invoke(main, [*common, str(given), str(tmp_path / out)])
        assert (done.exit_code, done.output) == (0, "")
    assert layer_files(tmp_path / "a") == layer_files(tmp_path / "b")
    names = [path.name for path in tmp_path.iterdir()]
    assert sorted(names) == ["a", "b", "b.calibration", "model", "stats", "words.txt"]
    done = runner.invoke(main, [*common, str(words), str(tmp_path / "b")])  # it is there already
    assert (done.exit_code, done.output) == (0, "")
    done = runner.invoke(main, [*common, str(words), str(tmp_path / "stats")])
    assert done.exit_code == 1
    assert "is not empty" in done.output
    assert not (tmp_path / "stats.calibration").exists()
    listed = tmp_path / "stats" / DOCUMENT
    done = runner.invoke(main, [*common, str(listed), str(tmp_path / "a")])
    assert (done.exit_code, done.output) == (0, "")
