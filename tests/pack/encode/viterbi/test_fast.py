import pytest
import torch

from qsrt_pack.encode.viterbi.cpu import search_cpu
from qsrt_pack.encode.viterbi.fast import search_fast
from qsrt_runtime.format import codebook

SCALES = {2: 1.5, 3: 1.46, 4: 1.4}


def normal(n, bits, seed=0):
    return torch.randn(n, 256, generator=torch.Generator().manual_seed(seed)) * SCALES[bits]


def squared_error(targets, edges, bits):
    """Of each tile, from closed paths: the newest 16 bits at each position, around."""
    states = sum(edges.long().roll(i, 1) << (i * bits) for i in range(-(-16 // bits)))
    return (codebook.values(bits)[states & 0xFFFF] - targets).square().sum(1, dtype=torch.float64)


@pytest.mark.parametrize(("bits", "factor"), [(2, 1.19), (3, 1.31), (4, 1.29)])
def test_error_is_near_the_least(bits, factor):
    targets = normal(64, bits)
    exact = squared_error(targets, search_cpu(targets, bits), bits)
    fast = squared_error(targets, search_fast(targets, bits), bits)
    # On 512 tiles the ratio is 1.149, 1.241 and 1.171, and a tile's varies by 7%, 10% and 19%:
    # four times that, over the root of 64, is added.
    assert exact.sum() < fast.sum() < exact.sum() * factor


@pytest.mark.parametrize("bits", codebook.BITS)
def test_circles_close(bits):
    # Where a circle is closed badly, about 5 positions have random values, each some 2 from its
    # target: around the closing the mean error would be several times that of the whole.
    targets = normal(64, bits)
    edges = search_fast(targets, bits)
    states = sum(edges.long().roll(i, 1) << (i * bits) for i in range(-(-16 // bits)))
    distance = (codebook.values(bits)[states & 0xFFFF] - targets).square()
    around = distance.roll(-128, 1)[:, 96:160].mean() / distance.mean()
    assert around < 2


@pytest.mark.parametrize("bits", codebook.BITS)
def test_a_tile_depends_on_nothing_else(bits):
    targets = normal(67, bits)
    targets[1] = 0
    targets[2] *= 1e14
    whole = search_fast(targets, bits)
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    again = search_fast(targets.flip(0), bits).flip(0)
    torch.set_num_threads(threads)
    assert torch.equal(whole, again)


@pytest.mark.parametrize("n", [0, 1, 3, 17])
@pytest.mark.parametrize("bits", codebook.BITS)
def test_shape_and_range(n, bits):
    edges = search_fast(normal(n, bits), bits)
    assert edges.shape == (n, 256)
    assert edges.dtype == torch.uint8
    assert (edges < 1 << bits).all()


@pytest.mark.parametrize("bits", codebook.BITS)
@pytest.mark.parametrize("value", [0.0, 0.75, -7.0, 1e6, 9e14, 1e-30])
def test_constant_tiles_are_near_the_least(bits, value):
    targets = torch.full((1, 256), value)
    exact = squared_error(targets, search_cpu(targets, bits), bits)
    fast = squared_error(targets, search_fast(targets, bits), bits)
    assert fast <= exact * 1.5 + 256 * 0.02


@pytest.mark.parametrize("bits", codebook.BITS)
def test_recovers_after_a_quiet_half(bits):
    targets = normal(16, bits)
    targets[:, :128] = 0
    exact = squared_error(targets, search_cpu(targets, bits), bits)
    fast = squared_error(targets, search_fast(targets, bits), bits)
    assert fast.sum() < exact.sum() * 1.6


def test_refuses_what_the_reference_refuses():
    with pytest.raises(ValueError, match="bits is 5"):
        search_fast(torch.zeros(1, 256), 5)
    with pytest.raises(ValueError, match=r"expected \[n, 256\]"):
        search_fast(torch.zeros(1, 255), 3)
    with pytest.raises(ValueError, match=r"expected torch\.float32"):
        search_fast(torch.zeros(1, 256, dtype=torch.float64), 3)
    with pytest.raises(ValueError, match="NaN"):
        search_fast(torch.full((1, 256), torch.nan), 3)


def test_refuses_another_device():
    with pytest.raises(ValueError, match="expected the CPU"):
        search_fast(torch.empty(1, 256, device="meta"), 3)
