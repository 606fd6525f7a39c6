"""One matrix of 128 x 256, encoded by the fast search."""

import pytest
import torch

from qsrt_pack.encode import lockstep
from qsrt_pack.encode.incoherence import scale_search_tiles
from qsrt_pack.encode.matrix import (
    EncodedMatrix,
    Metric,
    matrix_steps,
    scale_sample,
    scale_search_weights,
)
from qsrt_pack.encode.viterbi import search
from qsrt_runtime.format import atom, decode
from qsrt_runtime.format.rates import stored_channels

HIDDEN, INTERMEDIATE = 128, 256


def encode_matrix(*arguments: object, **options: object) -> dict[int, EncodedMatrix]:
    return lockstep.run(matrix_steps(*arguments, **options), search)


def normal(*shape: int) -> torch.Tensor:
    return 0.05 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def nmse(source: torch.Tensor, decoded: torch.Tensor) -> float:
    power = source.double().square().sum()
    return float((source - decoded).double().square().sum() / power)


@pytest.mark.parametrize(("shape", "tiles"), [((128, 256), 64), ((512, 128), 112)])
def test_the_scale_is_searched_on_a_third_of_the_published_tiles(
    shape: tuple[int, int], tiles: int
) -> None:
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    every = scale_search_tiles(matrix)
    assert len(every) == tiles
    assert torch.equal(scale_sample(matrix), every[::3])
    count = -(-tiles // 3)
    assert scale_search_weights(*shape) == (256 * 10 * -(-count // 3), 256 * 5 * count)


def test_packed_bytes_decode_to_dense() -> None:
    weight = normal(INTERMEDIATE, HIDDEN)
    signs = torch.ones(INTERMEDIATE), -torch.ones(HIDDEN)
    matrices = encode_matrix(weight, "in", *signs, modes=(0, 1), method="fast")
    assert list(matrices) == [0, 1]
    for mode, bits in ((0, [3, 3]), (1, [2, 4])):
        packed = matrices[mode].packed
        assert [atom.record_bits_of(words) for words in packed.records] == bits
        decoded = decode.dense_matrix(packed, "in").T
        expected = matrices[mode].dense[stored_channels(2)]
        assert (decoded - expected).norm() <= 1e-6 * expected.norm()
        assert matrices[mode].nmse == pytest.approx(nmse(weight, matrices[mode].dense), rel=1e-6)


def test_modes_share_rotation_and_scale() -> None:
    weight = normal(HIDDEN, INTERMEDIATE)
    signs = torch.ones(HIDDEN), -torch.ones(INTERMEDIATE)
    matrices = encode_matrix(weight, "out", *signs, modes=(0, 1), method="fast")
    for mode in (0, 1):
        packed = matrices[mode].packed
        assert torch.equal(packed.suh, matrices[0].packed.suh)
        assert torch.equal(packed.svh, matrices[0].packed.svh)
        assert len(packed.svh.abs().unique()) == 1  # -1 divided by the global scale
        assert (packed.svh < 0).all()


def test_the_exact_search_is_better() -> None:
    weight = normal(HIDDEN, 128)
    signs = torch.ones(HIDDEN), torch.ones(128)
    errors = {
        method: encode_matrix(weight, "out", *signs, modes=(0,), method=method)[0].nmse
        for method in ("exact", "fast")
    }
    assert 0.0156 < errors["exact"] < 0.95 * errors["fast"]


def test_a_hessian_lowers_the_error_that_it_weighs() -> None:
    weight = normal(HIDDEN, INTERMEDIATE)
    rows = torch.randn(1024, HIDDEN, generator=torch.Generator().manual_seed(2))
    mixing = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(3))
    rows = rows * torch.linspace(0.1, 2, HIDDEN) @ mixing
    hessian = rows.T @ rows / len(rows)
    signs = torch.ones(HIDDEN), torch.ones(INTERMEDIATE)
    weighted, plain = [], []
    for given in (None, Metric(hessian)):
        matrix = encode_matrix(weight, "out", *signs, modes=(0,), method="fast", metric=given)[0]
        error = matrix.dense - weight
        weighted.append(float((error * (hessian @ error)).sum()))
        plain.append(matrix.nmse)
    assert weighted[1] < 0.8 * weighted[0]
    assert plain[1] > plain[0]  # which costs some of the error that it does not weigh
