"""Which packages were verified before, so that a second load need not read every byte twice.

A stamp is one small file in the user's cache, outside the package. It holds a digest over the
seal and over size, modification time and inode of every file, so that a file which was replaced
or written to since makes it void. It is a convenience for a folder that its owner trusts; who
does not trust the folder's time stamps verifies always.
"""

import fcntl
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import qsrt_runtime
from qsrt_runtime.cache import cache_folder
from qsrt_runtime.format import schema
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.manifest import CHECKSUMS, MARKER
from qsrt_runtime.format.package import Package

logger = logging.getLogger(__name__)


def fingerprint(package: Package) -> str:
    """64 hex digits over the seal and over what the file system says of each file now."""
    stats = {}
    for name in (*package.digests, CHECKSUMS, MARKER):
        try:
            found = (package.path / name).stat()
        except OSError as error:
            raise FormatError(f"{package.path / name}: {error.strerror}") from None
        stats[name] = [found.st_size, found.st_mtime_ns, found.st_dev, found.st_ino]
    return schema.digest(
        {"version": qsrt_runtime.__version__, "seal": package.seal_sha256, "files": stats}
    )


def was_verified(package: Package, found: str) -> bool:
    """Whether `remember` was called for the package with this fingerprint."""
    try:
        return _stamp(package).read_text() == found
    except (OSError, ValueError, RuntimeError):
        return False


@contextmanager
def one_at_a_time(package: Package) -> Iterator[None]:
    """Wait for another process that verifies the package; not where there is no cache."""
    try:
        lock = _stamp(package).with_suffix(".lock")
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    except (OSError, RuntimeError):
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def remember(package: Package, found: str) -> None:
    """Note that all checks passed. A cache that cannot be written costs the next load time."""
    try:
        stamp = _stamp(package)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=stamp.parent) as folder:
            (Path(folder) / "stamp").write_text(found)
            os.replace(Path(folder) / "stamp", stamp)
    except (OSError, RuntimeError) as error:
        logger.warning("%s will be verified again next time: %s", package.path, error)


def _stamp(package: Package) -> Path:
    """The package's stamp; RuntimeError where it would lie inside the package."""
    path, folder = package.path.resolve(), cache_folder("verified").resolve()
    if path == folder or path in folder.parents:
        raise RuntimeError(f"the cache {folder} lies inside the package")
    return folder / hashlib.sha256(os.fsencode(path)).hexdigest()
