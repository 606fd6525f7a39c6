"""Injects one fault into the file operations of a process. For tests: found by PYTHONPATH.

QSRT_FAULT holds JSON: `root`, the folder whose file operations count; `trace`, a file that gets
one line for each; `point`, the operation at which the fault strikes (from 1; 0 for none); and
`fault`:

kill: the process is killed before the operation.   torn: half of a write reaches the file, then
the process is killed.   power: what was not synced is lost (file contents; renames, at odd points
all but the last), then the process is killed.   eio: the operation fails once.   full: half of a
write reaches the file, and no later write succeeds, nor does closing the file.   interrupt: as
Ctrl-C does.
"""

import builtins
import errno
import io
import json
import os
import signal
from pathlib import Path

GROWING = {"open", "write", "flush", "truncate", "mkdir"}


class Faults:
    def __init__(self, root: str, trace: str, point: int, fault: str) -> None:
        self.root, self.trace, self.point, self.fault = root, trace, point, fault
        self.count, self.full = 0, False
        self.unsynced: set[int] = set()  # inodes
        self.renames: list[list] = []  # [from, to, what stood there before], not synced

    def covers(self, path: object) -> bool:
        return f"{os.fsdecode(path)}/".startswith(self.root + "/")

    def strike(self, kind: str, path: str, torn: object = None) -> None:
        """Called before each operation. torn: writes half of the data."""
        self.count += 1
        with real_open(self.trace, "a") as file:
            file.write(f"{kind} {os.path.relpath(path, self.root)}\n")
        if self.full and kind in GROWING:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.count != self.point:
            return
        if callable(torn) and self.fault in ("torn", "full"):
            torn()
        if self.fault in ("eio", "full"):
            self.full = self.fault == "full"
            number = errno.ENOSPC if self.full else errno.EIO
            raise OSError(number, os.strerror(number))
        if self.fault == "interrupt":
            signal.raise_signal(signal.SIGINT)
            return
        if self.fault == "power":
            self.lose_power()
        os.kill(os.getpid(), signal.SIGKILL)

    def lose_power(self) -> None:
        if self.point % 2:  # the disk may have written the last one before the others
            del self.renames[-1:]
        while self.renames:
            source, target, before = self.renames.pop()
            if os.path.isdir(os.path.dirname(source)) and os.path.lexists(target):
                real["rename"](target, source)
                self.moved(target, source)
                if before is not None:
                    with real_open(target, "wb") as file:
                        file.write(before)
        for folder, _, names in os.walk(self.root):
            for name in names:
                path = os.path.join(folder, name)
                if os.stat(path).st_ino in self.unsynced:
                    os.truncate(path, os.stat(path).st_size // 2)

    def moved(self, source: str, target: str) -> None:
        """Follow renames inside a folder that is renamed itself."""
        for rename in self.renames:
            for i in (0, 1):
                if rename[i].startswith(source + "/"):
                    rename[i] = target + rename[i][len(source) :]

    def synced(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        self.unsynced.discard(os.fstat(descriptor).st_ino)
        self.renames = [r for r in self.renames if os.path.dirname(r[1]) != path]


class File:
    """A file opened for writing whose operations count."""

    def __init__(self, file: io.BufferedWriter, path: str) -> None:
        self.file, self.path, self.failed = file, path, False

    def write(self, data: bytes) -> int:
        def torn() -> None:
            self.file.write(memoryview(data)[: len(data) // 2])
            self.file.flush()
            self.failed = True

        faults.strike("write", self.path, torn)
        faults.unsynced.add(os.fstat(self.file.fileno()).st_ino)
        return self.file.write(data)

    def flush(self) -> None:
        faults.strike("flush", self.path)
        self.file.flush()

    def truncate(self, size: int) -> int:
        faults.strike("truncate", self.path)
        return self.file.truncate(size)

    def __enter__(self) -> "File":
        return self

    def close(self) -> None:
        self.file.close()
        if faults.full and self.failed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> object:
        return getattr(self.file, name)


def opened(path: object, mode: str = "r", *arguments: object, **options: object) -> object:
    if isinstance(path, int) or not set(mode) & set("wax+") or not faults.covers(path):
        return real_open(path, mode, *arguments, **options)
    faults.strike("open", os.fsdecode(path))
    return File(real_open(path, mode, *arguments, **options), os.fsdecode(path))


def counted(name: str) -> object:
    """An operation on one path or two that counts."""

    def operation(path: object, *arguments: object, dir_fd: int | None = None, **options: object):
        full = os.fsdecode(path)
        if dir_fd is not None:
            full = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), full)
            options["dir_fd"] = dir_fd
        if not faults.covers(full):
            return real[name](path, *arguments, **options)
        faults.strike(name, full)
        if name in ("rename", "replace"):
            target = os.fsdecode(arguments[0])
            before = Path(target).read_bytes() if os.path.isfile(target) else None
            done = real[name](path, *arguments, **options)
            faults.moved(full, target)
            faults.renames.append([full, target, before])
            return done
        return real[name](path, *arguments, **options)

    return operation


def create(path: object, flags: int, *arguments: object, **options: object) -> int:
    if flags & os.O_CREAT and faults.covers(path):
        faults.strike("open", os.fsdecode(path))
    return real_create(path, flags, *arguments, **options)


def fsync(descriptor: int) -> None:
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    if faults.covers(path):
        faults.strike("sync", path)
    real_fsync(descriptor)
    faults.synced(descriptor)


if "QSRT_FAULT" in os.environ:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    faults = Faults(**json.loads(os.environ["QSRT_FAULT"]))
    real_open, real_create, real_fsync = builtins.open, os.open, os.fsync
    names = ("rename", "replace", "unlink", "remove", "rmdir", "mkdir", "link", "symlink")
    real = {name: getattr(os, name) for name in names}
    builtins.open = io.open = opened
    os.open, os.fsync = create, fsync
    for name in names:
        setattr(os, name, counted(name))
