"""Expanded layers: words decoded once to E4M3 labels, which take their place in memory."""

from dataclasses import replace

import torch

from qsrt_runtime.format import labels as layouts
from qsrt_runtime.format import slab
from qsrt_runtime.weights import LayerWeights

KNOWN = ("e4m3",)  # what an expansion may be to


def check_expand(expand: str | None) -> None:
    """Refuse an expansion that is not known."""
    if expand is not None and expand not in KNOWN:
        raise ValueError(f"expand is {expand!r}, expected None or one of {KNOWN}")


def expanded(layer: LayerWeights) -> LayerWeights:
    """The same experts with a byte for each weight, the very values that the words decode to.

    Its traits are known (weights.traits_of), which refuses X4T experts. By kernels on CUDA.
    """
    labels = expand_by_kernels(layer) if layer.atoms.is_cuda else slab.expand(layer)
    return replace(layer, atoms=slab.without_words(layer), labels=labels)


def expand_by_kernels(layer: LayerWeights) -> torch.Tensor:
    """As slab.expand, in two launches."""
    from qsrt_runtime.launching import ways  # brings triton
    from qsrt_runtime.ops.expand import expand

    device, experts = layer.atoms.device, range(layer.geometry.experts)
    labels = torch.empty(layer.label_bytes, dtype=torch.uint8, device=device)
    every = torch.arange(len(experts) + 1, dtype=torch.int32, device=device)  # each has routes
    with torch.cuda.device_of(layer.atoms):
        for down, part in enumerate(layouts.matrices(labels)):
            expand(layer, experts, every, part, down=bool(down), by_warps=ways(device)[0])
    return labels
