"""A layer's experts on one GPU and divided among several: agreement, and speed with an all-reduce.

    torchrun --nproc_per_node 2 tests/bench/bench_ranks.py [--geometry 6144,2048,32] [--topk 8]
                                                           [--tokens 1,8,64,4096]

Rank 0 writes a package of random words; every rank loads its own pairs of it, rank 0 also the
whole. float16. Exits 1 where the ranks' sum differs from the whole by 1e-3 (relative L2). Figures
are medians of CUDA graph replays, of the slowest rank, over several sets of inputs whose experts
together are larger than L2, in microseconds a layer.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench_decode import routings, say
from packages import write_package

from qsrt_runtime import LoadedPackage, load_package, moe_forward
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.weights import LayerWeights

REPEATS = 15
LIMIT = 1e-3
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs_of(tokens: int, geometry: Geometry, topk: int) -> list[Inputs]:
    """Hidden states, ids and weights, the same on all ranks."""
    torch.manual_seed(0)
    return [
        (torch.randn(tokens, geometry.hidden).to("cuda", torch.float16), ids, weights)
        for ids, weights in routings(tokens, geometry.experts, topk, max(4, min(16, 64 // tokens)))
    ]


def forward(layer: LayerWeights, inputs: Inputs) -> torch.Tensor:
    x, ids, weights = inputs
    return moe_forward(x, layer, ids, weights)


def summed(layer: LayerWeights, inputs: Inputs) -> torch.Tensor:
    out = forward(layer, inputs)
    dist.all_reduce(out)
    return out


def replays_us(call: Callable[[Inputs], object], inputs: list[Inputs]) -> float:
    """Microseconds of one call; each timed replay follows one that brings the ranks together."""
    for some in inputs[:2]:
        call(some)
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        kept = [call(some) for some in inputs]
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(kept))
    return statistics.median(times)


def slowest(us: float, group: dist.ProcessGroup) -> float:
    found = [0.0] * dist.get_world_size()
    dist.all_gather_object(found, us, group=group)
    return max(found)


def bench(
    share: LoadedPackage, whole: LoadedPackage | None, tokens: int, group: dist.ProcessGroup
) -> bool:
    """One line of the table, on rank 0; whether the ranks' sum is the whole's output there."""
    layer = share.layers[0]
    inputs = inputs_of(tokens, share.geometry, share.topk)
    output = summed(layer, inputs[0])
    buffer = torch.zeros_like(output)
    one, difference = 0.0, 0.0
    if whole is not None:  # alone: the other ranks wait on their CPUs
        expected = forward(whole.layers[0], inputs[0]).double()
        difference = ((output.double() - expected).norm() / expected.norm()).item()
        one = replays_us(partial(forward, whole.layers[0]), inputs)
    dist.barrier(group)
    apart = slowest(replays_us(partial(forward, layer), inputs), group)
    dist.barrier(group)
    together = slowest(replays_us(partial(summed, layer), inputs), group)
    alone = slowest(replays_us(lambda _: dist.all_reduce(buffer), inputs), group)
    if whole is None:
        return True
    say(
        f"M={tokens:<4} one GPU {one:8.1f} us; {dist.get_world_size()} ranks {apart:8.1f} "
        f"({one / apart:.2f} times), with all-reduce {together:8.1f} ({one / together:.2f} times), "
        f"all-reduce alone {alone:6.1f}; relative difference {difference:.1e}"
    )
    return difference < LIMIT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--geometry", default="6144,2048,32")
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--tokens", default="1,8,64,4096")
    arguments = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = dist.new_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder, src=0, group=group)
    path = Path(folder[0]) / "package"
    try:
        if rank == 0:
            geometry = Geometry(*map(int, arguments.geometry.split(",")))
            write_package(path, geometry, topk=arguments.topk)
        dist.barrier(group)
        share = load_package(path, device=device, rank=rank, world_size=world)
        whole = load_package(path, device=device) if rank == 0 else None
        if whole is not None:
            say(
                f"{torch.cuda.get_device_name()}, torch {torch.__version__}; one GPU "
                f"{whole.load_bytes:,} bytes of experts, rank 0 of {world} {share.load_bytes:,}"
            )
        counts = map(int, arguments.tokens.split(","))
        same = [bench(share, whole, count, group) for count in counts]
        dist.barrier(group)
    finally:
        if rank == 0:
            shutil.rmtree(folder[0])
    dist.destroy_process_group()
    return int(not all(same))


if __name__ == "__main__":
    sys.exit(main())
