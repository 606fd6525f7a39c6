import pytest
import torch

from qsrt_pack.encode.viterbi.cpu import search_cpu
from qsrt_pack.encode.viterbi.reference import search_reference
from qsrt_runtime.format import codebook

SCALES = {2: 1.5, 3: 1.46, 4: 1.4}


@pytest.fixture
def two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def normal(n, bits, seed=0):
    return torch.randn(n, 256, generator=torch.Generator().manual_seed(seed)) * SCALES[bits]


def values_at(edges, bits):
    """The decoded values of closed paths: the newest 16 bits at each position, around."""
    states = sum(edges.long().roll(i, 1) << (i * bits) for i in range(-(-16 // bits)))
    return codebook.values(bits)[states & 0xFFFF]


@pytest.fixture(scope="module", params=codebook.BITS)
def tiles(request):
    """17 tiles, hard ones first, and the reference's edges: bits, targets, edges."""
    bits = request.param
    targets = normal(17, bits)
    targets[0] = 0
    targets[1] = -0.0
    targets[2] = codebook.values(bits).max()
    targets[3] = -1.2345
    targets[4] *= 1e3
    targets[5] = 1e9
    targets[6] *= 1e-30
    targets[7, :255] = 0
    targets[8] = torch.tensor([9.0, -9.0]).repeat(128)
    targets[9] = codebook.values(bits)[1:257]
    targets[10] *= 1e14
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads would wait for each other on a busy machine
    edges = search_reference(targets, bits)
    torch.set_num_threads(threads)
    return bits, targets, edges


@pytest.mark.parametrize("n", [0, 1, 3, 17])
def test_equals_the_reference(tiles, n, two_threads):
    bits, targets, edges = tiles
    found = search_cpu(targets[:n], bits)
    assert found.dtype == torch.uint8
    assert torch.equal(found, edges[:n])


def test_strides_do_not_matter(tiles):
    bits, targets, edges = tiles
    assert torch.equal(search_cpu(targets.T.contiguous().T[::2], bits), edges[::2])


@pytest.mark.parametrize(("bits", "limit"), [(2, 0.0675), (3, 0.0171), (4, 0.00440)])
def test_error_on_normal_weights(bits, limit):
    targets = normal(64, bits)
    distance = values_at(search_cpu(targets, bits), bits) - targets
    # A tile's ratio varies by 2.4% to 3.3% (512 tiles): four times that, over the root of 64.
    assert distance.square().sum() / targets.square().sum() < limit * (1 + 4 * 0.033 / 8)


def test_refuses_what_the_reference_refuses():
    with pytest.raises(ValueError, match="bits is 5"):
        search_cpu(torch.zeros(1, 256), 5)
    with pytest.raises(ValueError, match=r"expected \[n, 256\]"):
        search_cpu(torch.zeros(1, 255), 3)
    with pytest.raises(ValueError, match=r"expected torch\.float32"):
        search_cpu(torch.zeros(1, 256, dtype=torch.float64), 3)
    with pytest.raises(ValueError, match="NaN"):
        search_cpu(torch.full((1, 256), torch.nan), 3)


def test_refuses_another_device():
    with pytest.raises(ValueError, match="expected the CPU"):
        search_cpu(torch.empty(1, 256, device="meta"), 3)
