"""What moe_forward accepts: the checks that every way of running it makes first."""

import torch

from qsrt_runtime.format.geometry import SLOTS_PER_PAIR
from qsrt_runtime.weights import LayerWeights

ALIGNMENT = 16  # bytes; what a vector load wants of the slab's start

X_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_WEIGHT_DTYPES = (*X_DTYPES, torch.float64)
_ID_DTYPES = (torch.int32, torch.int64)


def check_types(**arguments: object) -> None:
    """Refuse what is no tensor, by name."""
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}, expected a torch tensor")


def padded_rows(x: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
    """Rows of the layer's width with zeros for its padding: [T, width] -> [T, H].

    Raises ValueError for another width.
    """
    if not layer.hidden_padding:
        return x  # whose width is checked with the other arguments
    if x.ndim != 2 or x.shape[1] != layer.width:
        raise ValueError(f"x has shape {list(x.shape)}, expected [T, {layer.width}]")
    return torch.nn.functional.pad(x, (0, layer.hidden_padding))


def check_arguments(
    x: torch.Tensor,
    layer: LayerWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> None:
    """Refuse shapes, dtypes, devices and a layer that do not fit; looks at no value.

    x: [T, H], padding included, see padded_rows.
    Raises TypeError for dtypes, ValueError for the rest; the argument is named.
    """
    tensors = {"x": x, "topk_ids": topk_ids, "topk_weights": topk_weights}
    if expert_map is not None:
        tensors["expert_map"] = expert_map
    check_types(**tensors)
    for name, value in tensors.items():
        if value.device != layer.atoms.device:
            raise ValueError(f"{name} is on {value.device}, the layer on {layer.atoms.device}")
    hidden = layer.geometry.hidden
    if x.ndim != 2 or x.shape[1] != hidden:
        raise ValueError(f"x has shape {list(x.shape)}, expected [T, {hidden}]")
    tokens = x.shape[0]  # len(x) would tie a compiled graph to one number of tokens
    if topk_ids.ndim != 2 or topk_ids.shape[0] != tokens or topk_ids.shape != topk_weights.shape:
        raise ValueError(
            f"topk_ids {list(topk_ids.shape)} and topk_weights {list(topk_weights.shape)} must "
            f"both be [{tokens}, k]"
        )
    if x.dtype not in X_DTYPES:
        raise TypeError(f"x is {x.dtype}, expected float32, float16 or bfloat16")
    if topk_weights.dtype not in _WEIGHT_DTYPES:
        raise TypeError(f"topk_weights is {topk_weights.dtype}, expected float16 to float64")
    for name in ("topk_ids", "expert_map"):
        if name in tensors and tensors[name].dtype not in _ID_DTYPES:
            raise TypeError(f"{name} is {tensors[name].dtype}, expected int32 or int64")
    if expert_map is not None and expert_map.ndim != 1:
        raise ValueError(f"expert_map has shape {list(expert_map.shape)}, expected [experts]")
    _check_layer(layer)


def _check_layer(layer: LayerWeights) -> None:
    """Refuse a layer whose tensors do not fit each other."""
    experts, hidden = layer.geometry.experts, layer.geometry.hidden
    whole = range(layer.slots.start, layer.slots.stop, SLOTS_PER_PAIR)
    if layer.slots.start % SLOTS_PER_PAIR or len(layer.slots) % SLOTS_PER_PAIR or not whole:
        raise ValueError(f"the layer holds {layer.slots}, not whole pairs of slots")
    rows = layer.shared_scales.shape[1] if layer.shared_scales.ndim == 3 else 0
    width = layer.atoms.shape[1] if layer.atoms.ndim == 2 else 0
    width = max(width - width % ALIGNMENT, layer.bundle_bytes)
    expected = {
        "atoms": ((len(layer.slots), width), torch.uint8),
        "format_codes": ((experts,), torch.uint8),
        "shared_scales": ((3, experts if rows != 1 else 1, hidden), torch.float16),
        "activations": ((experts,), torch.uint8),
    }
    if layer.labels is not None:
        expected["labels"] = ((layer.label_bytes,), torch.uint8)
    for name, (shape, dtype) in expected.items():
        value = getattr(layer, name)
        if value.dtype != dtype:
            raise TypeError(f"the layer's {name} are {value.dtype}, expected {dtype}")
        if tuple(value.shape) != shape:
            raise ValueError(
                f"the layer's {name} have shape {list(value.shape)}, expected {list(shape)}"
            )
        if value.device != layer.atoms.device:
            raise ValueError(
                f"the layer's {name} are on {value.device}, its slab on {layer.atoms.device}"
            )
        if name != "atoms" and not value.is_contiguous():
            raise ValueError(f"the layer's {name} must be contiguous")
    if layer.slots.start < 0 or layer.slots.stop > layer.geometry.slots or layer.layer < 0:
        raise ValueError(f"layer {layer.layer} holds {layer.slots} of {layer.geometry.slots} slots")
    if not layer.atoms.is_contiguous() or layer.atoms.storage_offset() % ALIGNMENT:
        raise ValueError(f"the layer's slab must be contiguous and start at {ALIGNMENT} bytes")
    if layer.labels is not None and layer.labels.storage_offset() % ALIGNMENT:
        raise ValueError(f"the layer's labels must start at {ALIGNMENT} bytes")


def check_ids(ids: torch.Tensor, count: int, name: str) -> None:
    """Refuse values outside -1..count-1. Reads them, and so waits for their device."""
    if ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < count:
        raise ValueError(
            f"{name} lie in {int(ids.min())}..{int(ids.max())}, expected -1..{count - 1}"
        )
