"""Sources of which not all shards are there at once: on the Hub, or removed on the way."""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import checkpoints
import pytest
import quantized
import torch
from click.testing import CliRunner, Result
from fakehub import FakeHub, Request, command, environment

from qsrt_pack import job, plan, supply
from qsrt_pack.cli import main
from qsrt_pack.encode.expert import Settings
from qsrt_pack.repository import open_repository
from qsrt_runtime.format.errors import FormatError

MODEL, LAYERS, EXPERTS, SHARDS = "org/model", 3, 2, 6
FAST = Settings(search="fast")
BODY = re.compile(rf"/{MODEL}/resolve/[^/]+/(model-0000\d-of-.*\.safetensors)$")


def shard(number: int) -> str:
    return f"model-{number:05d}-of-{SHARDS:05d}.safetensors"


def place(name: str) -> int:
    """A tensor's shard: the layers' as they come, two straddling; embeddings in 1, head in 6.

    Layer 0 in 1 and 2, layer 1 in 2, 3 and 4, layer 2 in 4 and 5.
    """
    match = re.match(r"model\.layers\.(\d)\.(mlp\.experts\.(\d))?", name)
    if match is None:
        return 1 if "embed" in name else SHARDS
    layer, expert = int(match[1]), match[3]
    if expert is None:
        return (1, 2, 4)[layer]
    return {0: (1, 2), 1: (3, 4) if "down" in name else (2, 4), 2: (4, 5)}[layer][int(expert)]


@pytest.fixture(autouse=True)
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "probe", lambda _method, _device: 1e6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    weights = checkpoints.tensors(layers=LAYERS, experts=EXPERTS)
    value = checkpoints.config(num_hidden_layers=LAYERS, num_experts=EXPERTS, num_experts_per_tok=1)
    folder = tmp_path_factory.mktemp("source") / "model"
    return checkpoints.write_checkpoint(
        folder,
        config_value=value,
        weights=weights,
        shards=SHARDS,
        shard_of={name: place(name) for name in weights},
    )


@pytest.fixture(scope="module")
def package(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the folder converts to."""
    out = tmp_path_factory.mktemp("package") / "out"
    job.run(job.prepare(model, out, FAST), show_progress=False)
    return tree(out)


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(model, tmp_path / "model")


def tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def shards_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("model-*.safetensors"))


def convert(*words: object) -> Result:
    return CliRunner().invoke(main, ["-q", "convert", *map(str, words), "--search", "fast"])


def bodies(hub: FakeHub, start: int = 0) -> list[str]:
    """The shards that were asked for beyond their header, in order."""
    found = []
    for request in hub.requests[start:]:
        match = BODY.search(request.path)
        whole = request.range is None or request.range.endswith("-")
        if match and request.method == "GET" and whole:
            found.append(match[1])
    return found


def finished(out: Path) -> int:
    return len(list((out.parent / f"{out.name}.partial/package").glob("qsrt-layer-*.json")))


def watch(hub: FakeHub, see: Callable[[str], object]) -> None:
    """Call see with each shard's name when its body is asked for."""

    def fault(request: Request) -> None:
        for name in bodies(hub, request.number - 1):
            see(name)

    hub.fault = fault


@pytest.mark.parametrize("drop", [False, True])
def test_shards_arrive_as_layers_need_them(
    hub: FakeHub, model: Path, package: dict, tmp_path: Path, drop: bool
) -> None:
    hub.create(MODEL, **tree(model))
    out, seen = tmp_path / "out", []
    downloads = tmp_path / "out.partial/source/shards"
    watch(hub, lambda name: seen.append((name, finished(out), len(shards_of(downloads)))))
    done = convert(MODEL, out, *(["--drop-source"] if drop else []))
    assert done.exit_code == 0, done.output
    assert tree(out) == package
    layers_before = [0, 0, 1, 1, 2, 3]  # of shards 1 to 6
    assert [(name, layers) for name, layers, _ in seen] == [
        (shard(number), layers) for number, layers in enumerate(layers_before, 1)
    ]
    there = [count for *_, count in seen]
    assert there == ([0, 1, 1, 2, 1, 0] if drop else [0] * SHARDS)
    assert shards_of(tmp_path / "cache") == ([] if drop else [shard(n) for n in range(1, 7)])
    assert not downloads.exists()


def write_quantized(folder: Path, kind: quantized.Kind, weights: dict | None = None) -> Path:
    """A checkpoint of one layer of two experts in five shards, each weight's parts in several."""
    sizes = {"num_hidden_layers": 1, "num_experts": 2, "num_experts_per_tok": 1}
    value = checkpoints.config(quantization_config=kind.config, **sizes)
    weights = weights or quantized.quantize(kind, checkpoints.tensors(layers=1, experts=2))
    return checkpoints.write_checkpoint(folder, config_value=value, weights=weights, shards=5)


@pytest.mark.parametrize(("kind", "keep"), [("fp8_block", False), ("nvfp4_packed", True)])
def test_parts_of_a_weight_in_several_shards(
    hub: FakeHub, tmp_path: Path, kind: str, keep: bool
) -> None:
    """Of experts and of carried weights, which are decoded, or with keep stored as they are."""
    source = write_quantized(tmp_path / "model", quantized.KINDS[kind])
    hub.create(MODEL, **tree(source))
    expected, out = tmp_path / "expected", tmp_path / "out"
    job.run(job.prepare(source, expected, FAST, keep_dense_format=keep), show_progress=False)
    options = ["--drop-source", *(["--keep-dense-format"] if keep else [])]
    done = convert(MODEL, out, *options)
    assert done.exit_code == 0, done.output
    assert tree(out) == tree(expected)


def test_continued_with_another_way_to_carry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a run before has removed is kept for either, scales of activations included."""
    kind, attention = quantized.KINDS["fp8_block"], "model.layers.0.self_attn.q_proj"
    weights = quantized.quantize(kind, checkpoints.tensors(layers=1, experts=2))
    weights[f"{attention}.input_scale"] = torch.ones(1)
    source, out = write_quantized(tmp_path / "model", kind, weights), tmp_path / "out"
    job.run(job.prepare(source, tmp_path / "kept", FAST, keep_dense_format=True))

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(job, "write_base", fail)
        with pytest.raises(KeyboardInterrupt):
            job.run(job.prepare(source, out, FAST, drop_source=True))
    assert shards_of(source) == []
    job.run(job.prepare(source, out, FAST, keep_dense_format=True))
    assert tree(out) == tree(tmp_path / "kept")


@pytest.mark.parametrize("position", ["layer", "carried"])
def test_weights_that_are_not_finite(hub: FakeHub, tmp_path: Path, position: str) -> None:
    kind = quantized.KINDS["fp8_block"]
    weights = quantized.quantize(kind, checkpoints.tensors(layers=1, experts=2))
    carried = "model.layers.0.self_attn.q_proj.weight"
    name = carried if position == "carried" else checkpoints.expert_key(0, 1, "up_proj")
    weights[f"{name}_scale_inv"][0, 0] = torch.nan
    hub.create(MODEL, **tree(write_quantized(tmp_path / "model", kind, weights)))
    done = convert(MODEL, tmp_path / "out", "--drop-source")
    message = f"tensor {name}_scale_inv holds nan at [0, 0]"
    assert done.exit_code == 1 and message in done.output
    assert not (tmp_path / "out").exists()


def test_shards_that_the_hub_states_no_digest_of(
    hub: FakeHub, model: Path, package: dict, tmp_path: Path
) -> None:
    hub.threshold = None
    hub.create(MODEL, **tree(model))
    done = convert(MODEL, tmp_path / "out", "--drop-source")
    assert done.exit_code == 0, done.output
    assert tree(tmp_path / "out") == package


def test_a_plan_needs_headers_alone(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    hub.create(MODEL, **tree(model))
    done = convert(MODEL, tmp_path / "out", "--dry-run", "--json", "--drop-source")
    assert done.exit_code == 0, done.output
    assert bodies(hub) == [] and shards_of(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    found = json.loads(done.stdout)
    expected = job.prepare(model, tmp_path / "out", FAST).plan
    free = {"free_disk_bytes", "source"}
    assert {k: v for k, v in found.items() if k not in free} == {
        k: v for k, v in expected.items() if k not in free
    }


@pytest.mark.parametrize("drop", [False, True])
def test_a_shard_with_another_digest_is_refused(
    hub: FakeHub, model: Path, package: dict, tmp_path: Path, drop: bool
) -> None:
    hub.create(MODEL, **tree(model))
    data = bytearray((model / shard(2)).read_bytes())
    data[-1] ^= 1
    hub.altered[shard(2)] = bytes(data)
    words = [MODEL, tmp_path / "out", *(["--drop-source"] if drop else [])]
    done = convert(*words)
    assert done.exit_code == 1
    assert re.search(rf"Error: .*has the SHA-256 \w+, which is not what .*{shard(2)}", done.output)
    assert not (tmp_path / "out").exists()
    assert len(shards_of(tmp_path)) == (1 if drop else 2), "the first shard is kept"
    hub.altered.clear()
    if not drop:
        path = re.search(r"Error: (.*) has the SHA-256", done.output)[1]
        Path(path).unlink()
    start = len(hub.requests)
    assert convert(*words).exit_code == 0
    assert tree(tmp_path / "out") == package
    assert bodies(hub, start) == [shard(number) for number in range(2, 7)]


def test_killed_in_the_middle_and_continued(
    hub: FakeHub, model: Path, package: dict, tmp_path: Path
) -> None:
    hub.create(MODEL, **tree(model))
    out, asked, killed = tmp_path / "out", Event(), Event()

    def stall(name: str) -> None:
        if name == shard(4):
            asked.set()
            killed.wait(60)

    watch(hub, stall)
    options = ["--search", "fast", "--drop-source"]
    process = command("convert", MODEL, out, *options, env=environment(hub, tmp_path / "home"))
    assert asked.wait(60), process.communicate()
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    hub.fault = lambda request: None
    killed.set()
    layer = tmp_path / "out.partial/package/qsrt-layer-000.safetensors"
    inode, start = layer.stat().st_ino, len(hub.requests)
    assert shards_of(tmp_path / "out.partial/source/shards") == [shard(2), shard(3)]
    done = convert(MODEL, out, "--drop-source")
    assert done.exit_code == 0, done.output
    assert bodies(hub, start) == [shard(4), shard(5), shard(6)]
    assert (out / layer.name).stat().st_ino == inode, "its layer is not encoded again"
    assert tree(out) == package
    assert not (tmp_path / "out.partial").exists() and shards_of(tmp_path / "home") == []


def stop(source: Path, out: Path, before: int) -> None:
    """Convert, dropping the source, and fail before a layer."""
    real = job._write_layer

    def failing(found: job.Job, folder: Path, layer: int, *rest: object) -> object:
        if layer == before:
            raise KeyboardInterrupt
        return real(found, folder, layer, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "_write_layer", failing)
        with pytest.raises(KeyboardInterrupt):
            job.run(job.prepare(source, out, FAST, drop_source=True), show_progress=False)


@pytest.mark.parametrize("again", [False, True])
def test_a_folder_is_removed_shard_by_shard(
    folder: Path, package: dict, tmp_path: Path, again: bool
) -> None:
    """again: whether the command that continues also removes."""
    out, kept = tmp_path / "out", tree(folder)
    stop(folder, out, before=1)
    assert shards_of(folder) == [shard(number) for number in (2, 3, 4, 5)]
    prepared = job.prepare(folder, out, FAST, drop_source=again)
    assert prepared.plan["finished_layers"] == [0]
    job.run(prepared, show_progress=False)
    assert tree(out) == package
    left = [] if again else [shard(number) for number in (2, 3, 4, 5)]
    assert shards_of(folder) == left
    others = {name: data for name, data in kept.items() if not name.endswith(".safetensors")}
    assert others.items() <= tree(folder).items()
    assert not (tmp_path / "out.partial").exists()


def test_stopped_between_the_copy_and_the_removal(
    folder: Path, package: dict, tmp_path: Path
) -> None:
    out, real = tmp_path / "out", Path.unlink

    def unlink(path: Path, *options: object, **more: object) -> None:
        if path.parent == folder:
            raise KeyboardInterrupt
        real(path, *options, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        with pytest.raises(KeyboardInterrupt):
            job.run(job.prepare(folder, out, FAST, drop_source=True), show_progress=False)
    state = json.loads((tmp_path / "out.partial/state.json").read_text())
    assert list(state["slices"]) == [shard(1)] and len(shards_of(folder)) == SHARDS
    job.run(job.prepare(folder, out, FAST, drop_source=True), show_progress=False)
    assert tree(out) == package and shards_of(folder) == []


def test_a_removed_shard_that_a_damaged_layer_needs(
    folder: Path, model: Path, package: dict, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    stop(folder, out, before=1)
    layer = tmp_path / "out.partial/package/qsrt-layer-000.safetensors"
    layer.write_bytes(layer.read_bytes()[:-1] + b"\1")
    with pytest.raises(FormatError, match=f"{shard(1)} was removed .* put the shard back"):
        job.run(job.prepare(folder, out, FAST), show_progress=False)
    shutil.copy(model / shard(1), folder)
    job.run(job.prepare(folder, out, FAST), show_progress=False)
    assert tree(out) == package


def test_layers_that_cannot_be_made_again_are_left_alone(folder: Path, tmp_path: Path) -> None:
    stop(folder, tmp_path / "out", before=1)
    made = tmp_path / "out.partial/package"
    layer = (made / "qsrt-layer-000.safetensors").read_bytes()
    evidence = (made / "qsrt-layer-000.json").read_bytes()
    (made / "qsrt-layer-000.json").unlink()
    with pytest.raises(FormatError, match=f"{shard(1)} was removed .* put the shard back"):
        job.run(job.prepare(folder, tmp_path / "out", FAST), show_progress=False)
    assert (made / "qsrt-layer-000.safetensors").read_bytes() == layer
    (made / "qsrt-layer-000.json").write_bytes(evidence)
    job.run(job.prepare(folder, tmp_path / "out", FAST), show_progress=False)


@pytest.mark.parametrize("what", ["settings", "state"])
def test_nobody_is_told_to_delete_the_last_of_removed_shards(
    folder: Path, tmp_path: Path, what: str
) -> None:
    stop(folder, tmp_path / "out", before=1)
    settings = replace(FAST, seed=1) if what == "settings" else FAST
    if what == "state":
        (tmp_path / "out.partial/state.json").write_text("{")
    with pytest.raises(FormatError, match=r"put back the shards .* and only then delete"):
        job.prepare(folder, tmp_path / "out", settings)


def test_a_shard_that_changes_while_it_is_copied_is_kept(folder: Path, tmp_path: Path) -> None:
    real = supply.write_slice

    def altering(path: Path, source: Path, *rest: object) -> str:
        found = real(path, source, *rest)
        data = bytearray(source.read_bytes())
        data[-1] ^= 1
        source.write_bytes(data)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supply, "write_slice", altering)
        with pytest.raises(FormatError, match="changed since it was opened"):
            job.run(job.prepare(folder, tmp_path / "out", FAST, drop_source=True))
    assert len(shards_of(folder)) == SHARDS


def test_a_shard_that_another_process_removed_ends_the_run(folder: Path, tmp_path: Path) -> None:
    real = job._write_layer

    def removing(*arguments: object) -> object:
        found = real(*arguments)
        (folder / shard(SHARDS)).unlink()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "_write_layer", removing)
        with pytest.raises(FormatError, match="changed since it was opened"):
            job.run(job.prepare(folder, tmp_path / "out", FAST, drop_source=True))
    assert len(shards_of(folder)) == SHARDS - 1


def test_one_conversion_at_a_time_removes_shards(folder: Path, tmp_path: Path) -> None:
    prepared = job.prepare(folder, tmp_path / "out", FAST, drop_source=True)
    other = job.prepare(folder, tmp_path / "other", FAST, drop_source=True)
    with (
        other.supply.held(),
        pytest.raises(FormatError, match="another conversion removes shards"),
    ):
        job.run(prepared, show_progress=False)
    assert len(shards_of(folder)) == SHARDS and not (tmp_path / "out.partial").exists()


def test_the_disk_must_hold_what_removing_takes(
    hub: FakeHub, model: Path, folder: Path, tmp_path: Path
) -> None:
    hub.create(MODEL, **tree(model))
    out = tmp_path / "out"
    bytes_to_write = job.prepare(folder, out, FAST).plan["bytes_to_write"]
    for source, most in ((folder, 0), (open_repository(MODEL, show_progress=False), 2)):
        with pytest.MonkeyPatch.context() as patch:
            usage = SimpleNamespace(free=bytes_to_write)
            patch.setattr(plan.shutil, "disk_usage", lambda _path, usage=usage: usage)
            job.prepare(source, out, FAST)
            with pytest.raises(FormatError, match=r"[\d,]+ of them of the source for a while") as e:
                job.prepare(source, out, FAST, drop_source=True)
            words = str(e.value).replace(",", "").split()
            meanwhile = int(words[words.index("of") - 1])
            usage.free += meanwhile
            job.prepare(source, out, FAST, drop_source=True)
            usage.free -= 1
            with pytest.raises(FormatError, match="for a while"):
                job.prepare(source, out, FAST, drop_source=True)
        assert meanwhile > most * min((model / shard(n)).stat().st_size for n in range(1, 7))


def test_a_file_beside_the_single_shard_is_not_read(hub: FakeHub, tmp_path: Path) -> None:
    model = checkpoints.write_checkpoint(tmp_path / "model", shards=1)
    files = tree(model)
    del files["model.safetensors.index.json"]
    files["model.safetensors"] = files.pop("model-00001-of-00001.safetensors")
    hub.create(MODEL, **files, **{"consolidated.safetensors": b"no header"})
    done = convert(MODEL, tmp_path / "out", "--dry-run")
    assert done.exit_code == 0, done.output


def test_the_same_command_after_all_is_done(folder: Path, tmp_path: Path) -> None:
    words = [folder, tmp_path / "out", "--drop-source"]
    assert convert(*words).exit_code == 0
    done = convert(*words)
    assert done.exit_code == 1
    assert "out is a package already; check it with qsrt-pack validate" in done.output


def test_what_is_kept_of_a_removed_shard_is_checked(folder: Path, tmp_path: Path) -> None:
    stop(folder, tmp_path / "out", before=1)
    kept = tmp_path / "out.partial/source/slices" / shard(1)
    kept.write_bytes(kept.read_bytes()[:-1] + b"\1")
    with pytest.raises(FormatError, match=f"{shard(1)} is missing"):
        job.prepare(folder, tmp_path / "out", FAST)


def test_without_the_option_nothing_is_removed(folder: Path, package: dict, tmp_path: Path) -> None:
    before = tree(folder)
    job.run(job.prepare(folder, tmp_path / "out", FAST), show_progress=False)
    assert tree(folder) == before


def test_links_are_not_removed(folder: Path, model: Path, tmp_path: Path) -> None:
    """Neither in a snapshot of the Hub's cache, where a link passes as a file."""
    snapshot = tmp_path / "cache/snapshots/1"
    shutil.copytree(folder, snapshot)
    (tmp_path / "cache/blobs").mkdir()
    (snapshot / shard(3)).rename(tmp_path / "cache/blobs/3")
    (snapshot / shard(3)).symlink_to("../../blobs/3")
    with pytest.raises(FormatError, match=f"{shard(3)} is a link, of which --drop-source"):
        job.prepare(snapshot, tmp_path / "out", FAST, drop_source=True)
    assert len(shards_of(snapshot)) == SHARDS


def test_what_does_not_go_with_dropping(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a b c")
    done = convert(MODEL, tmp_path / "out", "--drop-source", "--calibration", text)
    assert done.exit_code == 2 and "run calibrate first" in done.output
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    done = convert(MODEL, tmp_path / "out", "--drop-source")
    assert done.exit_code == 2 and "not under torchrun" in done.output
    assert hub.requests == []
