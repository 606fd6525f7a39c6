"""Host memory of the process."""

import ctypes

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's mallopt
_BYTES = 1 << 20


def give_back_what_is_freed() -> None:
    """Let tensors of a megabyte and more go back to the system once they are freed.

    glibc raises that limit to 32 MB as it runs, and keeps what is smaller as fragments of its heap:
    converting experts of 2048 x 768 then takes twice the memory. For the whole process; other C
    libraries have no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _BYTES)
