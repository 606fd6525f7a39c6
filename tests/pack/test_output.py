import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from qsrt_pack.output import check_output, discard, replacing, state_file
from qsrt_runtime.format import paths
from qsrt_runtime.format.errors import FormatError


def fill(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(name)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_new_or_empty_output_is_taken(tmp_path: Path) -> None:
    source = fill(tmp_path / "source", "x")
    check_output(tmp_path / "new", source, False)
    check_output(tmp_path / "deep" / "below" / "new", source, False)
    check_output(fill(tmp_path / "empty"), source, False)
    assert names(tmp_path) == ["empty", "source"]


def test_pk_4c_content_is_kept_without_a_wish(tmp_path: Path) -> None:
    source, out = fill(tmp_path / "source"), fill(tmp_path / "out", "old")
    with pytest.raises(FormatError, match=r"out is not empty; .*--overwrite"):
        check_output(out, source, False)
    check_output(out, source, True)
    assert names(out) == ["old"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("out", ["source", "source/out", ".", "source/../source", "link/out"])
def test_source_and_output_lie_apart(tmp_path: Path, out: str, overwrite: bool) -> None:
    source = fill(tmp_path / "source")
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(FormatError, match="lie inside each other"):
        check_output(tmp_path / out, source, overwrite)


@pytest.mark.parametrize("out", [".", "below", ".."])
def test_the_working_and_home_folders_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    source, here = fill(tmp_path / "source"), fill(tmp_path / "a" / "here" / "below")
    monkeypatch.chdir(here)
    with pytest.raises(FormatError, match="which would be replaced"):
        check_output(here.parent / out, source, True)
    monkeypatch.chdir(source)
    check_output(here.parent / out, source, True)
    monkeypatch.setenv("HOME", str(here))
    with pytest.raises(FormatError, match=f"holds the folder {here}"):
        check_output(here.parent / out, source, True)


def test_a_name_that_begins_alike_is_apart(tmp_path: Path) -> None:
    check_output(tmp_path / "source-qsrt", fill(tmp_path / "source"), False)


@pytest.mark.parametrize("kind", ["file", "link", "dangling link"])
def test_an_output_that_is_no_folder(tmp_path: Path, kind: str) -> None:
    source, out = fill(tmp_path / "source"), tmp_path / "out"
    if kind == "file":
        out.write_text("")
    else:
        out.symlink_to(fill(tmp_path / "other") if kind == "link" else tmp_path / "none")
    with pytest.raises(FormatError, match="out exists and is not a folder"):
        check_output(out, source, True)


def test_the_folder_appears_when_whole(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with replacing(out, overwrite=True) as folder:
        assert folder == tmp_path / "deep" / "out.partial" / "package"
        fill(folder, "new")
        assert not out.exists()
    assert names(out.parent) == ["out"]
    assert names(out) == ["new"]


def test_what_was_there_is_replaced_whole(tmp_path: Path) -> None:
    out = fill(tmp_path / "out", "old", "both")
    with replacing(out, overwrite=True) as folder:
        fill(folder, "new", "both")
        assert names(out) == ["both", "old"]
    assert names(tmp_path) == ["out"]
    assert names(out) == ["both", "new"]


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("old", [True, False])
def test_a_failure_changes_nothing(tmp_path: Path, error: BaseException, old: bool) -> None:
    out = tmp_path / "out"
    if old:
        fill(out, "old")
    with pytest.raises(type(error)), replacing(out, overwrite=True) as folder:
        fill(folder, "half")
        raise error
    assert names(tmp_path) == (["out"] if old else [])
    if old:
        assert names(out) == ["old"]


def test_a_failed_rename_puts_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = fill(tmp_path / "out", "old")
    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if self.name == "package":
            raise OSError("no")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OSError, match="no"), replacing(out, overwrite=True) as folder:
        fill(folder, "new")
    assert names(tmp_path) == ["out"]
    assert names(out) == ["old"]


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_is_not_a_work_folder_is_not_touched(tmp_path: Path, kind: str) -> None:
    source, partial = fill(tmp_path / "source", "x"), tmp_path / "out.partial"
    if kind == "folder":
        fill(partial, "thesis.txt")
    elif kind == "file":
        partial.write_text("thesis")
    else:
        partial.symlink_to(source)
    with pytest.raises(FormatError, match=r"out\.partial is in the way"):
        check_output(tmp_path / "out", source, True)
    with (
        pytest.raises(FormatError, match=r"out\.partial is in the way"),
        replacing(tmp_path / "out", overwrite=True),
    ):
        raise AssertionError("entered")
    assert names(tmp_path) == ["out.partial", "source"]
    assert names(source) == ["x"]
    assert kind != "folder" or names(partial) == ["thesis.txt"]


def test_what_a_killed_run_moved_aside_is_put_back(tmp_path: Path) -> None:
    work = fill(tmp_path / "out.partial", "lock")
    fill(work / "old", "kept")
    fill(work / "package", "half")
    with pytest.raises(OSError, match="stop"), replacing(tmp_path / "out", overwrite=True):
        raise OSError("stop")
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["kept"]


def test_an_output_that_appeared_meanwhile_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (
        pytest.raises(FormatError, match="out was finished by another process meanwhile; run the"),
        replacing(out, overwrite=False) as folder,
    ):
        fill(folder, "new")
        fill(out, "theirs")
    assert names(tmp_path) == ["out"]
    assert names(out) == ["theirs"]


def test_pk_6a_a_second_writer_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with replacing(out, overwrite=True) as folder:
        fill(folder, "first")
        with (
            pytest.raises(FormatError, match="is in use: another process"),
            replacing(out, overwrite=True),
        ):
            pass
        assert names(folder) == ["first"]
    assert names(out) == ["first"]


def test_pk_6b_the_lock_of_a_dead_process_is_gone(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys\n"
        "from qsrt_pack.output import replacing\n"
        "with replacing(pathlib.Path(sys.argv[1]), overwrite=True) as folder:\n"
        "    (folder / 'half').write_text('x')\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")])
    assert done.returncode == -9
    assert names(tmp_path) == ["out.partial"]
    with replacing(tmp_path / "out", overwrite=True) as folder:
        assert names(folder) == []
        fill(folder, "whole")
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("place", ["", "package", "old"])
def test_a_source_inside_the_work_folder_is_not_cleared_away(tmp_path: Path, place: str) -> None:
    source = fill(tmp_path / "out.partial" / place, "weights")
    with pytest.raises(FormatError, match="lie inside each other"):
        check_output(tmp_path / "out", source, True)
    with (
        pytest.raises(FormatError, match="is in the way"),
        replacing(tmp_path / "out", overwrite=True),
    ):
        raise AssertionError("entered")
    assert names(source) == ["weights"]


def test_pk_4b_a_folder_that_cannot_be_written_is_seen_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_arguments: False)
    with pytest.raises(FormatError, match=f"{tmp_path} cannot be written; name another folder"):
        check_output(tmp_path / "deep" / "out", fill(tmp_path / "source"), False)


def test_a_failure_leaves_no_folder_above_the_output(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="full"), replacing(tmp_path / "a/b/out", overwrite=False):
        raise OSError("full")
    assert names(tmp_path) == []


def test_resumable_work_is_kept_while_there_is_a_state(tmp_path: Path) -> None:
    out = tmp_path / "a" / "out"
    with (
        pytest.raises(OSError, match="full"),
        replacing(out, overwrite=False, resumable=True) as folder,
    ):
        fill(folder, "half")
        state_file(out).write_text("{}")
        raise OSError("full")
    assert names(out.parent) == ["out.partial"]
    with (
        pytest.raises(FormatError, match="holds a conversion that was stopped"),
        replacing(out, overwrite=False),
    ):
        raise AssertionError("entered")
    with replacing(out, overwrite=False, resumable=True) as folder:
        assert names(folder) == ["half"]
        fill(folder, "whole")
    assert names(out.parent) == ["out"]
    assert names(out) == ["half", "whole"]


def test_resumable_work_without_a_state_starts_empty(tmp_path: Path) -> None:
    fill(fill(tmp_path / "out.partial", "lock", "state.json.partial") / "package", "half")
    with replacing(tmp_path / "out", overwrite=False, resumable=True) as folder:
        assert names(folder) == []
        assert names(folder.parent) == ["lock", "package"]


def test_a_failed_sync_takes_the_new_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = fill(tmp_path / "out", "old"), paths.sync_folder

    def sync(folder: Path) -> None:
        if folder == tmp_path and (out / "new").exists():
            raise OSError("no")
        real(folder)

    monkeypatch.setattr(paths, "sync_folder", sync)
    with (
        pytest.raises(OSError, match="no"),
        replacing(out, overwrite=True, resumable=True) as folder,
    ):
        fill(folder, "new")
        state_file(out).write_text("{}")
    assert names(out) == ["old"]
    assert names(tmp_path / "out.partial") == ["lock", "package", "state.json"]


def test_what_was_moved_aside_is_never_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    out, real = fill(tmp_path / "out", "old"), Path.replace

    def replace(self: Path, target: Path) -> Path:
        if self.name in ("package", "old"):
            raise OSError("no")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OSError, match="no"), replacing(out, overwrite=True) as folder:
        fill(folder, "new")
    assert names(tmp_path / "out.partial" / "old") == ["old"]
    assert "could not be moved back" in caplog.text
    monkeypatch.undo()
    with pytest.raises(KeyError), replacing(out, overwrite=True):
        assert names(out) == ["old"]
        raise KeyError
    assert names(tmp_path) == ["out"]


def test_what_a_finished_output_has_beside_it_is_discarded(tmp_path: Path) -> None:
    out = fill(tmp_path / "out", "new")
    discard(out)
    fill(fill(tmp_path / "out.partial", "lock", "state.json") / "old", "before")
    discard(out)
    assert names(tmp_path) == ["out"]
    assert names(out) == ["new"]


def test_work_in_use_is_seen_first(tmp_path: Path) -> None:
    source, out = fill(tmp_path / "source"), tmp_path / "out"
    with (
        replacing(out, overwrite=False, resumable=True),
        pytest.raises(FormatError, match="is in use: another process"),
    ):
        check_output(out, source, False, resumable=True)
    check_output(out, source, True)


def test_an_output_that_filled_before_the_work_began_is_kept(tmp_path: Path) -> None:
    out = fill(tmp_path / "out", "theirs")
    with (
        pytest.raises(FormatError, match="out was finished by another process meanwhile; run the"),
        replacing(out, overwrite=False),
    ):
        raise AssertionError("entered")
    assert names(tmp_path) == ["out"]
    assert names(out) == ["theirs"]


def test_a_mount_point_is_seen_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = fill(tmp_path / "out")
    monkeypatch.setattr(Path, "is_mount", lambda path: path == out)
    with pytest.raises(FormatError, match="out is a mount point; name a folder in it"):
        check_output(out, fill(tmp_path / "source"), False)


def test_a_short_look_at_the_lock_refuses_nobody(tmp_path: Path) -> None:
    work = fill(tmp_path / "out.partial", "lock")
    with (work / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        timer = threading.Timer(0.08, fcntl.flock, (file, fcntl.LOCK_UN))
        timer.start()
        with replacing(tmp_path / "out", overwrite=False) as folder:
            fill(folder, "new")
        timer.join()
    assert names(tmp_path) == ["out"]


def test_a_lock_that_its_owner_removes_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = fill(tmp_path / "out.partial", "lock")
    real = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        (work / "lock").unlink()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(FormatError, match="is in use"), replacing(tmp_path / "out", overwrite=True):
        raise AssertionError("entered")


def test_renames_are_synced_before_the_work_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, real = [], paths.sync_folder

    def sync(folder: Path) -> None:
        seen.append((folder, (tmp_path / "out" / "new").exists()))
        real(folder)

    monkeypatch.setattr(paths, "sync_folder", sync)
    with replacing(tmp_path / "out", overwrite=False) as folder:
        fill(folder, "new")
    assert seen[-2:] == [(tmp_path, True), (tmp_path / "out.partial", True)]


def test_earlier_content_outlives_a_refusal_to_choose_between_two(tmp_path: Path) -> None:
    out, work = fill(tmp_path / "out", "theirs"), fill(tmp_path / "out.partial", "lock")
    fill(work / "old", "precious")
    fill(work / "package", "half")
    with (
        pytest.raises(FormatError, match="move one of them"),
        replacing(out, overwrite=True),
    ):
        raise AssertionError("entered")
    assert names(work / "old") == ["precious"]
    assert names(out) == ["theirs"]
