import threading

import numpy as np
import pytest
import torch

from qsrt_pack.encode.viterbi.threads import over_tiles


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("n", [0, 1, 5, 11])
def test_every_tile_once_and_in_place(n, threads):
    sizes = []

    def search_tiles(targets, edges):
        sizes.append(len(targets))
        edges[:] = targets

    targets = torch.arange(n, dtype=torch.float32)[:, None].expand(n, 256)
    assert torch.equal(over_tiles(search_tiles, targets, 5), targets.to(torch.uint8))
    assert sum(sizes) == n
    assert len(sizes) >= min(n, threads)
    assert max(sizes, default=0) <= 5


def test_chunks_run_at_the_same_time():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    both, passed = threading.Barrier(2, timeout=20), []  # broken if one comes alone
    try:
        over_tiles(lambda targets, edges: passed.append(both.wait()), torch.zeros(2, 256), 1)
    finally:
        torch.set_num_threads(before)
    assert sorted(passed) == [0, 1]


def test_an_error_comes_through(threads):
    def search_tiles(targets, edges):
        raise RuntimeError("cannot search")

    with pytest.raises(RuntimeError, match="cannot search"):
        over_tiles(search_tiles, torch.zeros(4, 256), 1)


def test_edges_are_uint8(threads):
    edges = over_tiles(lambda targets, edges: edges.fill(3), torch.zeros(2, 256), 1)
    assert edges.dtype == torch.uint8
    assert np.array_equal(edges.numpy(), np.full((2, 256), 3, np.uint8))
