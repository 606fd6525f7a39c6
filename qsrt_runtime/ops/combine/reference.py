"""The output of some tokens from the sums of down, in plain torch."""

import torch

from qsrt_runtime.format.rotation import rotate
from qsrt_runtime.weights import LayerWeights


def combine_reference(
    sums: torch.Tensor, layer: LayerWeights, experts: list[int], weights: torch.Tensor
) -> torch.Tensor:
    """sum of weight ((sums B) * svh2) over each token's routes: [T, H] float32.

    sums: [R, H] float32.   experts: of each route, none -1.   weights: [T, k].
    """
    routes = rotate(sums) * layer.shared_scales[2, experts].float()
    return (routes.unflatten(0, weights.shape) * weights.float()[..., None]).sum(1)
