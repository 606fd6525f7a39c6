"""Threads in C that read files: reader.c, compiled once for this user, and called by ctypes.

The interpreter's lock is what threads of Python lose a third of a load to, see
tests/bench/results/load_h200.txt. Kernels need a C compiler too, for what Triton makes to launch
them; where there is none, SlowReader reads.
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
from contextlib import suppress
from pathlib import Path

import torch

from qsrt_runtime.cache import cache_folder
from qsrt_runtime.format.errors import FormatError

SOURCE = Path(__file__).with_name("reader.c")
THREADS = min(12, os.cpu_count() or 1)
PART = 4 << 20  # bytes that a thread reads at once
logger = logging.getLogger(__name__)


class _Part(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("start", "size", "stride", "first", "count")),
        ("target", ctypes.c_void_p),
    )


class Reader:
    """Reads what is added to memory of a device, beside the interpreter; not without `library`.

    Raises RuntimeError where no thread can be started, or no driver of the device is found.
    """

    def __init__(self, device: torch.device) -> None:
        self._library, self._memory = library(), None
        self._paths: dict[int, Path] = {}
        self._outs: list[torch.Tensor] = []  # which callers may let go of
        address = None
        if device.type == "cuda":
            size = THREADS * self._constant("reader_buffers") * PART
            self._memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            address = self._memory.data_ptr()
        self._reader = self._library.reader_start(THREADS, PART, address, device.index or 0)
        if not self._reader:
            raise RuntimeError(
                f"no thread starts that reads to {device}, or no driver of it is found"
            )

    def _constant(self, name: str) -> int:
        return ctypes.c_int32.in_dll(self._library, name).value

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
        try:
            self._library.reader_end(self._reader, found)
            failure, number, file = found
            if not (tell and failure):
                return
            if failure == self._constant("reader_cuda_failed"):
                raise RuntimeError(f"the CUDA driver reports {number} on a copy")
            if failure == self._constant("reader_short_file"):
                raise _cut_short(self._paths[file], file)
            raise OSError(number, os.strerror(number), str(self._paths[file]))
        finally:
            for file in self._paths:
                os.close(file)
            self._outs, self._memory = [], None


def reader_for(device: torch.device) -> "Reader | SlowReader":
    """The quickest that this machine can have."""
    if library():
        try:
            return Reader(device)
        except RuntimeError as error:
            logger.warning("files are read by one thread, slowly: %s", error)
    return SlowReader(device)


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


@functools.cache
def library() -> ctypes.CDLL | None:
    """reader.c, compiled unless it was before; None where that is not possible."""
    machine = (platform.machine(), *platform.libc_ver())
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join(machine).encode()).hexdigest()
    try:
        kept = cache_folder("native") / f"{key}.so"
    except RuntimeError:
        kept = None
    with suppress(OSError):
        if kept and kept.is_file():
            return _typed(ctypes.CDLL(str(kept)))
    try:
        with tempfile.TemporaryDirectory() as folder:
            made = _compiled(Path(folder))
            with suppress(OSError):  # where it cannot be kept it is for this process
                if kept:
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    made = _copied(made, kept)
            return _typed(ctypes.CDLL(str(made)))
    except (OSError, RuntimeError) as error:
        logger.warning("files are read by one thread, slowly: %s", error)
        return None


def _copied(path: Path, to: Path) -> Path:
    """A file at another place too, where it is whole or not there."""
    with tempfile.TemporaryDirectory(dir=to.parent) as folder:
        os.replace(shutil.copy(path, folder), to)
    return to


def _compiled(folder: Path) -> Path:
    """reader.c as a library in a folder; RuntimeError says what the compiler says."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    compiler = compiler or shutil.which("clang")
    if not compiler:
        raise RuntimeError("no C compiler is found: install one, or name it in CC")
    made = folder / "reader.so"
    options = ("-O2", "-shared", "-fPIC", "-pthread", "-o", str(made), str(SOURCE), "-ldl")
    try:
        command = [*compiler.split(), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise RuntimeError(f"{compiler}: {error.strerror}") from None
    if done.returncode:
        raise RuntimeError(f"{compiler}: {done.stderr.strip() or done.returncode}")
    return made


def _typed(found: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number = ctypes.c_void_p, ctypes.c_int
    found.reader_start.argtypes = (number, ctypes.c_int64, pointer, number)
    found.reader_start.restype = pointer
    found.reader_add.argtypes = (pointer, ctypes.POINTER(_Part))
    found.reader_wait.argtypes = (pointer,)
    found.reader_end.argtypes = (pointer, ctypes.POINTER(ctypes.c_int32))
    found.reader_end.restype = None
    return found
