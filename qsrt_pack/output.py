"""An output folder that appears whole or not at all."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qsrt_runtime.format import paths
from qsrt_runtime.format.errors import FormatError


def check_output(out: Path, source: Path, overwrite: bool) -> None:
    """Refuse an output that would lose something: the source, or content without `overwrite`."""
    target, source = out.resolve(), source.resolve()
    for place in (Path.cwd(), Path.home()):
        if target == place or target in place.parents:
            raise FormatError(f"{out} holds the folder {place}, which would be replaced")
    if target == source or target in source.parents or source in target.parents:
        raise FormatError(f"{out} and the source {source} lie inside each other; choose another")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise FormatError(f"{out} exists and is not a folder; choose another")
    if out.exists() and not overwrite and any(out.iterdir()):
        raise FormatError(f"{out} is not empty; choose another or give --overwrite to replace it")


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """A fresh folder OUT.partial that takes out's place when the block ends.

    When the block fails, the folder vanishes and what stood at out still does. Another process
    that writes the same output is refused; what a killed one left is removed.
    """
    folder, old = paths.partial_name(out), out.with_name(out.name + ".old")
    if old.exists():
        raise FormatError(f"{old} is in the way; move it")
    out.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    with _locked(folder):
        try:
            _empty(folder)
            yield folder
            _take_place(folder, out, old)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    if old.exists():
        shutil.rmtree(old)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the system drops when the process ends, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat())
        except BlockingIOError:
            held = False
        if not held:  # taken, or renamed into place by its owner a moment ago
            raise FormatError(f"{folder} is being written by another process")
        yield
    finally:
        os.close(descriptor)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _take_place(folder: Path, out: Path, old: Path) -> None:
    if out.exists():
        out.replace(old)
    try:
        folder.replace(out)
    except BaseException:
        if old.exists():
            old.replace(out)
        raise
    paths.sync_folder(out.parent)
