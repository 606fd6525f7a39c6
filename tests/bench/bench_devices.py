"""A conversion on one GPU and on two: the same bytes, how much sooner, and when one of them fails.

    python tests/bench/bench_devices.py [--experts 16] [--layers 2] [--folder FOLDER]

Converts a synthetic checkpoint of GLM-like experts, 6144 x 2048, 75 MB each, with --devices 0,
with --devices 0,1 and by two of torchrun's ranks; seconds are from start to end of the command,
with kernels compiled before, and those that it states for the layers. Then with --devices 0,1 where
GPU 1 has an error in the last layer (a failed assertion on the device, after which CUDA gives it
nothing but errors), and continues.
Exits 1 where bytes differ or the failing conversion does not end as it should.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench_encode import WEIGHTS, write_model

from qsrt_runtime.format.paths import sha256_file

ROOT = Path(__file__).resolve().parents[2]
HERE = (sys.executable, "-m", "qsrt_pack")
FAILING = """
import torch
from qsrt_pack import produce
from qsrt_pack.cli import main

real = produce._encode

def encode(settings, layer, weights, *rest):
    device = next(iter(weights.values()))["w1"].device
    if layer == {layer} and device.index == 1:
        torch._assert_async(torch.zeros(1, device=device))
    return real(settings, layer, weights, *rest)

produce._encode = encode
main()
"""


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def convert(
    model: Path, out: Path, *options: str, program: tuple[str, ...] = HERE
) -> tuple[float, float]:
    """Seconds of a convert, and of its layers alone; exits where it fails."""
    command = [*program, "convert", str(model), str(out), "--overwrite", *options]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command} ended with {done.returncode}: {done.stderr[-2000:]}")
    seconds = time.perf_counter() - start
    return seconds, sum(map(float, re.findall(r"^layer \d+: .* ([\d.]+) s$", done.stderr, re.M)))


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256_file(path) for path in files}


def compare(model: Path, folder: Path, weights: int) -> tuple[bool, dict[str, str]]:
    """Time the three ways; whether their bytes are the same, and the first way's digests."""
    ranks = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m")
    ways = {
        "--devices 0": (("--devices", "0"), HERE),
        "--devices 0,1": (("--devices", "0,1"), HERE),
        "two ranks": ((), (*ranks, "qsrt_pack")),
    }
    found, seconds = {}, {}
    for name, (options, program) in ways.items():
        out = folder / name.replace(" ", "")
        seconds[name] = convert(model, out, *options, program=program)
        found[name] = digests(out)
        whole, layers = seconds[name]
        one_whole, one_layers = seconds["--devices 0"]
        say(
            f"{name:14} {whole:6.1f} s ({one_whole / whole:.2f} times), its layers alone "
            f"{layers:6.1f} s, {weights / layers / 1e6:6.1f} million weights a second "
            f"({one_layers / layers:.2f} times)"
        )
    first = found["--devices 0"]
    same = all(each == first for each in found.values())
    say(f"{len(first)} files: {'the same bytes by all ways' if same else 'BYTES DIFFER'}")
    return same, first


def failing(model: Path, out: Path, last: int, expected: dict[str, str]) -> bool:
    """Convert with a second GPU that fails in the last layer, then without it."""
    arguments = ("convert", str(model), str(out), "--devices")
    command = [sys.executable, "-c", FAILING.format(layer=last), *arguments, "0,1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    say(f"GPU 1 fails: exit code {done.returncode}, standard error ends with")
    say("\n".join("    " + line for line in done.stderr.strip().splitlines()[-4:]))
    last_line = done.stderr.strip().rpartition("\n")[2]
    stated = "device-side assert" in last_line and f"{last} of {last + 1} layers are" in last_line
    clean = done.returncode == 1 and not out.exists() and stated and "Traceback" not in done.stderr
    command = [*HERE, *arguments, "0"]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    same = done.returncode == 0 and digests(out) == expected
    say(
        f"continued in {time.perf_counter() - start:.1f} s: exit code {done.returncode}, "
        f"{'the same bytes' if same else 'NOT THE SAME BYTES'}"
    )
    return clean and same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--layers", type=int, default=2)
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        convert(write_model(folder / "few", 2), folder / "first", "--devices", "0,1")  # compiles
        model = write_model(folder / "model", arguments.experts, arguments.layers)
        same, expected = compare(model, folder, arguments.layers * arguments.experts * WEIGHTS)
        ended = failing(model, folder / "failing", arguments.layers - 1, expected)
    return int(not (same and ended))


if __name__ == "__main__":
    sys.exit(main())
