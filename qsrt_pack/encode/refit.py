"""Scales of least error for a matrix whose tiles are coded.

With Z the decoded matrix less one of its scale vectors, H and G the second moments of either side
and W the target, the error tr((W - W')^T H (W - W') G) is quadratic in that vector.
"""

import torch

from qsrt_pack.encode.ordered import one_thread

_RIDGE = 1e-3  # of the mean diagonal, towards the scales that the tiles were coded for
_LARGEST = torch.finfo(torch.float16).max
_FARTHEST = 2.0  # factor by which a scale may change


@one_thread()
def output_scales(
    scaled: torch.Tensor, target: torch.Tensor, svh: torch.Tensor, inputs: torch.Tensor
) -> torch.Tensor:
    """svh [N] of least error, each column by itself.

    scaled: [K, N], the decoded matrix with suh and without svh.   target: [K, N].
    svh: [N], as it was.   inputs: [K, K].
    """
    weighted = inputs @ scaled
    fitted = (weighted * target).sum(0) / (weighted * scaled).sum(0)
    return _near(fitted, svh)


@one_thread()
def input_scales(
    scaled: torch.Tensor,
    target: torch.Tensor,
    suh: torch.Tensor,
    inputs: torch.Tensor,
    outputs: torch.Tensor | None = None,
) -> torch.Tensor:
    """suh [K] of least error: (H o Z G Z^T) s = diag(H W G Z^T), solved near s as it was.

    scaled: [K, N], the decoded matrix with svh and without suh.   target: [K, N].
    suh: [K], as it was.   inputs: [K, K].   outputs: [N, N], None for the identity.
    """
    across = scaled if outputs is None else scaled @ outputs
    matrix = (inputs * (across @ scaled.T)).double()
    wanted = (inputs * (across @ target.T)).double().sum(1)
    ridge = _RIDGE * matrix.diagonal().mean()
    if not ridge > 0:
        return suh
    matrix.diagonal().add_(ridge)
    fitted = torch.linalg.solve(matrix, wanted + ridge * suh.double())
    return _near(fitted.float(), suh)


def _near(fitted: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """The fitted scales where they are finite and of the size and sign of those before."""
    ratio = fitted / before
    good = (ratio > 1 / _FARTHEST) & (ratio < _FARTHEST) & (fitted.abs() <= _LARGEST)
    return torch.where(good, fitted, before)
