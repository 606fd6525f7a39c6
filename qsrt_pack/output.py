"""An output that appears whole or not at all: a folder, or a file.

The work on a folder is done in OUT.partial, which holds `lock`, the new folder as `package`, for a
moment at the end what stood at OUT before as `old`, what is kept of a source that is removed on the
way as `source`, and for work that can be continued `state.json`: while that file is there, a
failure keeps OUT.partial, and the next run goes on in it.
"""

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qsrt_runtime.format import paths
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.manifest import MARKER

_LOCK, _NEW, _OLD, _STATE, _SOURCE = "lock", "package", "old", "state.json", "source"
SLICES = "slices"  # in it, what is kept of each removed shard
_STATE_PARTIAL = paths.partial_name(Path(_STATE)).name
_PARTIAL_BYTES = 16  # that the name of a partial file has more: a process's number, or .partial
_LOCK_TRIES = 5  # 0.2 s, since a look at the lock takes it for a moment
_log = logging.getLogger(__name__)


def state_file(out: Path) -> Path:
    """Where resumable work on an output remembers what is finished."""
    return paths.partial_name(out) / _STATE


def new_folder(out: Path) -> Path:
    """Where the folder that is to take out's place is made."""
    return paths.partial_name(out) / _NEW


def source_folder(out: Path) -> Path:
    """Where a conversion keeps what it needs of a source that is not there as a whole."""
    return paths.partial_name(out) / _SOURCE


def check_output(
    out: Path, source: Path | None, overwrite: bool, *, resumable: bool = False
) -> None:
    """Refuse an output that would lose something: the source, or content without `overwrite`.

    source: a local folder, None for another.   Puts back what a killed run had moved aside.
    resumable: work that was stopped may be waiting there to be continued.
    """
    target, source = out.resolve(), source and source.resolve()
    if not target.name:
        raise FormatError(f"{out} is the root folder; name a folder in it")
    for place in (target, paths.partial_name(target)) if source else ():
        if place == source or place in source.parents or source in place.parents:
            raise FormatError(
                f"{place} and the source {source} lie inside each other; choose another"
            )
    _check_unsealed(target)
    for place in (Path.cwd().resolve(), Path.home().resolve()):
        if target == place or target in place.parents:
            raise FormatError(f"{out} holds the folder {place}, which would be replaced")
    paths.relative_name(target.name, str(target.parent))
    parent = next(folder for folder in target.parents if folder.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise FormatError(f"{parent} cannot be written; name another folder for the output")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise FormatError(f"{out} exists and is not a folder; choose another")
    if out.is_mount():
        raise FormatError(f"{out} is a mount point; name a folder in it")
    work = paths.partial_name(out)
    _check_work(work)
    if (work / _LOCK).exists():
        with _locked(work):
            _put_back(work, out)
            _check_resumable(work, resumable)
    check_content(out, overwrite)


def check_content(out: Path, overwrite: bool) -> None:
    """Refuse an output that holds something, unless it is to be overwritten."""
    if not overwrite and has_content(out):
        raise FormatError(f"{out} is not empty; choose another or give --overwrite to replace it")


def has_content(out: Path) -> bool:
    """Whether something stands at out that a new folder would replace."""
    return out.exists() and (not out.is_dir() or any(out.iterdir()))


def leftover_bytes(out: Path, kept: Collection[str]) -> int:
    """Bytes that a stopped run left in the new folder, less the files of the names kept."""
    folder = new_folder(out)
    files = paths.files_below(folder) if folder.is_dir() else []
    return sum((folder / name).lstat().st_size for name in files if name not in kept)


def starting_over(work: Path) -> str:
    """How to do so where work was stopped, which may hold the last of a source's weights."""
    kept = work / _SOURCE / SLICES
    if kept.is_dir() and any(kept.iterdir()):
        return (
            f"put back the shards of the source whose names {kept} has, and only then delete "
            f"{work}: of removed shards nothing else is left"
        )
    return f"delete {work}"


@contextmanager
def replacing(out: Path, *, overwrite: bool, resumable: bool = False) -> Iterator[Path]:
    """A folder that takes out's place when the block ends.

    It is empty, unless resumable and a run that failed or was killed left a state file: then it
    holds what that run left. When the block fails, what stood at out still does, and the folder
    vanishes unless there is a state file. Another process that writes the same output is refused,
    and so is an output that has content, which it had not when `check_output` let it pass.
    """
    work = paths.partial_name(out)
    _check_work(work)
    made = paths.make_folder(work)
    try:
        with _locked(work):
            _check_resumable(work, resumable)
            _restore(work, out)  # outside: where it fails, nothing may be removed
            try:
                _check_still_empty(out, overwrite)
                paths.make_folder(work / _NEW)
                yield work / _NEW
                _check_still_empty(out, overwrite)
                _take_place(work, out)
            except BaseException:
                if not (work / _STATE).exists():
                    _remove(work, out)
                raise
            _remove(work, out)
    finally:
        for folder in made[1:]:
            with suppress(OSError):  # it holds the output, or work to be continued
                folder.rmdir()


def recover(out: Path) -> None:
    """Put back what a run that was killed while it replaced a folder had moved aside."""
    work = paths.partial_name(out)
    if (work / _LOCK).exists():
        _check_work(work)
        with _locked(work):
            _put_back(work, out)


def discard(out: Path) -> None:
    """Remove what a run that was killed after its last step left beside a finished output."""
    work = paths.partial_name(out)
    if work.exists():
        _check_work(work)
        with _locked(work):
            _remove(work, out)


def _check_still_empty(out: Path, overwrite: bool) -> None:
    if not overwrite and has_content(out):
        raise FormatError(
            f"{out} was finished by another process meanwhile; run the command again to check it"
        )


def _check_work(work: Path) -> None:
    """Refuse a folder of the work's name that this module did not make."""
    if not work.is_symlink() and not work.exists():
        return
    folder = work.is_dir() and not work.is_symlink()
    names = {path.name for path in work.iterdir()} if folder else set()
    known = {_LOCK, _NEW, _OLD, _STATE, _STATE_PARTIAL, _SOURCE}
    ours = not names or (_LOCK in names and names <= known)
    if not folder or not ours or any((work / name).is_symlink() for name in names):
        raise FormatError(f"{work} is in the way, where the work is done; move it")


def _check_resumable(work: Path, resumable: bool) -> None:
    if not resumable and (work / _STATE).exists():
        raise FormatError(
            f"{work} holds a conversion that was stopped; finish it; to start over, "
            f"{starting_over(work)}"
        )


@contextmanager
def _locked(work: Path) -> Iterator[None]:
    """Hold the lock, which the system drops when the process ends, however it ends."""
    busy = FormatError(f"{work} is in use: another process writes the same output")
    path = work / _LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except FileNotFoundError:  # removed by its owner a moment ago
        raise busy from None
    try:
        for attempt in range(_LOCK_TRIES):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == _LOCK_TRIES - 1:
                    raise busy from None
                time.sleep(0.05)
        if not (path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())):
            raise busy
        yield
    finally:
        os.close(descriptor)


def _put_back(work: Path, out: Path) -> None:
    """Put back what a killed process had moved aside and not replaced."""
    old = work / _OLD
    replaced = out.exists() and not (work / _NEW).exists()
    if not old.exists() or replaced:
        return
    if out.exists() and any(out.iterdir()):
        raise FormatError(f"{old} holds what stood at {out} before; move one of them")
    old.replace(out)


def _restore(work: Path, out: Path) -> None:
    """Clear away what a killed process left and what cannot be continued."""
    _put_back(work, out)
    (work / _STATE_PARTIAL).unlink(missing_ok=True)
    names = (_OLD,) if (work / _STATE).exists() else (_OLD, _NEW, _SOURCE)
    for name in names:
        if (work / name).exists():
            shutil.rmtree(work / name)


def _take_place(work: Path, out: Path) -> None:
    new, old = work / _NEW, work / _OLD
    try:
        if out.exists():
            out.replace(old)
        new.replace(out)
        paths.sync_folder(out.parent)
        paths.sync_folder(work)
    except BaseException:
        if not new.exists() and out.exists():
            out.replace(new)
        if old.exists() and not out.exists():
            old.replace(out)
        raise


def _remove(work: Path, out: Path) -> None:
    """Remove the work folder, the lock last, without which it would not be known as one."""
    try:
        if (work / _OLD).exists() and not out.exists():
            raise OSError(f"{work / _OLD} could not be moved back to {out}")
        for name in (_STATE, _STATE_PARTIAL):
            (work / name).unlink(missing_ok=True)
        for name in (_NEW, _OLD, _SOURCE):
            if (work / name).exists():
                shutil.rmtree(work / name)
        (work / _LOCK).unlink(missing_ok=True)
        work.rmdir()
    except OSError as error:
        _log.warning("%s was not removed: %s", work, error)


def check_file(file: Path, overwrite: bool) -> None:
    """Refuse a file that cannot be written, or that would lose something."""
    if not file.parent.is_dir():
        raise FormatError(f"{file.parent} is not a folder; make it, or choose another place")
    _check_unsealed(file.parent.resolve() / file.name)
    size, most = len(os.fsencode(file.name)), os.pathconf(file.parent, "PC_NAME_MAX")
    if 0 < most < size + _PARTIAL_BYTES:  # -1: there is no limit
        raise FormatError(
            f"{file}: the name has {size} bytes, expected at most {most - _PARTIAL_BYTES}; "
            "choose a shorter one"
        )
    if file.is_dir():
        raise FormatError(f"{file} is a folder; name a file")
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise FormatError(f"{file.parent} cannot be written; choose another folder")
    if file.exists() and not file.is_file():
        raise FormatError(f"{file} is no regular file; choose another name")
    if (file.exists() or file.is_symlink()) and not overwrite:
        raise FormatError(f"{file} exists; choose another or give --overwrite to replace it")


def _check_unsealed(place: Path) -> None:
    """Refuse a place, without links, inside a package."""
    for folder in place.parents:
        if (folder / MARKER).exists():
            raise FormatError(
                f"{place} lies in the package {folder}, which is sealed; choose another place"
            )


@contextmanager
def placed(file: Path, data: bytes) -> Iterator[None]:
    """Write a file under a name that nothing has, and rename it when the block has ended."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with paths.naming(partial), partial.open("xb") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())
        yield
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    paths.sync_folder(file.parent)
