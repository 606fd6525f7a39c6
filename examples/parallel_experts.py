"""A package's experts on several processes, each with a share of them; the outputs add up.

    torchrun --nproc_per_node 2 examples/parallel_experts.py PACKAGE [--by experts]

By pairs of intermediate channels every rank has a part of every expert (tensor parallelism), by
experts some of them whole (expert parallelism). Rank 0 loads the whole too, to compare; the
command fails where a layer's sum differs from it by more than 1e-5 (1e-2 in bfloat16, on GPUs).
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from qsrt_runtime import LoadedPackage, load_package, moe_forward
from qsrt_runtime.format.geometry import extent

TOKENS = 12


def load_share(path: Path, by: str, device: torch.device) -> LoadedPackage:
    """This rank's share of a package; nothing else of the layer files is read."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if by == "pairs":
        return load_package(path, device=device, rank=rank, world_size=world)
    experts = load_package(path, layers=[]).geometry.experts
    return load_package(path, device=device, experts=extent(experts, world, rank))


def outputs(
    package: LoadedPackage, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> dict[int, torch.Tensor]:
    """What the experts at hand give the tokens x [T, H], by layer: [T, H] float32."""
    return {
        number: moe_forward(x, layer, ids, weights, expert_map=package.expert_map).float()
        for number, layer in package.layers.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("package", type=Path)
    parser.add_argument("--by", choices=["pairs", "experts"], default="pairs")
    arguments = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if has_gpu else "gloo")
    share = load_share(arguments.package, arguments.by, device)
    sys.stdout.write(f"rank {dist.get_rank()}: {share.load_bytes} bytes of experts\n")

    generator = torch.Generator().manual_seed(0)  # the same tokens and routes on all ranks
    x = torch.randn(TOKENS, share.true_sizes.hidden, generator=generator)
    scores = torch.rand(TOKENS, share.geometry.experts, generator=generator)
    weights, ids = (value.to(device) for value in scores.topk(share.topk))
    x = x.to(device, torch.bfloat16 if has_gpu else torch.float32)
    summed = outputs(share, x, ids, weights)
    for output in summed.values():
        dist.all_reduce(output)

    worst = 0.0
    if dist.get_rank() == 0:
        whole = outputs(load_package(arguments.package, device=device), x, ids, weights)
        errors = [(summed[n] - whole[n]).norm() / whole[n].norm() for n in whole]
        worst = max(error.item() for error in errors)
        sys.stdout.write(f"{len(errors)} layers, relative difference {worst:.1e}\n")
    dist.barrier()  # none leaves while another is still at work
    dist.destroy_process_group()
    return int(not worst < (1e-2 if has_gpu else 1e-5))


if __name__ == "__main__":
    sys.exit(main())
