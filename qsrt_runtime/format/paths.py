"""Names and files on disk: safe relative names, links, digests, durable renames."""

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from qsrt_runtime.format.errors import FormatError

HUB_CACHE = ".cache/huggingface"  # what a Hub download leaves inside a folder
MAX_DOCUMENT = 100_000_000  # bytes, as of a safetensors header
_CHUNK = 1 << 20
_FILES_AT_ONCE = min(8, os.cpu_count() or 1)
# Weights in any format, and what a reader of them might execute.
WEIGHTS_OR_CODE = re.compile(
    r"\.(safetensors|bin|pt|pth|ckpt|pkl|pickle|npz|msgpack|h5|onnx|gguf|py|pyc)$", re.IGNORECASE
)
_DRIVE = re.compile(r"^[A-Za-z]:")


def relative_name(name: Any, where: str) -> str:
    """The name if it is a plain relative posix path inside its folder, else FormatError."""
    if not isinstance(name, str):
        raise FormatError(f"{where}: file name {name!r} is not a string")
    parts = PurePosixPath(name).parts
    try:
        name.encode()
    except UnicodeEncodeError:
        raise FormatError(f"{where}: file name {name!r} is not UTF-8") from None
    safe = (
        name
        and parts
        and not name.startswith("/")
        and not _DRIVE.match(name)
        and not any(c == "\\" or ord(c) < 32 or ord(c) == 127 for c in name)
        and "/".join(parts) == name
        and not any(part in (".", "..") for part in parts)
    )
    if not safe:
        raise FormatError(
            f"{where}: file name {name!r} is not a plain relative path inside the folder"
        )
    return name


def regular_file(path: Path, root: Path) -> None:
    """Refuse what is not a regular file of this folder.

    A link counts as one if it resolves to a file in the sibling `blobs` folder of a Hub cache
    snapshot (.../snapshots/REVISION), as the Hub's own cache stores it.
    """
    for folder in path.relative_to(root).parents:
        if folder.name and (root / folder).is_symlink():
            raise FormatError(f"{root / folder} is a link to a folder; copy the folder itself")
    if path.is_symlink():
        blobs = root.absolute().parent.parent / "blobs"
        in_cache = root.absolute().parent.name == "snapshots"
        try:
            target = path.resolve()
        except RuntimeError:  # a loop
            target = path
        if not (in_cache and target.parent == blobs.resolve()):
            raise FormatError(
                f"{path} is a link to {os.readlink(path)}, outside the folder; copy the file itself"
            )
        if not target.is_file():
            raise FormatError(f"{path} is a link to {target}, which is missing; fetch it again")
    elif not path.is_file():
        raise FormatError(f"{path} is missing or not a regular file")


def read_document(path: Path) -> bytes:
    """A small file's bytes; FormatError for pipes, devices and what is too large for a document."""
    if not path.is_file():
        what = "not a regular file" if path.exists() else "missing"
        raise FormatError(f"{path} is {what}")
    size = path.stat().st_size
    if size > MAX_DOCUMENT:
        raise FormatError(f"{path} has {size} bytes, expected at most {MAX_DOCUMENT}")
    return path.read_bytes()


def files_below(root: Path) -> list[str]:
    """Relative names of all files and links below a folder, sorted, less the Hub's own cache."""
    names = []
    for folder, folders, files in os.walk(root):
        base = Path(folder)
        links = [name for name in folders if (base / name).is_symlink()]
        names += [(base / name).relative_to(root).as_posix() for name in files + links]
    return sorted(name for name in names if not name.startswith(HUB_CACHE + "/"))


def sha256_file(path: Path, advance: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file, 64 hex digits. advance is called with the bytes read since last time."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if advance is not None:
                advance(count)
    return digest.hexdigest()


def sha256_files(
    folder: Path, names: Iterable[str], advance: Callable[[int], None] | None = None
) -> dict[str, str]:
    """sha256_file of each name in a folder, several at a time; ends soon after an error."""
    names, stop = list(names), threading.Event()

    def step(count: int) -> None:
        if stop.is_set():
            raise InterruptedError
        if advance is not None:
            advance(count)

    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        try:
            digests = pool.map(lambda name: sha256_file(folder / name, step), names)
            return dict(zip(names, digests, strict=True))
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def partial_name(path: Path) -> Path:
    """The name under which a file is written before it is renamed into place."""
    return path.with_name(path.name + ".partial")


def write_file(path: Path, data: bytes) -> None:
    """Write a file beside its place, sync it and rename it."""
    write_pieces(path, [data])


def write_pieces(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file piece by piece beside its place, sync it and rename it."""
    partial = partial_name(path)
    try:
        with naming(partial), partial.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an OSError that names no file, such as a full disk's, the name of the one written."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def make_folder(folder: Path) -> list[Path]:
    """Make a folder and those above it, durably. Returns the new ones, the deepest first."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in made:
        sync_folder(path.parent)
    return made


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
