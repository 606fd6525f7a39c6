"""Threads in C that read files: reader.c, compiled once for this user, and called by ctypes.

The interpreter's lock is what threads of Python lose a third of a load to, see
tests/bench/results/load_h200.txt. Kernels need a C compiler too, for what Triton makes to launch
them; where there is none, staging.py reads by itself.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from qsrt_runtime.cache import cache_folder
from qsrt_runtime.format.errors import FormatError

SOURCE = Path(__file__).with_name("reader.c")
THREADS = min(12, os.cpu_count() or 1)
PART = 4 << 20  # bytes that a thread reads at once
_CUDA_FAILED, _SHORT_FILE = 2, 3  # failures, see reader.c
logger = logging.getLogger(__name__)


class _Part(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("start", "size", "stride", "first", "count")),
        ("target", ctypes.c_void_p),
    )


class Reader:
    """Reads what is added to memory of a device, beside the interpreter; not without `library`."""

    def __init__(self, device: torch.device) -> None:
        self._library, self._memory = library(), None
        self._paths: dict[int, Path] = {}
        self._outs: list[torch.Tensor] = []  # which callers may let go of
        address = None
        if device.type == "cuda":
            torch.cuda.init()
            buffers = ctypes.c_int32.in_dll(self._library, "reader_buffers").value
            size = THREADS * buffers * PART
            self._memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            address = self._memory.data_ptr()
        with _current(device):
            self._reader = self._library.reader_start(THREADS, PART, address)
        if not self._reader:
            raise RuntimeError(f"no thread can be started that reads to {device}")

    def add(self, path: Path, start: int, size: int, stride: int, out: torch.Tensor) -> None:
        """Rows of `size` bytes that begin at start, start + stride, ... of a file to all of `out`.

        out: contiguous; nothing else uses it until the end.
        """
        file = os.open(path, os.O_RDONLY)
        self._paths[file] = path
        self._outs.append(out)
        part = _Part(file, start, size, stride, 0, out.nbytes, out.data_ptr())
        if not self._library.reader_add(self._reader, part):
            raise MemoryError

    def wait(self) -> None:
        """Until all is read, or some could not be; an interrupt is heard meanwhile."""
        while not self._library.reader_wait(self._reader):
            pass

    def end(self, tell: bool) -> None:
        """Drop what is not being read, and let go of threads and files.

        Where asked to, raises OSError or FormatError of the first part that could not be read.
        """
        found = (ctypes.c_int32 * 3)()
        self._library.reader_end(self._reader, found)
        failure, number, file = found
        try:
            if tell and failure == _CUDA_FAILED:
                raise RuntimeError(f"the CUDA driver reports {number} on a copy")
            if tell and failure == _SHORT_FILE:
                raise _cut_short(self._paths[file], file)
            if tell and failure:
                raise OSError(number, os.strerror(number), str(self._paths[file]))
        finally:
            for file in self._paths:
                os.close(file)


class SlowReader:
    """As Reader, by the caller's thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._added: list[tuple[Path, int, int, int, int, torch.Tensor]] = []

    def add(self, path: Path, start: int, size: int, stride: int, out: torch.Tensor) -> None:
        self._added.append((path, os.open(path, os.O_RDONLY), start, size, stride, out))

    def wait(self) -> None:
        buffer = torch.empty(PART, dtype=torch.uint8, device="cpu")
        for path, file, start, size, stride, out in self._added:
            rows = out.view(-1, size) if size else out
            for row in range(len(rows)):
                for first in range(0, size, PART):
                    part = rows[row, first : first + PART]
                    memory = part if self.device.type == "cpu" else buffer[: len(part)]
                    _read(path, file, start + row * stride + first, memory)
                    if memory is not part:
                        part.copy_(memory)

    def end(self, _tell: bool) -> None:
        for _, file, *_ in self._added:
            os.close(file)


def _read(path: Path, file: int, start: int, memory: torch.Tensor) -> None:
    """Fill contiguous CPU memory from an open file."""
    view = memoryview((ctypes.c_char * memory.nbytes).from_address(memory.data_ptr())).cast("B")
    while len(view):
        try:
            count = os.preadv(file, [view], start)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        if not count:
            raise _cut_short(path, file)
        view, start = view[count:], start + count


def _cut_short(path: Path, file: int) -> FormatError:
    end = os.fstat(file).st_size
    return FormatError(f"{path} ends at byte {end}; it was cut short while read")


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Where a device's CUDA context is this thread's."""
    if device.type == "cpu":
        return nullcontext()
    torch.empty(1, device=device)  # which makes the context, if it was not there
    return torch.cuda.device(device)


@functools.cache
def library() -> ctypes.CDLL | None:
    """reader.c, compiled unless it was before; None where that is not possible."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    compiler = compiler or shutil.which("clang")
    key = hashlib.sha256(SOURCE.read_bytes() + platform.machine().encode()).hexdigest()
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = _kept(f"{key}.so")
            if path is None or not path.is_file():
                if compiler is None:
                    raise RuntimeError("no C compiler is found: install one, or name it in CC")
                path = _compiled(compiler, path or Path(folder) / "reader.so")
            return _typed(ctypes.CDLL(str(path)))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        logger.warning("files are read by one thread, slowly: %s", error)
        return None


def _kept(name: str) -> Path | None:
    """The file in the user's cache; None without one that can be written to."""
    try:
        folder = cache_folder("native")
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder / name if os.access(folder, os.W_OK) else None


def _compiled(compiler: str, path: Path) -> Path:
    """Compile to a path, which is whole or not there."""
    options = ("-O2", "-shared", "-fPIC", "-pthread")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [*compiler.split(), *options, "-o", str(made), str(SOURCE), "-ldl"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"{compiler}: {error.stderr.strip()}") from None
        os.replace(made, path)
    return path


def _typed(found: ctypes.CDLL) -> ctypes.CDLL:
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    found.reader_start.argtypes, found.reader_start.restype = (ctypes.c_int, size, pointer), pointer
    found.reader_add.argtypes = (pointer, ctypes.POINTER(_Part))
    found.reader_wait.argtypes = (pointer,)
    found.reader_end.argtypes = (pointer, ctypes.POINTER(ctypes.c_int32))
    found.reader_end.restype = None
    return found
