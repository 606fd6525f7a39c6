"""Digests of a package's files against `sha256sum` over the same files.

    python tests/bench/bench_digests.py [FOLDER]

FOLDER: where 8 files of 256 MiB are written and removed. Medians of 5, by turns, from the page
cache; the files of a real package are as large or larger. Exits 1 beyond 1.3 times.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from qsrt_runtime.format.paths import sha256_files

FILES, MIB, TURNS, LIMIT = 8, 256, 5, 1.3


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def write_files(folder: Path) -> list[str]:
    names = [f"{number}.bin" for number in range(FILES)]
    for name in names:
        with (folder / name).open("wb") as file:
            for _ in range(MIB):
                file.write(os.urandom(1 << 20))
    return names


def main() -> int:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as room:
        folder = Path(room)
        names = write_files(folder)
        command = ["sha256sum", *names]
        listing = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        theirs = dict(line.split()[::-1] for line in listing.stdout.splitlines())
        if sha256_files(folder, names) != theirs:
            raise SystemExit("the digests differ")
        turns = []
        for _ in range(TURNS):
            theirs_s = seconds(
                lambda: subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=True)
            )
            ours_s = seconds(lambda: sha256_files(folder, names))
            one_s = seconds(lambda: [sha256_files(folder, [name]) for name in names])
            turns.append((theirs_s, ours_s, one_s))
    gb = FILES * MIB * (1 << 20) / 1e9
    theirs_s, ours_s, one_s = (statistics.median(column) for column in zip(*turns, strict=True))
    version = subprocess.run(["sha256sum", "--version"], capture_output=True, text=True, check=True)
    write = sys.stdout.write
    write(f"{gb:.2f} GB in {FILES} files, {os.cpu_count()} processors, median of {TURNS}\n")
    write(f"{gb / theirs_s:5.2f} GB/s  {version.stdout.splitlines()[0]}\n")
    for name, found in (("sha256_files", ours_s), ("the same, one file at a time", one_s)):
        write(f"{gb / found:5.2f} GB/s  {name}: {found / theirs_s:.2f} of its time\n")
    return 1 if ours_s > LIMIT * theirs_s else 0


if __name__ == "__main__":
    sys.exit(main())
