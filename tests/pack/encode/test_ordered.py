import math

import pytest
import torch

from qsrt_pack.encode.ordered import ordered_mean_square, ordered_sum


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 17, 100, 1023])
def test_sum_is_the_sum(count: int) -> None:
    x = torch.randn(3, count, generator=torch.Generator().manual_seed(count))
    expected = [math.fsum(row) for row in x.double().tolist()]
    assert ordered_sum(x).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert ordered_sum(x).dtype == torch.float64


def test_order_is_by_halves() -> None:
    # 1e17 swallows a lone 1.0; by halves the two large ones meet first.
    assert float(ordered_sum(torch.tensor([1e17, 1.0, -1e17, 1.0]))) == 2.0


def test_mean_square() -> None:
    assert float(ordered_mean_square(torch.tensor([3.0, 4.0]))) == 12.5
