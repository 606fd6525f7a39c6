"""An output folder that appears whole or not at all."""

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

    When the block fails, the folder vanishes and what stood at out still does.
    """
    folder, old = paths.partial_name(out), out.with_name(out.name + ".old")
    if old.exists():
        raise FormatError(f"{old} is in the way; move it")
    out.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    try:
        yield folder
        _take_place(folder, out, old)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if old.exists():
        shutil.rmtree(old)


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
