import itertools

import pytest
import torch
from safetensors.torch import load_file

from qsrt_pack.calibrate.hessian import (
    activation_scores,
    down_moment,
    effective_rows,
    gate_up_moment,
    layer_moment,
    output_moment,
    second_moment,
    shrink_to_identity,
)
from qsrt_pack.calibrate.statistics import PARTS, ExpertRows, gather, parts_of


@pytest.mark.parametrize("case", ["few", "many"])
def test_second_moment_and_shrinkage_are_the_golden_ones(golden, facts, case):
    data = load_file(golden / "encoder_math.safetensors")
    expected = facts["encoder_math"][f"h2_{case}"]
    rows, gates = (data[name][: expected["rows"]] for name in ("h2.rows", "h2.gates"))
    moment = second_moment(rows, gates)
    torch.testing.assert_close(moment.float(), data[f"h2_{case}.covariance"], rtol=1e-5, atol=1e-6)
    shrunk, alpha = shrink_to_identity(moment, gates, most=0.75)
    assert alpha == pytest.approx(expected["local_alpha"], rel=1e-6)
    torch.testing.assert_close(shrunk.float(), data[f"h2_{case}.shrunk"], rtol=1e-5, atol=1e-6)


def test_one_row_counts_for_nothing_of_its_own():
    gates = torch.tensor([0.5])
    shrunk, alpha = shrink_to_identity(second_moment(torch.ones(1, 4), gates), gates)
    assert alpha < 0.6
    assert torch.allclose(shrunk.diagonal(), torch.ones(4, dtype=torch.float64))


def test_an_identity_moment_stays_the_identity():
    eye = torch.eye(8, dtype=torch.float64)
    shrunk, _ = shrink_to_identity(eye, torch.ones(100))
    assert torch.allclose(shrunk, eye)


HIDDEN, INTERMEDIATE = 32, 48


def silu(gate, up):
    return torch.nn.functional.silu(gate) * up


def expert_rows(count, seed=0, gradients=False, hidden=HIDDEN):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, hidden, generator=generator) * torch.linspace(0.2, 2, hidden)
    gates = torch.rand(count, generator=generator)
    slopes = torch.randn(count if gradients else 0, hidden, generator=generator)
    return ExpertRows(rows, gates, torch.arange(count), slopes)


def matrices(seed=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    return [0.2 * torch.randn(*shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("count", [0, 1, 3, 31, 32, 4000])
def test_thin_experts_lean_on_their_layer(count):
    rows = expert_rows(count)
    prior = torch.diag(torch.linspace(3, 1, HIDDEN))
    found = gate_up_moment(rows, prior)
    effective = effective_rows(rows.gates)
    share = effective / (effective + 4 * HIDDEN)
    own = second_moment(rows.rows, rows.gates).float() if count else torch.zeros_like(prior)
    torch.testing.assert_close(found, share * own + (1 - share) * prior, rtol=1e-4, atol=1e-4)
    assert torch.linalg.eigvalsh(found.double()).min() > 0
    least, most = {0: (0, 0), 4000: (0.9, 1)}.get(count, (0, 0.25))
    assert least <= share <= most


def test_there_is_no_cliff():
    """One row more moves a thin expert's moment by little, at any count."""
    prior, rows = torch.eye(HIDDEN), expert_rows(40)
    moments = [
        gate_up_moment(
            ExpertRows(rows.rows[:n], rows.gates[:n], rows.documents[:n], rows.gradients), prior
        )
        for n in range(41)
    ]
    steps = [(b - a).norm() / a.norm() for a, b in itertools.pairwise(moments)]
    assert 0 < max(steps) < 0.25


@pytest.mark.parametrize("count", [1, 3, 31, 32, 4000])
def test_down_aims_at_the_source(count):
    w1, w3, w2 = matrices()
    noisy = tuple(w + 0.05 * torch.randn_like(w) for w in (w1, w3))
    rows = expert_rows(count)
    moment, target = down_moment(rows, (w1, w3), noisy, w2, silu)
    assert moment.shape == (INTERMEDIATE, INTERMEDIATE)
    assert torch.linalg.eigvalsh(moment.double()).min() > 0
    assert target.isfinite().all()
    held_out = expert_rows(2000, seed=5).rows
    wanted = silu(held_out @ w1.T, held_out @ w3.T) @ w2.T
    received = silu(held_out @ noisy[0].T, held_out @ noisy[1].T)
    errors = [float((received @ w.T - wanted).square().sum()) for w in (w2, target)]
    assert errors[1] < errors[0] * (0.9 if count == 4000 else 1.05)


def test_down_keeps_its_target_where_gate_and_up_are_exact():
    w1, w3, w2 = matrices()
    _, target = down_moment(expert_rows(100), (w1, w3), (w1, w3), w2, silu)
    torch.testing.assert_close(target, w2, rtol=1e-4, atol=1e-5)


def test_output_moment():
    w1, w3, _ = matrices()
    rows = expert_rows(5000, gradients=True)
    found = output_moment(rows, (w1, w3), silu)
    sizes = silu(rows.rows @ w1.T, rows.rows @ w3.T).norm(dim=1)
    slopes = rows.gradients * sizes[:, None] * rows.gates[:, None]
    expected = slopes.T @ slopes / rows.gates.square().sum()
    assert ((found - expected).norm() / expected.norm()).item() < 0.1  # but for the shrinkage
    assert output_moment(expert_rows(50), (w1, w3), silu) is None


def test_activation_scores():
    w1, w3, _ = matrices()
    rows = expert_rows(10_000)  # more than a chunk
    found = activation_scores(rows, (w1, w3), silu)
    middle = silu(rows.rows @ w1.T, rows.rows @ w3.T).double()
    weights = rows.gates.double().square()
    torch.testing.assert_close(found, weights @ middle.square() / weights.sum(), rtol=1e-5, atol=0)


def test_layer_moment_of_parts():
    routed = torch.randn(800, HIDDEN).to(torch.bfloat16)
    ids, gates = torch.zeros(800, 1, dtype=torch.int32), torch.rand(800, 1)
    layer = gather(
        routed, ids, gates, torch.arange(800), 1, limit=1, seed=0, device=torch.device("cpu")
    )
    fit = parts_of(torch.arange(800)) == 0
    for parts, chosen in ((PARTS, fit | True), (("fit",), fit)):
        found = layer_moment(layer, torch.device("cpu"), parts)
        own = second_moment(routed[chosen].float(), gates[chosen, 0]).float()
        effective = effective_rows(gates[chosen, 0])
        share = effective / (effective + 4 * HIDDEN)
        expected = share * own + (1 - share) * own.diagonal().mean() * torch.eye(HIDDEN)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
