"""Second moments of a matrix's inputs, and their shrinkage where rows are few."""

import torch

MAX_LOCAL = 0.75  # the most that an expert's own moment counts against the identity


def second_moment(rows: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """sum g^2 x x^T / sum g^2: [d, d] float64.

    rows: [n, d], inputs of the matrix.   gates: [n], route weights.
    """
    rows, weights = rows.double(), gates.double().square()
    return (rows.T * weights) @ rows / weights.sum()


def shrink_to_identity(moment: torch.Tensor, gates: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Blend a second moment with its own scaled identity by how few rows it comes from.

    moment: [d, d] float64.   gates: [n] route weights of its rows.
    Returns (alpha moment + (1 - alpha) mu I, alpha) with mu = trace / d and alpha the lesser of
    MAX_LOCAL and 1 - rho; rho is the oracle approximating shrinkage of Chen, Wiesel, Eldar and
    Hero (2010) at Kish's effective number of rows, (sum g^2)^2 / sum g^4.
    """
    weights = gates.double().square()
    size = len(moment)
    mean = float(moment.diagonal().mean())
    effective = float(weights.sum().square() / weights.square().sum())
    square = float(moment.square().mean())
    denominator = (effective + 1) * (square - mean**2 / size)
    rho = 1.0 if denominator <= 0 else min(1.0, max(0.0, (square + mean**2) / denominator))
    alpha = min(MAX_LOCAL, 1 - rho)
    identity = torch.eye(size, dtype=moment.dtype, device=moment.device)
    return alpha * moment + (1 - alpha) * mean * identity, alpha
