import numpy as np
import pytest
import torch

from qsrt_pack.encode.viterbi import reference
from qsrt_pack.encode.viterbi.reference import search_reference
from qsrt_runtime.format import codebook

SCALES = {2: 1.5, 3: 1.46, 4: 1.4}


@pytest.fixture(autouse=True)
def one_thread():
    """Many small operations: with threads they wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def normal(n, bits, seed=0):
    return torch.randn(n, 256, generator=torch.Generator().manual_seed(seed)) * SCALES[bits]


def states(edges, bits):
    """The 16 newest bits at each position, around the circle, from the bit stream itself."""
    shifts = np.arange(bits - 1, -1, -1)
    stream = (edges[:, None] >> shifts & 1).ravel()
    ends = np.arange(1, 257) * bits
    window = stream[(ends[:, None] - 16 + np.arange(16)) % len(stream)]
    return window @ (1 << np.arange(15, -1, -1))


def squared_error(target, edges, bits):
    values = codebook.values(bits).numpy().astype(np.float64)
    return ((target - values[states(edges, bits)]) ** 2).sum()


def one_pass(target, cost, bits):
    """Costs of all nodes after the last step, and the 16-bit state by which each was reached."""
    values, nodes = codebook.values(bits).numpy(), 1 << (16 - bits)
    node, reached = np.arange(nodes), []
    for x in target:
        least = np.full(nodes, np.inf, np.float32)
        state = np.zeros(nodes, np.int64)
        for oldest in range(1 << bits):
            candidate = node + oldest * nodes
            total = cost[candidate >> bits] + (x - values[candidate]) ** 2
            better = total < least
            least[better], state[better] = total[better], candidate[better]
        cost = least
        reached.append(state)
    return cost, reached


def search_plainly(target, bits):
    """The two passes for one tile, node by node in numpy; also the cost found."""
    cost, reached = one_pass(np.roll(target, 128), np.zeros(1 << (16 - bits), np.float32), bits)
    boundary = int(cost.argmin())
    for state in reached[:127:-1]:
        boundary = int(state[boundary]) >> bits
    start = np.full_like(cost, np.inf)
    start[boundary] = 0
    cost, reached = one_pass(target, start, bits)
    node, edges = boundary, []
    for state in reached[::-1]:
        edges.append(node % (1 << bits))
        node = int(state[node]) >> bits
    assert node == boundary
    return np.array(edges[::-1], np.uint8), cost[boundary]


@pytest.mark.parametrize("bits", codebook.BITS)
def test_equals_a_plain_dynamic_program(bits):
    target = normal(1, bits, seed=bits)
    edges, cost = search_plainly(target[0].numpy(), bits)
    found = search_reference(target, bits)
    assert found.dtype == torch.uint8
    assert np.array_equal(found[0].numpy(), edges)
    # The circle closes: read from the bit stream, the path costs what the search says, to the
    # rounding of 256 float32 additions.
    assert squared_error(target[0].numpy(), edges, bits) == pytest.approx(cost, rel=256 * 2**-24)


@pytest.mark.parametrize("bits", codebook.BITS)
def test_no_single_edge_can_be_improved(bits):
    target = normal(1, bits, seed=10 + bits)
    edges = search_reference(target, bits)[0].numpy()
    target = target[0].numpy()
    least = squared_error(target, edges, bits)
    # The last 16-bits bits are the boundary's, which the second pass does not choose.
    for position in range(0, 256 - -(-(16 - bits) // bits), 5):
        for edge in range(1 << bits):
            changed = edges.copy()
            changed[position] = edge
            assert squared_error(target, changed, bits) >= least * (1 - 256 * 2**-24)


def test_ties_go_to_the_smallest_predecessor():
    # All targets far above the codebook: equal costs abound where only the rounded square counts.
    target = torch.full((1, 256), 1e9)
    edges, _ = search_plainly(target[0].numpy(), 2)
    assert np.array_equal(search_reference(target, 2)[0].numpy(), edges)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_chunks_do_not_matter(n, monkeypatch):
    targets = normal(n, 4)
    whole = search_reference(targets, 4)
    monkeypatch.setattr(reference, "_CHUNK", 2)
    assert torch.equal(search_reference(targets, 4), whole)
    assert whole.shape == (n, 256)


@pytest.mark.parametrize("bits", [1, 5, 3.5, None])
def test_refuses_other_rates(bits):
    with pytest.raises(ValueError, match=r"expected one of \(2, 3, 4\)"):
        search_reference(torch.zeros(1, 256), bits)


@pytest.mark.parametrize("shape", [(256,), (1, 255), (1, 16, 16), (256, 1)])
def test_refuses_other_shapes(shape):
    with pytest.raises(ValueError, match=r"expected \[n, 256\]"):
        search_reference(torch.zeros(shape), 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_refuses_other_dtypes(dtype):
    with pytest.raises(ValueError, match=r"expected torch\.float32"):
        search_reference(torch.zeros(1, 256, dtype=dtype), 3)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e15])
def test_refuses_values_without_a_cost(value):
    targets = torch.zeros(3, 256)
    targets[2, 255] = value
    with pytest.raises(ValueError, match="source weight or scale"):
        search_reference(targets, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_gpu_finds_the_same_edges(bits):
    targets = 1.4 * torch.randn(9, 256, generator=torch.Generator().manual_seed(bits))
    targets[0] = 0
    found = search_reference(targets.cuda(), bits).cpu()
    assert torch.equal(found, search_reference(targets, bits))
