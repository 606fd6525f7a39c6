"""Peak host memory of a whole conversion of a large checkpoint, on the CPU.

    python tests/bench/bench_memory.py WORK [--geometry 2048,768,128] [--layers 7] [--coded 1]

Writes a checkpoint of random bfloat16 experts to WORK (8.5 GB by default, removed at the end),
converts it in a process of its own by the fast search, and prints the peak of its resident memory.
All of it is read, hashed, scanned, measured, packed and written; of each layer the first --coded
experts are really encoded, and the others take their bytes. Resident memory counts the pages of
mapped files, libraries among them: VmHWM, which is ru_maxrss, of the process; its parts are
sampled.
"""

import argparse
import json
import multiprocessing
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import checkpoints

from qsrt_pack import job, produce
from qsrt_pack.assemble.shards import write_shards
from qsrt_pack.encode.expert import EncodedExpert, Settings
from qsrt_pack.memory import give_back_what_is_freed
from qsrt_runtime.format.geometry import TrueSizes
from qsrt_runtime.format.tensorfile import tensor_data

PARTS = ("VmRSS", "RssAnon", "RssFile")
SHARD_BYTES = 2_000_000_000
VOCABULARY = 64


def write_checkpoint(folder: Path, sizes: TrueSizes, experts: int, layers: int) -> int:
    """Random bfloat16 tensors of a Qwen3-MoE model without attention; returns their bytes."""
    folder.mkdir(parents=True)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, sizes.hidden)}
    for layer in range(layers):
        shapes[f"model.layers.{layer}.mlp.gate.weight"] = (experts, sizes.hidden)
        for expert in range(experts):
            for part in checkpoints.PARTS:
                shape = (sizes.intermediate, sizes.hidden)
                name = checkpoints.expert_key(layer, expert, part)
                shapes[name] = shape[::-1] if part == "down_proj" else shape
    generator = torch.Generator().manual_seed(0)

    def payload(name: str) -> list[bytes]:
        drawn = torch.empty(shapes[name], dtype=torch.bfloat16).normal_(
            0, 0.02, generator=generator
        )
        return [tensor_data(drawn)]

    specs = {name: ("BF16", shape) for name, shape in shapes.items()}
    index = write_shards(folder, specs, payload, SHARD_BYTES)
    config = checkpoints.config(
        hidden_size=sizes.hidden,
        moe_intermediate_size=sizes.intermediate,
        num_experts=experts,
        num_hidden_layers=layers,
        vocab_size=VOCABULARY,
    )
    (folder / checkpoints.INDEX).write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return index["metadata"]["total_size"]


def memory(*names: str) -> list[int]:
    """Bytes that /proc/self/status states."""
    lines = Path("/proc/self/status").read_text().splitlines()
    stated = dict(line.split(":", 1) for line in lines)
    return [int(stated[name].split()[0]) * 1024 for name in names]


@contextmanager
def sampled() -> Iterator[dict[str, int]]:
    """The largest of PARTS that a thread sees every few milliseconds."""
    found, ended = dict.fromkeys(PARTS, 0), Event()

    def watch() -> None:
        while not ended.wait(0.005):
            for name, size in zip(PARTS, memory(*PARTS), strict=True):
                found[name] = max(found[name], size)

    thread = Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def encode_some(coded: int) -> None:
    """Let all experts but the first few of each layer take the bytes of the one before."""
    encode, last = produce._encode, []

    def encode_or_reuse(
        settings: Settings, layer: int, weights: dict[int, Any], *more: Any
    ) -> dict[int, EncodedExpert]:
        if min(weights) < coded:
            last[:] = encode(settings, layer, weights, *more).values()
        return dict.fromkeys(weights, last[-1])

    produce._encode = encode_or_reuse


def convert(source: Path, out: Path, coded: int, results: Any) -> None:
    """Convert, and put what was measured into a queue."""
    give_back_what_is_freed()  # as the command line does
    before = memory("VmRSS")[0]
    encode_some(coded)
    start = time.perf_counter()
    prepared = job.prepare(source, out, Settings(search="fast"))
    with sampled() as parts:
        job.run(prepared, show_progress=False)
    results.put(
        {
            "before": before,
            "VmHWM": memory("VmHWM")[0],
            "ru_maxrss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            **parts,
            "plan": prepared.plan["memory_bytes"],
            "seconds": time.perf_counter() - start,
            "package": sum(path.stat().st_size for path in out.iterdir()),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--geometry", default="2048,768,128")
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--coded", type=int, default=1)
    given = parser.parse_args()
    hidden, intermediate, experts = map(int, given.geometry.split(","))
    sizes = TrueSizes(hidden, intermediate)
    source, out = given.work / "model", given.work / "model-qsrt"
    try:
        size = write_checkpoint(source, sizes, experts, given.layers)
        context = multiprocessing.get_context("spawn")
        results = context.SimpleQueue()
        child = context.Process(target=convert, args=(source, out, given.coded, results))
        child.start()
        child.join()
        if child.exitcode:
            raise SystemExit(f"the conversion ended with {child.exitcode}")
        found = results.get()
    finally:
        shutil.rmtree(source, ignore_errors=True)
        shutil.rmtree(out, ignore_errors=True)
    layer = 2 * sizes.weights_per_expert * experts
    lines = [
        f"{given.layers} layers of {experts} experts of {hidden} x {intermediate}, {size:,} bytes",
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {found['seconds']:.0f} s, "
        f"{given.coded} experts of each layer encoded; package {found['package']:,} bytes",
        f"one layer's experts in the checkpoint  {layer / 1e6:8,.0f} MB",
        f"resident before                        {found['before'] / 1e6:8,.0f} MB",
        f"peak, VmHWM                            {found['VmHWM'] / 1e6:8,.0f} MB",
        f"peak, ru_maxrss                        {found['ru_maxrss'] / 1e6:8,.0f} MB",
        f"peak of anonymous pages (sampled)      {found['RssAnon'] / 1e6:8,.0f} MB",
        f"peak of pages of files (sampled)       {found['RssFile'] / 1e6:8,.0f} MB",
        f"what the plan says                     {found['plan'] / 1e6:8,.0f} MB",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    if found["VmHWM"] > layer + 1e9:
        raise SystemExit("the peak is above a layer's experts and 1 GB")


if __name__ == "__main__":
    main()
