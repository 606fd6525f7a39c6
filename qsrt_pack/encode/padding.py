"""Zeros behind the channels of experts whose sizes no package stores as they are."""

from collections.abc import Mapping

import torch

from qsrt_runtime.format.geometry import Geometry, TrueSizes


def pad(x: torch.Tensor, *sizes: int, value: float = 0.0) -> torch.Tensor:
    """A tensor with each axis lengthened at its end to one of some sizes, by a value."""
    if x.shape == sizes:
        return x
    larger = x.new_full(sizes, value)
    larger[tuple(slice(size) for size in x.shape)] = x
    return larger


def sizes_of(w1: torch.Tensor) -> TrueSizes:
    """The sizes of an expert by its gate matrix [I, H]."""
    return TrueSizes(hidden=w1.shape[1], intermediate=w1.shape[0])


def pad_matrices(
    weights: Mapping[str, torch.Tensor], geometry: Geometry
) -> dict[str, torch.Tensor]:
    """w1 and w3 [I, H], w2 [H, I], at the sizes of a geometry; gate and up each end with zeros."""
    hidden, intermediate = geometry.hidden, geometry.intermediate
    return {
        name: pad(w, *((hidden, intermediate) if name == "w2" else (intermediate, hidden)))
        for name, w in weights.items()
    }


def unpad_matrices(
    weights: Mapping[str, torch.Tensor], sizes: TrueSizes
) -> dict[str, torch.Tensor]:
    """The inverse of pad_matrices, of channels in the source's order."""
    hidden, intermediate = slice(sizes.hidden), slice(sizes.intermediate)
    return {
        name: w[hidden, intermediate] if name == "w2" else w[intermediate, hidden]
        for name, w in weights.items()
    }
