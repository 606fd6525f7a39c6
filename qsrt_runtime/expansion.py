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


def expanded(layer: LayerWeights, labels: torch.Tensor | None = None) -> LayerWeights:
    """The same experts with a byte for each weight, the very values that the words decode to.

    layer: as stored, its traits known (weights.traits_of), which refuses X4T experts.
    labels: [layer.label_bytes] uint8 on its device, memory for them, by default new. By kernels on
    CUDA. Raises ValueError for a layer that is expanded.
    """
    if layer.labels is not None:
        raise ValueError(f"layer {layer.layer} is expanded already")
    if labels is None:
        labels = layer.atoms.new_empty(layer.label_bytes)
    expand = expand_by_kernels if layer.atoms.is_cuda else slab.expand
    expand(layer, labels)
    return replace(layer, atoms=slab.without_words(layer), labels=labels)


def expand_by_kernels(layer: LayerWeights, labels: torch.Tensor) -> None:
    """As slab.expand, in two launches; a zero's sign may be another."""
    from qsrt_runtime.launching import ways  # brings triton
    from qsrt_runtime.ops.expand import expand

    device, experts = layer.atoms.device, range(layer.geometry.experts)
    every = torch.arange(len(experts) + 1, dtype=torch.int32, device=device)  # each has routes
    with torch.cuda.device_of(layer.atoms):
        for down, part in enumerate(layouts.matrices(labels)):
            expand(layer, experts, every, part, down=bool(down), by_warps=ways(device)[0])
