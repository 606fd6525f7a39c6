"""Importance order of the intermediate channels, in groups of four.

The least important channels come first and land in low-rate records; the most important come
last. w1, w3 and w2 of one expert share the order, so the expert's function does not change.
"""

import torch

from qsrt_pack.encode.ordered import ordered_mean_square, ordered_sum

GROUP = 4
LEAST = -1.0  # score of a channel of padding, below all others


def weight_scores(w1: torch.Tensor, w3: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """Score of each channel without calibration: [I] float64.

    w1, w3: [I, H], w2: [H, I] float32. The sum over the matrices of the channel's mean square
    over the matrix's; a matrix of zeros adds nothing.
    """
    score = torch.zeros(w1.shape[0], dtype=torch.float64, device=w1.device)
    for by_channel in (w1, w3, w2.T):
        power = ordered_mean_square(by_channel)
        mean = ordered_sum(power) / len(power)
        score += power / mean.clamp_min(torch.finfo(torch.float64).tiny)
    return score


def activation_scores(middle: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Score of each channel from routed rows: [I] float64.

    middle: [rows, I], the activation between the matrices.   gates: [rows], route weights.
    The mean square of a channel weighted by gate squared.
    """
    weights = gates.double().square()
    return weights @ middle.double().square() / weights.sum()


def low_to_high_groups(scores: torch.Tensor) -> torch.Tensor:
    """Group numbers by ascending score, equal ones in their old order: [I/4] int64."""
    return torch.sort(ordered_sum(scores.unflatten(0, (-1, GROUP))), stable=True).indices


def channels_of_groups(groups: torch.Tensor) -> torch.Tensor:
    """The channels of groups in order: [I/4] -> [I] int64."""
    return (groups[:, None] * GROUP + torch.arange(GROUP, device=groups.device)).flatten()
