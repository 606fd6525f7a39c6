import pytest
import torch

from qsrt_pack.encode import refit

INPUTS, OUTPUTS = 48, 32


@pytest.fixture
def matrices():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    target = draw(INPUTS, OUTPUTS)
    rows, slopes = draw(200, INPUTS), draw(200, OUTPUTS) * torch.linspace(0.3, 2, OUTPUTS)
    return target, target + 0.3 * draw(INPUTS, OUTPUTS), rows.T @ rows / 200, slopes.T @ slopes


def error(target, decoded, inputs, outputs=None):
    left = target - decoded
    across = left if outputs is None else left @ outputs
    return float((inputs @ left * across).sum())


def test_output_scales_are_least_squares(matrices):
    target, coded, inputs, _ = matrices
    before = torch.full((OUTPUTS,), 1.2)
    found = refit.output_scales(coded, target, before, inputs)
    least = error(target, coded * found, inputs)
    assert least < 0.8 * error(target, coded * before, inputs)
    for step in (0.99, 1.01):
        for column in (0, 17):
            moved = found.clone()
            moved[column] *= step
            assert error(target, coded * moved, inputs) > least


@pytest.mark.parametrize("two_sided", [False, True])
def test_input_scales_are_least_squares(matrices, two_sided):
    target, coded, inputs, outputs = matrices
    outputs = outputs if two_sided else None
    before = torch.full((INPUTS,), 1.2)
    found = refit.input_scales(coded, target, before, inputs, outputs)
    least = error(target, coded * found[:, None], inputs, outputs)
    assert least < 0.8 * error(target, coded * 1.2, inputs, outputs)
    for step in (0.97, 1.03):
        moved = found.clone()
        moved[20] *= step
        assert error(target, coded * moved[:, None], inputs, outputs) > least


def test_scales_that_mean_nothing_stay(matrices):
    target, coded, inputs, _ = matrices
    coded[:, 3] = 0  # its scale is arbitrary
    target[:, 4] = -5 * coded[:, 4]  # the fit has another sign
    target[:, 5] = 50 * coded[:, 5]  # and another size
    before = torch.ones(OUTPUTS)
    found = refit.output_scales(coded, target, before, inputs)
    assert torch.equal(found[3:6], before[3:6])
    assert not torch.equal(found, before)
    nothing = torch.zeros(INPUTS, OUTPUTS)
    before = torch.ones(INPUTS)
    assert torch.equal(refit.input_scales(nothing, target, before, inputs), before)
