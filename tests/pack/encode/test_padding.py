import pytest
import torch

from qsrt_pack.encode.padding import pad, pad_matrices, sizes_of, unpad_matrices
from qsrt_runtime.format.geometry import TrueSizes


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("value", "shape"), [(0.0, (3,)), (-1.0, (3,)), (0.0, (3, 2))])
def test_pad(value: float, shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    larger = pad(x, *(size + 4 for size in shape), value=value)
    assert torch.equal(larger[tuple(slice(size) for size in shape)], x)
    assert int((larger == value).sum()) == larger.numel() - x.numel()


def test_what_fits_is_not_copied() -> None:
    x = normal(3, 2)
    assert pad(x, 3, 2) is x


@pytest.mark.parametrize("size", [(704, 96), (1, 1), (256, 128), (257, 129)])
def test_matrices_there_and_back(size: tuple[int, int]) -> None:
    weights = {"w1": normal(*size), "w3": normal(*size), "w2": normal(*size[::-1])}
    sizes = sizes_of(weights["w1"])
    assert sizes == TrueSizes(hidden=size[1], intermediate=size[0])
    padded = pad_matrices(weights, sizes.padded(1))
    for name, matrix in padded.items():
        geometry = sizes.padded(1)
        shape = (geometry.intermediate, geometry.hidden)
        assert matrix.shape == (shape[::-1] if name == "w2" else shape)
        assert int((matrix != 0).sum()) == int((weights[name] != 0).sum())
    restored = unpad_matrices(padded, sizes)
    assert all(torch.equal(restored[name], weight) for name, weight in weights.items())
