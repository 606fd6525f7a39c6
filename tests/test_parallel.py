"""Ranks of torch.distributed: the example, which loads a share on each and sums their outputs."""

import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from packages import write_package

from qsrt_runtime.format.geometry import Geometry, extent
from qsrt_runtime.load import load_package

# What C++ says of a thread that nobody joined. On a busy machine torch 2.13 does that now and then
# to a process that leaves a gloo group; Python code, all there is of ours here, cannot.
ABORTED = "terminate called without an active exception"


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """Two layers of 4 experts of 3 pairs."""
    path = tmp_path_factory.mktemp("parallel") / "package"
    return write_package(path, Geometry(128, 768, 4), layers=(0, 1))


def torchrun(repository, ranks, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(ranks), str(repository / "examples/parallel_experts.py")]
    environment = os.environ | {"PYTHONPATH": str(repository), "CUDA_VISIBLE_DEVICES": ""}
    for _ in range(3):
        ran = subprocess.run(
            [*command, *map(str, arguments)], env=environment, capture_output=True, text=True
        )
        if ABORTED not in ran.stderr:
            break
    return ran


def share_bytes(geometry, layers, slots, experts):
    """What a rank reads: format bytes, three scale vectors an expert, and its bundles."""
    small = len(experts) * (1 + 3 * 2 * geometry.hidden)
    width = len(experts) * geometry.bundle_bytes
    if len(experts) == geometry.experts:
        width = geometry.slot_stride(geometry.experts)
    return layers * (small + slots * width)


def check(repository, path, ranks, by):
    whole = load_package(path)
    geometry, layers = whole.geometry, len(whole.layers)
    expected = {}
    for rank in range(ranks):
        slots, experts = geometry.slots, range(geometry.experts)
        if by == "pairs":
            slots = 8 * len(extent(geometry.pairs, ranks, rank))
        else:
            experts = extent(geometry.experts, ranks, rank)
        expected[rank] = share_bytes(geometry, layers, slots, experts)
    ran = torchrun(repository, ranks, path, "--by", by)
    assert ran.returncode == 0, ran.stderr
    lines = re.findall(r"rank (\d+): (\d+) bytes", ran.stdout)
    assert {int(rank): int(count) for rank, count in lines} == expected
    assert max(expected.values()) < whole.load_bytes
    found = re.search(r"(\d+) layers, relative difference (\S+)", ran.stdout)
    assert int(found[1]) == layers
    assert float(found[2]) < 1e-5


@pytest.mark.parametrize("by", ["pairs", "experts"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_add_up(repository, package, ranks, by):  # RT-11a
    check(repository, package, ranks, by)


@pytest.mark.parametrize(("ranks", "by"), [(2, "pairs"), (3, "experts")])
def test_ranks_add_up_trained(repository, trained, ranks, by):
    check(repository, trained[1], ranks, by)


def test_more_ranks_than_pairs(repository, package):  # RT-11a
    ran = torchrun(repository, 4, package)
    assert ran.returncode == 1
    assert "world_size is 4; experts of 768 channels have 3 pairs" in ran.stderr


def test_the_rank_is_what_the_caller_says(package, monkeypatch):  # RT-11b
    monkeypatch.setenv("RANK", "0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layers = load_package(package, rank=1, world_size=3).layers
    finally:
        dist.destroy_process_group()
    whole = load_package(package).layers
    for number, layer in layers.items():
        assert layer.slots == range(8, 16)
        assert torch.equal(layer.atoms, whole[number].atoms[8:16])
