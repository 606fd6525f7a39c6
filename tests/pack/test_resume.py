"""Conversions that were stopped: what is kept, what is refused, and that the bytes are the same."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoints import edit_json

from qsrt_pack import job, plan, produce, supply
from qsrt_pack.encode.expert import Settings
from qsrt_pack.restore import decode_package
from qsrt_pack.validate import validate
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.package import seal

FAST = Settings(search="fast")
EXPERTS = 4  # of each of the two layers of the clean checkpoint
Encode = Callable[..., object]


@pytest.fixture(autouse=True)
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "probe", lambda _method, _device: 1e6)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(layer, expert) of every expert that is encoded, in order."""
    calls, real = [], produce.expert_steps

    def encode(*arguments: object, layer: int, expert: int, **options: object) -> object:
        calls.append((layer, expert))
        return real(*arguments, layer=layer, expert=expert, **options)

    monkeypatch.setattr(produce, "expert_steps", encode)
    return calls


def convert(source: Path, out: Path, settings: Settings = FAST, **options: object) -> Path:
    job.run(job.prepare(source, out, settings, **options), show_progress=False)
    return out


def stop(source: Path, out: Path, after: int, error: BaseException, **options: object) -> None:
    """Convert until so many experts are encoded, then fail."""
    calls, real = 0, produce.expert_steps

    def failing(*arguments: object, **settings: object) -> object:
        nonlocal calls
        if calls == after:
            raise error
        calls += 1
        return real(*arguments, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(produce, "expert_steps", failing)
        with pytest.raises(type(error)):
            convert(source, out, **options)


@pytest.fixture
def stopped(clean_checkpoint: Path, tmp_path: Path) -> Path:
    """An output whose conversion was stopped in its second layer."""
    stop(clean_checkpoint, tmp_path / "out", EXPERTS + 1, KeyboardInterrupt())
    return tmp_path / "out"


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_a_stop_leaves(stopped: Path) -> None:
    assert names(stopped.parent) == ["out.partial"]
    work = stopped.parent / "out.partial"
    assert names(work) == ["lock", "package", "state.json"]
    assert names(work / "package") == ["qsrt-layer-000.json", "qsrt-layer-000.safetensors"]
    assert list(json.loads((work / "state.json").read_text())["layers"]) == ["0"]


def test_cv_7a_the_same_command_continues_to_the_same_bytes(
    stopped: Path, clean_checkpoint: Path, clean_package: Path, encoded: list
) -> None:
    prepared = job.prepare(clean_checkpoint, stopped, FAST)
    assert prepared.plan["finished_layers"] == [0]
    evidence = job.run(prepared, show_progress=False)
    assert encoded == [(1, expert) for expert in range(EXPERTS)]
    assert contents(stopped) == contents(clean_package)
    assert names(stopped.parent) == ["out"]
    assert sorted(evidence) == [0, 1]


def test_a_stop_in_the_first_layer_leaves_nothing(clean_checkpoint: Path, tmp_path: Path) -> None:
    stop(clean_checkpoint, tmp_path / "deep" / "out", EXPERTS - 1, OSError("no space left"))
    assert names(tmp_path) == []


def test_a_stop_before_the_seal_keeps_every_layer(
    clean_checkpoint: Path,
    clean_package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    encoded: list,
) -> None:
    def fail(_folder: Path) -> None:
        raise OSError("no space left")

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(job, "seal", fail)
        with pytest.raises(OSError, match="no space left") as caught:
            convert(clean_checkpoint, out)
    assert caught.value.__notes__ == [
        f"2 of 2 layers are finished and kept in {tmp_path / 'out.partial'}; "
        "the same command continues"
    ]
    assert names(tmp_path) == ["out.partial"]
    encoded.clear()
    assert contents(convert(clean_checkpoint, out)) == contents(clean_package)
    assert encoded == []


def test_cv_7b_a_changed_shard_is_named(stopped: Path, checkpoint: Path, encoded: list) -> None:
    shard = checkpoint / "model-00002-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    before = contents(stopped.parent / "out.partial")
    with pytest.raises(FormatError) as caught:
        convert(checkpoint, stopped)
    message = str(caught.value)
    assert f"source file {shard.name} was " in message
    assert "model-00001" not in message
    assert f"{stopped.parent / 'out.partial'} holds 1 finished layer(s)" in message
    assert message.endswith(f"to start over, delete {stopped.parent / 'out.partial'}")
    assert not hasattr(caught.value, "__notes__")
    assert contents(stopped.parent / "out.partial") == before
    assert encoded == []


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        (Settings(search="fast", seed=1), "setting seed was 0 and is 1"),
        (Settings(search="fast", modes="all"), "setting modes was R0 and is all"),
        (Settings(search="exact"), "setting search was fast and is exact"),
    ],
)
def test_cv_7b_changed_settings_are_named(
    stopped: Path, clean_checkpoint: Path, settings: Settings, change: str
) -> None:
    with pytest.raises(FormatError, match=f": {change}. Convert as it was"):
        job.prepare(clean_checkpoint, stopped, settings)


@pytest.mark.parametrize(
    ("edit", "change"),
    [
        (lambda v: v["versions"].update(torch="2.0.0"), "version of torch was 2.0.0 and is "),
        (
            lambda v: v["encoder_settings"].update(calibration_sha256=64 * "a"),
            "setting calibration_sha256 was aaaaaaaaaaaa and is absent",
        ),
        (lambda v: v["encoder_settings"].update(damping=0.5), "setting damping was 0.5 and is "),
    ],
)
def test_cv_7b_other_versions_and_calibration_are_named(
    stopped: Path, clean_checkpoint: Path, edit: Callable, change: str
) -> None:
    edit_json(stopped.parent / "out.partial" / "state.json", edit)
    with pytest.raises(FormatError, match=change):
        job.prepare(clean_checkpoint, stopped, FAST)


def test_deleting_the_work_folder_starts_over(
    stopped: Path, clean_checkpoint: Path, tmp_path: Path, encoded: list
) -> None:
    shutil.rmtree(stopped.parent / "out.partial")
    convert(clean_checkpoint, stopped, Settings(seed=1, search="fast"))
    assert len(encoded) == 2 * EXPERTS


@pytest.mark.parametrize("text", ["", "{", '{"schema": "qsrt_state_v1"}', "[]"])
def test_a_damaged_state_says_how_to_start_over(
    stopped: Path, clean_checkpoint: Path, text: str
) -> None:
    work = stopped.parent / "out.partial"
    (work / "state.json").write_text(text)
    with pytest.raises(FormatError, match=f"state.json: .*; to start over, delete {work}$"):
        job.prepare(clean_checkpoint, stopped, FAST)
    assert names(work) == ["lock", "package", "state.json"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def link(path: Path) -> None:
    kept = path.with_name("elsewhere")
    path.rename(kept)
    path.symlink_to(kept)


@pytest.mark.parametrize("damage", [flip, Path.unlink, link])
@pytest.mark.parametrize("name", ["qsrt-layer-000.safetensors", "qsrt-layer-000.json"])
def test_finished_layers_are_verified_not_trusted(
    stopped: Path,
    clean_checkpoint: Path,
    clean_package: Path,
    encoded: list,
    caplog: pytest.LogCaptureFixture,
    damage: Callable,
    name: str,
) -> None:
    damage(stopped.parent / "out.partial" / "package" / name)
    convert(clean_checkpoint, stopped)
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert f"{name} is " in warning
    assert warning.endswith("layer 0 is encoded again")
    assert len(encoded) == 2 * EXPERTS
    assert contents(stopped) == contents(clean_package)


def test_nothing_but_finished_layers_is_taken_over(
    stopped: Path, clean_checkpoint: Path, clean_package: Path
) -> None:
    package = stopped.parent / "out.partial" / "package"
    (package / "assets").mkdir()
    (package / "assets" / "old.txt").write_text("a side file that the source no longer has")
    for name in ("qsrt-layer-001.safetensors.partial", "QSRT_COMPLETE.json", "config.json"):
        (package / name).write_text("{}")
    (stopped.parent / "out.partial" / "state.json.partial").write_text("{")
    convert(clean_checkpoint, stopped)
    assert contents(stopped) == contents(clean_package)
    assert names(stopped.parent) == ["out"]


def test_the_loader_may_change(
    stopped: Path, clean_checkpoint: Path, tmp_path: Path, encoded: list
) -> None:
    convert(clean_checkpoint, stopped, loader="kquant")
    assert len(encoded) == EXPERTS
    assert contents(stopped) == contents(convert(clean_checkpoint, tmp_path / "b", loader="kquant"))


def test_what_is_replaced_stays_until_the_end(
    clean_checkpoint: Path, clean_package: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("kept")
    stop(clean_checkpoint, out, EXPERTS, KeyboardInterrupt(), overwrite=True)
    assert contents(out) == {"old": b"kept"}
    assert contents(convert(clean_checkpoint, out, overwrite=True)) == contents(clean_package)
    assert names(tmp_path) == ["out"]


def test_a_layer_of_a_source_that_changed_meanwhile_is_not_kept(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, shard = produce.expert_steps, checkpoint / "model-00001-of-00002.safetensors"
    data = shard.read_bytes()

    def encode(*arguments: object, layer: int, **options: object) -> object:
        if layer == 1:
            shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        return real(*arguments, layer=layer, **options)

    monkeypatch.setattr(produce, "expert_steps", encode)
    with pytest.raises(FormatError, match="changed since it was opened"):
        convert(checkpoint, tmp_path / "out")
    state = json.loads((tmp_path / "out.partial" / "state.json").read_text())
    assert list(state["layers"]) == ["0"]


def test_a_complete_output_is_confirmed(
    package: Path, clean_package: Path, clean_checkpoint: Path, encoded: list
) -> None:
    work = package.parent / f"{package.name}.partial"  # as a run killed at its very end leaves it
    work.mkdir()
    (work / "lock").touch()
    prepared = job.prepare(clean_checkpoint, package, FAST)
    assert prepared.complete
    assert sorted(job.run(prepared, show_progress=False)) == [0, 1]
    assert encoded == []
    assert contents(package) == contents(clean_package)
    assert names(package.parent) == [package.name]


def test_an_output_that_another_process_finishes_meanwhile(
    clean_package: Path,
    clean_checkpoint: Path,
    tmp_path: Path,
    encoded: list,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the work or while it is prepared: the advice is not to overwrite it."""
    out, message = (
        tmp_path / "out",
        "out was finished by another process meanwhile; run the command",
    )
    late = job.prepare(clean_checkpoint, out, FAST)
    look = job._is_result

    def slow(*arguments: object) -> bool:
        found = look(*arguments)
        shutil.copytree(clean_package, out)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(job, "_is_result", slow)
        later = job.prepare(clean_checkpoint, out, FAST)
    for prepared in (late, later):
        with pytest.raises(FormatError, match=message):
            job.run(prepared, show_progress=False)
    convert(clean_checkpoint, out)
    assert encoded == []
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("settings", [Settings(search="fast", seed=1), Settings(search="exact")])
def test_a_complete_output_of_other_settings_is_content(
    package: Path, clean_checkpoint: Path, settings: Settings
) -> None:
    with pytest.raises(FormatError, match="is not empty"):
        job.prepare(clean_checkpoint, package, settings)
    with pytest.raises(FormatError, match="is not empty"):
        job.prepare(clean_checkpoint, package, FAST, loader="kquant")


def test_a_complete_output_of_another_source_is_refused(package: Path, checkpoint: Path) -> None:
    flip(checkpoint / "model-00001-of-00002.safetensors")
    before = contents(package)
    with pytest.raises(FormatError, match=r"is the package of another source; .*--overwrite"):
        convert(checkpoint, package)
    assert contents(package) == before


def test_a_complete_output_that_is_damaged_is_refused(
    package: Path, clean_checkpoint: Path
) -> None:
    flip(package / "qsrt-layer-001.safetensors")
    with pytest.raises(FormatError, match=r"qsrt-layer-001.safetensors is damaged"):
        convert(clean_checkpoint, package)
    convert(clean_checkpoint, package, overwrite=True)
    validate(package, show_progress=False)


def test_decoding_does_not_touch_a_stopped_conversion(stopped: Path, clean_package: Path) -> None:
    before = contents(stopped.parent)
    with pytest.raises(FormatError, match="holds a conversion that was stopped"):
        decode_package(clean_package, stopped, show_progress=False)
    assert contents(stopped.parent) == before


def kill_between_renames(source: Path, out: Path) -> None:
    """Leave what a run leaves that is killed when it has moved the old output aside."""
    (out / "precious").parent.mkdir(exist_ok=True)
    (out / "precious").write_text("kept")
    stop(source, out, EXPERTS, KeyboardInterrupt(), overwrite=True)
    out.rename(out.parent / "out.partial" / "old")


@pytest.mark.parametrize("settings", [FAST, Settings(search="fast", seed=1)])
def test_what_was_moved_aside_is_back_before_anything_is_refused(
    clean_checkpoint: Path, tmp_path: Path, settings: Settings
) -> None:
    out = tmp_path / "out"
    kill_between_renames(clean_checkpoint, out)
    with pytest.raises(FormatError, match=r"is not empty|seed was 0"):
        job.prepare(clean_checkpoint, out, settings, overwrite=settings.seed == 1)
    assert contents(out) == {"precious": b"kept"}


def test_what_was_moved_aside_outlives_a_folder_made_in_its_place(
    clean_checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    kill_between_renames(clean_checkpoint, out)
    out.mkdir()
    stop(clean_checkpoint, out, 1, KeyboardInterrupt(), overwrite=True)
    assert contents(out) == {"precious": b"kept"}
    out.rename(tmp_path / "out.partial" / "old")
    out.mkdir()
    (out / "other").write_text("x")
    with pytest.raises(FormatError, match=r"old holds what stood at .* before; move one of them"):
        job.prepare(clean_checkpoint, out, FAST, overwrite=True)


def test_a_complete_output_leaves_other_stopped_work_alone(
    package: Path, clean_checkpoint: Path
) -> None:
    other = Settings(search="fast", seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "seal", lambda _folder: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(clean_checkpoint, package, other, overwrite=True)
    convert(clean_checkpoint, package)
    state = package.parent / f"{package.name}.partial" / "state.json"
    assert list(json.loads(state.read_text())["layers"]) == ["0", "1"]


def test_a_complete_output_with_other_side_files_is_refused(
    package: Path, checkpoint: Path
) -> None:
    (checkpoint / "tokenizer.json").write_text("{}")
    with pytest.raises(FormatError, match="is the package of another source"):
        convert(checkpoint, package)


def test_a_complete_output_may_have_a_card(package: Path, clean_checkpoint: Path) -> None:
    (package / "README.md").write_text("# card\n")
    seal(package)
    before = (package / "QSRT_COMPLETE.json").read_bytes()
    convert(clean_checkpoint, package)
    assert (package / "QSRT_COMPLETE.json").read_bytes() == before


def test_what_the_run_would_clear_away_counts_as_free(
    stopped: Path, clean_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = job.prepare(clean_checkpoint, stopped, FAST).plan["bytes_to_write"]
    package = stopped.parent / "out.partial" / "package"
    (package / "model-00001-of-00001.safetensors").write_bytes(bytes(need))
    disk = SimpleNamespace(free=0)
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda _path: disk)
    job.prepare(clean_checkpoint, stopped, FAST)
    (package / "model-00001-of-00001.safetensors").write_bytes(bytes(need - 1))
    with pytest.raises(FormatError, match=f"{need - 1:,} bytes free, {need:,} are to be written"):
        job.prepare(clean_checkpoint, stopped, FAST)


def test_a_layer_that_could_not_be_recorded_is_not_said_to_be_kept(
    clean_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(job, "write_state", fail)
    with pytest.raises(OSError, match="no space left") as caught:
        convert(clean_checkpoint, tmp_path / "out")
    assert not hasattr(caught.value, "__notes__")
    assert names(tmp_path) == []


def test_only_layers_that_are_there_count_as_finished(
    stopped: Path, clean_checkpoint: Path
) -> None:
    shutil.rmtree(stopped.parent / "out.partial" / "package")
    assert job.prepare(clean_checkpoint, stopped, FAST).plan["finished_layers"] == []


def test_many_changes_make_a_short_message(stopped: Path, clean_checkpoint: Path) -> None:
    state = stopped.parent / "out.partial" / "state.json"
    edit_json(state, lambda v: v["encoder_settings"].update({f"x{i}": i for i in range(100)}))
    with pytest.raises(FormatError, match=r"x0 was 0 .* and 97 more\. Convert") as caught:
        job.prepare(clean_checkpoint, stopped, FAST)
    assert len(str(caught.value)) < 500


def test_a_source_that_changes_while_it_is_opened_is_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = supply.open_checkpoint

    def opened(path: Path, *rest: object) -> object:
        found = real(path, *rest)
        edit_json(checkpoint / "config.json", lambda v: v.update(rope_theta=5.0))
        return found

    monkeypatch.setattr(supply, "open_checkpoint", opened)
    with pytest.raises(FormatError, match="changed since it was opened"):
        job.prepare(checkpoint, tmp_path / "out", FAST)
