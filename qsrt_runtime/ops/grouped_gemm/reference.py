"""Rows times their expert's matrix in plain torch."""

import torch


def grouped_gemm_reference(
    rows: torch.Tensor, weights: torch.Tensor, experts: list[int]
) -> torch.Tensor:
    """[R, N] float32: each row [R, K] times the matrix of its expert, of [E, N, K] float32."""
    return torch.stack([w @ row for row, w in zip(rows.float(), weights[experts], strict=True)])
