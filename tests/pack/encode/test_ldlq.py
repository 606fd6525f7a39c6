from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qsrt_pack.encode import ldlq as module
from qsrt_pack.encode.ldlq import DAMPING, feedback_factor, ldlq_two_sided, rotate_hessian
from qsrt_pack.encode.lockstep import serve

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def data(golden: Path) -> Tensors:
    return load_file(golden / "encoder_math.safetensors")


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def ldlq(weight: torch.Tensor, factor: torch.Tensor | None, quantize: Callable) -> torch.Tensor:
    return serve(module.ldlq(weight, factor), quantize)


def halves(_rows: slice, values: torch.Tensor) -> torch.Tensor:
    """The stand-in quantizer of the golden data."""
    return (2 * values).round().div(2).clamp(-4, 4)


def proxy(weight: torch.Tensor, quantized: torch.Tensor, hessian: torch.Tensor) -> float:
    """The part of the weight's energy under a Hessian that its error has."""
    energies = []
    for matrix in (weight - quantized, weight):
        rows = matrix.double()
        energies.append(float((rows * (hessian.double() @ rows)).sum()))
    return energies[0] / energies[1]


def random_hessian(size: int, rows: int = 512) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, size, generator=generator) * torch.linspace(0.1, 3, size)
    return x.T @ x / rows


def damped(hessian: torch.Tensor, rounds: int) -> torch.Tensor:
    """The diagonal grown once by damping times its mean, then by twice that, rounds times."""
    mean = float(hessian.diagonal().mean())
    return hessian + torch.eye(len(hessian)) * mean * DAMPING * (1 + 2 * rounds)


def test_rotate_hessian_is_the_published_one(data: Tensors) -> None:
    rotated = rotate_hessian(data["ldl.hessian"], data["ldl.su_signs"])
    assert relative(damped(rotated, 0), data["ldl.rotated"]) < 1e-6


def test_rotate_hessian_keeps_the_error() -> None:
    # Rows e of an error seen through x: x e = (x diag(suh) B) (B diag(1/suh) e).
    suh = torch.linspace(-2, 2, 256)
    hessian, error = random_hessian(256), torch.randn(256, 8)
    block = torch.linalg.multi_dot  # a float64 check without the fast transform
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(7):
        top = torch.cat([hadamard, hadamard], 1)
        hadamard = torch.cat([top, torch.cat([hadamard, -hadamard], 1)])
    rotation = torch.block_diag(hadamard, hadamard) / 128**0.5
    scales = torch.diag(suh.double())
    decoded = scales @ rotation @ error.double()
    expected = block([decoded.T, hessian.double(), decoded])
    found = block([error.double().T, rotate_hessian(hessian, suh).double(), error.double()])
    assert relative(found, expected) < 1e-6


def test_feedback_factor_is_the_published_one(data: Tensors) -> None:
    # The golden Hessian is damped already.
    factor = feedback_factor(data["ldl.rotated"], 0.0)
    assert relative(factor, data["ldl.unit_block_l_zero_diagonal"]) < 1e-6
    rotated = rotate_hessian(data["ldl.hessian"], data["ldl.su_signs"])
    # Its condition number, 56, multiplies the 3e-7 that the rotations differ by.
    assert relative(feedback_factor(rotated), data["ldl.unit_block_l_zero_diagonal"]) < 1.7e-5
    other = feedback_factor(rotated, 2 * DAMPING)
    assert relative(other, data["ldl.unit_block_l_zero_diagonal"]) > 1e-3


@pytest.mark.parametrize("size", [16, 32, 128])
def test_feedback_factor_is_unit_block_lower(size: int) -> None:
    hessian = random_hessian(size)
    before = hessian.clone()
    factor = feedback_factor(hessian)
    assert torch.equal(hessian, before)
    blocks = factor.unflatten(1, (-1, 16)).unflatten(0, (-1, 16)).transpose(1, 2)
    for row in range(size // 16):
        assert not blocks[row, row:].any()
    # L D L^T is the damped Hessian, D block diagonal.
    lower = (factor + torch.eye(size)).double()
    inverse = torch.linalg.inv(lower)
    middle = inverse @ damped(before, 0).double() @ inverse.T
    places = torch.arange(size) // 16
    outside = middle[places[:, None] != places]
    assert outside.norm() < 1e-5 * middle.norm()


@pytest.mark.parametrize(("least", "rounds"), [(-0.01, 0), (-0.03, 1), (-0.32, 6), (-0.52, 10)])
def test_damping_is_raised_until_it_succeeds(least: float, rounds: int) -> None:
    # The smallest eigenvalue, in units of the mean; the first round adds 0.025, others 0.05.
    eigenvalues = torch.full([64], (64 - least) / 63)
    eigenvalues[0] = least
    basis = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))[0]
    hessian = basis @ torch.diag(eigenvalues) @ basis.T
    expected = feedback_factor(damped(hessian, rounds), 0.0)
    assert relative(feedback_factor(hessian), expected) < 1e-4


def test_a_hessian_beyond_damping_is_refused() -> None:
    with pytest.raises(ValueError, match="not positive definite after 10 rounds"):
        feedback_factor(-torch.eye(32))


def test_a_hessian_of_zeros_feeds_nothing_back() -> None:
    assert not feedback_factor(torch.zeros(32, 32)).any()


def test_a_hessian_of_few_rows_is_damped() -> None:
    assert torch.isfinite(feedback_factor(random_hessian(256, rows=3))).all()


def test_ldlq_is_the_published_one(data: Tensors, facts: dict) -> None:
    weight, factor = data["reg.regularized"], data["ldl.unit_block_l_zero_diagonal"]
    with_feedback = ldlq(weight, factor, halves)
    assert torch.equal(with_feedback, data["ldlq.standin_quantized"])
    expected = facts["encoder_math"]["ldlq_standin_proxy"]
    hessian = data["ldl.rotated"]
    found = proxy(weight, with_feedback, hessian)
    assert found == pytest.approx(expected["with_feedback"], rel=1e-6)
    found = proxy(weight, ldlq(weight, None, halves), hessian)
    assert found == pytest.approx(expected["without_feedback"], rel=1e-6)


def test_without_a_factor_all_rows_go_at_once() -> None:
    weight, calls = torch.randn(48, 32), []

    def quantize(rows: slice, values: torch.Tensor) -> torch.Tensor:
        calls.append(rows)
        return halves(rows, values)

    assert torch.equal(ldlq(weight, None, quantize), halves(slice(0), weight))
    assert calls == [slice(0, 48)]
    ldlq(weight, torch.zeros(48, 48), quantize)
    assert calls[1:] == [slice(32, 48), slice(16, 32), slice(0, 16)]


def test_a_factor_of_zeros_feeds_nothing_back() -> None:
    weight = torch.randn(48, 32)
    assert torch.equal(ldlq(weight, torch.zeros(48, 48), halves), halves(slice(0), weight))


def test_an_exact_quantizer_returns_the_weight() -> None:
    weight = torch.randn(64, 32)
    factor = feedback_factor(random_hessian(64))
    assert torch.equal(ldlq(weight, factor, lambda _rows, values: values), weight)


def run_two_sided(weight, inputs, outputs, quantize):
    steps, values, seen = ldlq_two_sided(weight, inputs, outputs), None, []
    while True:
        try:
            i, j, targets = steps.send(values)
        except StopIteration as end:
            return end.value, seen
        seen += zip(i.tolist(), j.tolist(), strict=True)
        values = quantize(targets)


def moment(size, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(3 * size, size, generator=generator) * torch.linspace(0.2, 2, size)
    return rows.T @ rows / len(rows) + 0.5


def test_two_sides_take_every_tile_once_and_lower_the_joint_error():
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    both = moment(96, 1), moment(64, 2)
    inputs, outputs = (feedback_factor(one, 0.01) for one in both)

    def quantize(targets):
        return (2 * targets).round() / 2

    def error(quantized):
        left = weight - quantized
        return float(torch.trace(both[0] @ left @ both[1] @ left.T))

    found, seen = run_two_sided(weight, inputs, outputs, quantize)
    assert sorted(seen) == [(i, j) for i in range(6) for j in range(4)]
    none = torch.zeros_like(inputs), torch.zeros_like(outputs)
    one_sided = run_two_sided(weight, inputs, none[1], quantize)[0]
    other_side = run_two_sided(weight, none[0], outputs, quantize)[0]
    assert error(found) < 0.75 * min(error(one_sided), error(other_side))
    assert max(error(one_sided), error(other_side)) < error(quantize(weight))


@pytest.mark.parametrize("sizes", [(96, 64), (16, 64), (64, 16), (16, 16)])
def test_two_sides_without_the_second_are_one(sizes):
    weight = torch.randn(*sizes, generator=torch.Generator().manual_seed(0))
    factor = feedback_factor(moment(sizes[0], 1))
    expected = ldlq(weight, factor, lambda _rows, values: values.round())
    found, _ = run_two_sided(weight, factor, torch.zeros(sizes[1], sizes[1]), torch.round)
    torch.testing.assert_close(found, expected)


def test_two_sides_leave_an_exact_matrix_alone():
    weight = torch.randint(-5, 5, (32, 48)).float()
    factors = feedback_factor(moment(32, 1)), feedback_factor(moment(48, 2))
    assert torch.equal(run_two_sided(weight, *factors, torch.round)[0], weight)
