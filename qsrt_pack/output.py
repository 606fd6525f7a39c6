"""An output folder that appears whole or not at all.

The work is done in OUT.partial, which holds `lock`, the new folder as `package` and, for a moment
at the end, what stood at OUT before as `old`.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qsrt_runtime.format import paths
from qsrt_runtime.format.errors import FormatError

_LOCK, _NEW, _OLD = "lock", "package", "old"


def check_output(out: Path, source: Path, overwrite: bool) -> None:
    """Refuse an output that would lose something: the source, or content without `overwrite`."""
    target, source = out.resolve(), source.resolve()
    for place in (target, paths.partial_name(target)):
        if place == source or place in source.parents or source in place.parents:
            raise FormatError(
                f"{place} and the source {source} lie inside each other; choose another"
            )
    for place in (Path.cwd().resolve(), Path.home().resolve()):
        if target == place or target in place.parents:
            raise FormatError(f"{out} holds the folder {place}, which would be replaced")
    paths.relative_name(target.name, str(target.parent))
    parent = next(folder for folder in target.parents if folder.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise FormatError(f"{parent} cannot be written; name another folder for the output")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise FormatError(f"{out} exists and is not a folder; choose another")
    _check_content(out, overwrite)
    _check_work(paths.partial_name(out))


@contextmanager
def replacing(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """An empty folder that takes out's place when the block ends.

    When the block fails, the folder vanishes and what stood at out still does. Another process
    that writes the same output is refused; what a killed one left is cleared away.
    """
    work = paths.partial_name(out)
    _check_work(work)
    made = [folder for folder in work.parents if not folder.exists()]
    work.mkdir(parents=True, exist_ok=True)
    with _locked(work):
        try:
            _restore(work, out)
            (work / _NEW).mkdir()
            yield work / _NEW
            _check_content(out, overwrite)
            _take_place(work, out)
        finally:
            shutil.rmtree(work, ignore_errors=True)
            for folder in made:
                with suppress(OSError):  # it holds the output
                    folder.rmdir()


def _check_content(out: Path, overwrite: bool) -> None:
    if not overwrite and out.exists() and any(out.iterdir()):
        raise FormatError(f"{out} is not empty; choose another or give --overwrite to replace it")


def _check_work(work: Path) -> None:
    """Refuse a folder of the work's name that this module did not make."""
    if not work.is_symlink() and not work.exists():
        return
    folder = work.is_dir() and not work.is_symlink()
    names = {path.name for path in work.iterdir()} if folder else set()
    ours = not names or (_LOCK in names and names <= {_LOCK, _NEW, _OLD})
    if not folder or not ours or any((work / name).is_symlink() for name in names):
        raise FormatError(f"{work} is in the way, where the work is done; move it")


@contextmanager
def _locked(work: Path) -> Iterator[None]:
    """Hold the lock, which the system drops when the process ends, however it ends."""
    path = work / _LOCK
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
        except BlockingIOError:
            held = False
        if not held:  # taken, or removed by its owner a moment ago
            raise FormatError(f"{work} is in use: another process writes the same output")
        yield
    finally:
        os.close(descriptor)


def _restore(work: Path, out: Path) -> None:
    """Clear away what a killed process left, and put back what it had moved aside."""
    if (work / _OLD).exists() and not out.exists():
        (work / _OLD).replace(out)
    for name in (_NEW, _OLD):
        if (work / name).exists():
            shutil.rmtree(work / name)


def _take_place(work: Path, out: Path) -> None:
    if out.exists():
        out.replace(work / _OLD)
    try:
        (work / _NEW).replace(out)
    except BaseException:
        if (work / _OLD).exists() and not out.exists():
            (work / _OLD).replace(out)
        raise
    paths.sync_folder(out.parent)
