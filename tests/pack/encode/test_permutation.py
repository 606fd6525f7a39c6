from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qsrt_pack.encode.permutation import (
    activation_scores,
    channels_of_groups,
    low_to_high_groups,
    weight_scores,
)
from qsrt_runtime.format.rates import stored_channels


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_activation_order_is_the_published_one(golden: Path) -> None:
    data = load_file(golden / "encoder_math.safetensors")
    scores = activation_scores(data["perm.middle"], data["perm.gates"])
    expected = data["perm.group_scores"].double()
    assert (scores.unflatten(0, (-1, 4)).mean(1) - expected).norm() < 1e-6 * expected.norm()
    channels = channels_of_groups(low_to_high_groups(scores))
    assert torch.equal(channels, data["perm.low_to_high"].long())
    assert torch.equal(channels[stored_channels(4)], data["perm.physical"].long())


def test_activation_scores_weigh_by_gate_squared() -> None:
    middle = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]])
    scores = activation_scores(middle, torch.tensor([3.0, 1.0]))
    assert scores.tolist() == [(9 * a * a + b * b) / 10 for a, b in zip(*middle, strict=True)]


def test_weight_scores_are_the_three_relative_powers() -> None:
    w1, w3, w2 = normal(256, 128), 3 * normal(256, 128, seed=1), 0.01 * normal(128, 256, seed=2)
    expected = torch.zeros(256, dtype=torch.float64)
    for matrix, channel_rows in ((w1, w1), (w3, w3), (w2, w2.T)):
        mean = float(matrix.double().square().mean())
        for channel in range(256):
            expected[channel] += float(channel_rows[channel].double().square().mean()) / mean
    found = weight_scores(w1, w3, w2)
    assert found.dtype == torch.float64
    assert torch.allclose(found, expected, rtol=1e-12)
    assert found.mean() == pytest.approx(3)


@pytest.mark.parametrize("zero", range(3))
def test_a_matrix_of_zeros_adds_nothing(zero: int) -> None:
    matrices = [normal(256, 128), normal(256, 128, seed=1), normal(128, 256, seed=2)]
    matrices[zero].zero_()
    scores = weight_scores(*matrices)
    assert torch.isfinite(scores).all()
    assert scores.mean() == pytest.approx(2)


def test_a_dead_expert_keeps_its_order() -> None:
    scores = weight_scores(torch.zeros(256, 128), torch.zeros(256, 128), torch.zeros(128, 256))
    assert torch.equal(channels_of_groups(low_to_high_groups(scores)), torch.arange(256))


def test_important_channels_come_last() -> None:
    w1, w3, w2 = normal(256, 128), normal(256, 128, seed=1), normal(128, 256, seed=2)
    loud = slice(20, 24)
    w1[loud], w3[loud], w2[:, loud] = 10 * w1[loud], 10 * w3[loud], 10 * w2[:, loud]
    groups = low_to_high_groups(weight_scores(w1, w3, w2))
    assert groups[-1] == 5
    assert sorted(groups.tolist()) == list(range(64))


def test_equal_groups_keep_their_order() -> None:
    scores = torch.tensor([2.0, 1, 2, 1, 1, 1]).repeat_interleave(4)
    scores[0], scores[1] = 1, 3  # the same mean
    assert low_to_high_groups(scores).tolist() == [1, 3, 4, 5, 0, 2]


def test_channels_of_groups() -> None:
    assert channels_of_groups(torch.tensor([2, 0])).tolist() == [8, 9, 10, 11, 0, 1, 2, 3]
