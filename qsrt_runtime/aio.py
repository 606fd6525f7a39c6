"""Reads of files that go on by themselves, without the interpreter's lock: glibc's POSIX AIO.

Threads of glibc's own do the reads, at most 20 in a process, and end a second after the last one.
Reads of one descriptor follow one another there, so that each Reading has a duplicate of its own.
"""

import ctypes
import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

THREADS = 20  # of glibc's, at most
NO_SIGNAL = 1  # SIGEV_NONE

_first_user: int | None = None  # the process that read first, perhaps a parent of this one


class _Request(ctypes.Structure):
    """struct aiocb of glibc where pointers have 64 bits, the same on all processors."""

    _fields_ = (
        ("descriptor", ctypes.c_int),
        ("operation", ctypes.c_int),
        ("priority", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("event_value", ctypes.c_void_p),
        ("event_signal", ctypes.c_int),
        ("event_kind", ctypes.c_int),
        ("event_rest", ctypes.c_char * 48),
        ("internal", ctypes.c_char * 32),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_char * 32),
    )


@dataclass(frozen=True)
class _Functions:
    """Those of glibc. All but aio_suspend return at once, and keep the interpreter's lock."""

    aio_read: Any
    aio_suspend: Any
    aio_error: Any
    aio_return: Any


def _functions() -> _Functions | None:
    """None where the C library is not glibc, of which alone the struct is known."""
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    try:
        library, locked = ctypes.CDLL("librt.so.1"), ctypes.PyDLL("librt.so.1")
        library.gnu_get_libc_version  # noqa: B018, musl answers to librt.so.1 too
        found = _Functions(
            locked.aio_read, library.aio_suspend, locked.aio_error, locked.aio_return
        )
    except (OSError, AttributeError):
        return None
    pointer = ctypes.c_void_p
    found.aio_read.argtypes = found.aio_error.argtypes = found.aio_return.argtypes = (pointer,)
    found.aio_suspend.argtypes = (pointer, ctypes.c_int, pointer)
    found.aio_return.restype = ctypes.c_ssize_t
    return found


_GLIBC = _functions()


def is_available() -> bool:
    """Whether this can read: not in a child forked after the first Reading, without its threads."""
    return _GLIBC is not None and _first_user in (None, os.getpid())


class Reading:
    """Pieces (start, size) of a file, on their way into memory from `start` to `wait`."""

    def __init__(self, pieces: Sequence[tuple[int, int]]) -> None:
        self._requests = (_Request * len(pieces))()
        for request, (start, size) in zip(self._requests, pieces, strict=True):
            request.offset, request.size, request.event_kind = start, size, NO_SIGNAL
        self._lane: int | None = None

    def start(self, descriptor: int, address: int) -> None:
        """Let the pieces go one behind the other from an address on.

        The memory, and this, must stay until `wait` has returned, even if an interrupt ends this.
        """
        global _first_user
        _first_user = os.getpid()
        with suppress(OSError):  # too many open files
            self._lane = os.dup(descriptor)
        for request in self._requests if self._lane is not None else ():
            request.descriptor, request.buffer = self._lane, address
            if _GLIBC.aio_read(ctypes.addressof(request)):  # no memory for it, or no thread
                break
            address += request.size

    def wait(self) -> list[int]:
        """Wait, and return how many bytes of each piece are there, from its start on.

        Fewer than its size where the file ends, and where a read failed or could not be asked for;
        reading on tells which. May be called again, as after an interrupt.
        """
        places = [ctypes.addressof(request) for request in self._requests]
        for place in places:
            _wait(place)
        lane, self._lane = self._lane, None
        if lane is not None:
            os.close(lane)
        return [max(0, _GLIBC.aio_return(place)) for place in places]


def _wait(place: int) -> None:
    """Until the request there is done, whatever signals come."""
    listed = ctypes.c_void_p(place)
    while _GLIBC.aio_error(place) == errno.EINPROGRESS:
        _GLIBC.aio_suspend(ctypes.byref(listed), 1, None)
