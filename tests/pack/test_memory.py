"""What a process keeps of freed memory, in processes of their own."""

import ctypes
import subprocess
import sys
import textwrap

import pytest

CHILD = """
    import sys, torch
    from qsrt_pack.memory import give_back_what_is_freed

    def resident():
        lines = open("/proc/self/status").read().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) >> 10

    if sys.argv[1] == "given back":
        give_back_what_is_freed()
    for _ in range(3):
        torch.ones(8 << 20, dtype=torch.uint8)  # freed, it raises glibc's limit
    before, kept = resident(), []
    large = []
    for _ in range(64):
        large.append(torch.ones(4 << 20, dtype=torch.uint8))
        kept.append(torch.ones(1 << 19, dtype=torch.uint8))  # too large for holes below
    assert resident() - before > 200
    large.clear()
    print(resident() - before - 32)  # without the kept
"""


def kept_of_freed(what: str) -> int:
    """Megabytes that stay resident after 256 of them are freed."""
    run = [sys.executable, "-c", textwrap.dedent(CHILD), what]
    return int(subprocess.run(run, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="no mallopt")
def test_freed_memory_goes_back() -> None:
    if kept_of_freed("as it comes") < 200:
        pytest.skip("this C library gives it back without being told")
    assert kept_of_freed("given back") < 30
