"""Loading against a plain pinned copy of the same bytes, and a model's memory in transformers.

    python tests/bench/bench_load.py [--layers 16] [--geometry 1024,512,256] [--sweep] [--drop]

Layers of 256 experts of 1024 x 512 by default, from random words. The page cache is warm, and
pinned memory is there from the run before. Prints medians.
--drop: the page cache holds the files as the first load's checks read them, as it does from the day
after a conversion on, not as they were written, an expert at a time: its pages are larger.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from packages import write_package
from transformers import AutoConfig, AutoModelForCausalLM

import qsrt_runtime.integrations.transformers  # noqa: F401
from qsrt_runtime import load_package, reader
from qsrt_runtime.format.geometry import Geometry

REPEATS = 5


def say(*parts: object) -> None:
    sys.stdout.write(" ".join(map(str, parts)) + "\n")
    sys.stdout.flush()


def median_s(run: Callable[[], float]) -> tuple[float, float, float]:
    """Median, least and most of the seconds that run() returns; one run more goes first."""
    run()
    times = [run() for _ in range(REPEATS)]
    return statistics.median(times), min(times), max(times)


def pinned_copy(size: int) -> Callable[[], float]:
    """Copy `size` bytes, pinned once, into GPU memory that is there already."""
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True).random_()
    target = torch.empty(size, dtype=torch.uint8, device="cuda")

    def run() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    return run


def load(path: Path, verify: str) -> float:
    """Seconds that load_package reports for bringing the layers to the GPU."""
    return load_package(path, device="cuda", verify=verify).load_s


def drop_pages(folder: Path) -> None:
    """Take the files of a folder out of the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def report(what: str, size: int, seconds: tuple[float, float, float], plain: float) -> None:
    median, least, most = seconds
    say(
        f"{what:34} {size / median / 1e9:6.1f} GB/s  {plain / median:5.2f} of the copy  "
        f"({1e3 * median:.1f} ms, {1e3 * least:.1f} to {1e3 * most:.1f})"
    )


def bench_load(path: Path, sweep: bool) -> None:
    first = load_package(path, device="cuda")
    size = first.load_bytes
    say(
        f"{size / 1e9:.3f} GB in {len(first.layers)} layers; first load: "
        f"checks {first.verify_s:.2f} s, loading {first.load_s:.2f} s"
    )
    del first
    seconds = median_s(pinned_copy(size))
    report("plain pinned copy", size, seconds, seconds[0])
    plain = seconds[0]
    report("load_package", size, median_s(lambda: load(path, "once")), plain)
    start = time.perf_counter()
    load_package(path, device="cuda")
    say(f"load_package, call to return, all documents: {time.perf_counter() - start:.3f} s")
    if sweep:
        bench_sweep(path, size, plain)


def bench_sweep(path: Path, size: int, plain: float) -> None:
    for threads, mib in product((16, 12, 8, 4, 1), (2, 4, 8)):
        with patch.multiple(reader, THREADS=threads, PART=mib << 20):
            seconds = median_s(lambda: load(path, "once"))
        report(f"{threads} threads, parts of {mib} MiB", size, seconds, plain)
    with patch.object(reader, "library", lambda: None):
        report("the caller's thread alone", size, median_s(lambda: load(path, "once")), plain)


def bench_memory(path: Path, geometry: Geometry) -> None:
    """Peak GPU memory of from_pretrained against what bfloat16 experts would take."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, device_map="cuda")
    held, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    experts = model.config.num_hidden_layers * geometry.experts * geometry.weights_per_expert
    say(
        f"transformers, {model.config.num_hidden_layers} layers: {held / 1e9:.3f} GB held, "
        f"{peak / 1e9:.3f} GB at the peak; bfloat16 experts alone {2 * experts / 1e9:.3f} GB"
    )
    ids = torch.randint(1, 60, (1, 8), device="cuda")
    say("generated", model.generate(ids, max_new_tokens=4, do_sample=False).shape)


def model_package(path: Path, geometry: Geometry, layers: int) -> Path:
    """A package with the carried tensors of a Qwen3-MoE of these experts."""
    names = {"hidden_size": geometry.hidden, "moe_intermediate_size": geometry.intermediate}
    sizes = names | {"num_experts": geometry.experts, "num_hidden_layers": layers}
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=64,
        head_dim=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        **sizes,
    )
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    base = {
        name: (0.05 * torch.randn(tensor.shape)).to(torch.bfloat16)
        for name, tensor in state.items()
        if ".experts." not in name
    }
    return write_package(path, geometry, layers=tuple(range(layers)), topk=8, base=base)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--geometry", default="1024,512,256")
    parser.add_argument("--sweep", action="store_true", help="try other sizes and ways too")
    parser.add_argument("--drop", action="store_true", help="as read by checks, not as written")
    arguments = parser.parse_args()
    geometry = Geometry(*map(int, arguments.geometry.split(",")))
    say(torch.cuda.get_device_name(), "torch", torch.__version__)
    folder = Path(tempfile.mkdtemp())
    try:
        path = model_package(folder / "package", geometry, arguments.layers)
        if arguments.drop:
            drop_pages(path)
        bench_load(path, arguments.sweep)
        bench_memory(path, geometry)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
