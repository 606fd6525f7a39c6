"""W4A16 or W4A8: the one place that decides what the rows of a call's products are.

W4A16 rounds them to x's type, W4A8 to E4M3 with a power of two for each 32 channels (mxfp8), which
alone costs 4.8e-2 of a layer's output.
"""

import torch

from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import FEW_TOKENS

ACTIVATIONS = ("a16", "a8", "auto")
_DTYPES = (torch.float16, torch.bfloat16)
CAPABILITY = (8, 9)  # the first whose tensor cores take E4M3
# Capabilities where W4A8 is quicker than W4A16, and up to how many tokens. What fills it is a run
# of `bench_decode.py --a8` on such a GPU that shows it; none has yet.
QUICKER: dict[tuple[int, int], int] = {}


def arithmetic_of(activation: str, x: torch.Tensor, layer: LayerWeights) -> str:
    """Of a call, "a16" or "a8".   activation: one of these, or "auto", which takes the quicker.

    Raises ValueError as check_activation, and for "a8" on an expanded layer.
    """
    check_activation(activation, x)
    if layer.labels is not None:
        if activation == "a8":
            raise ValueError("activation 'a8' takes layers as stored, this one is expanded")
        return "a16"
    if activation != "auto":
        return activation
    is_there = QUICKER and x.device.type == "cuda" and x.dtype in _DTYPES
    return "a8" if is_there and len(x) <= QUICKER.get(_capability(x.device), 0) else "a16"


def check_known(activation: str) -> None:
    """Refuse what is no activation, by ValueError."""
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, expected 'a16', 'a8' or 'auto'")


def check_activation(activation: str, x: torch.Tensor) -> None:
    """Refuse what is no activation, and a call that W4A8 is not for, by ValueError.

    W4A8 is for float16 and bfloat16, up to FEW_TOKENS tokens, and GPUs of CAPABILITY or newer; on
    a CPU the reference runs it.
    """
    check_known(activation)
    if activation != "a8":
        return
    if x.dtype not in _DTYPES:
        raise ValueError(f"activation 'a8' takes float16 or bfloat16 rows, x is {x.dtype}")
    tokens = x.shape[0]
    if tokens > FEW_TOKENS:
        raise ValueError(f"activation 'a8' takes up to {FEW_TOKENS} tokens, x has {tokens}")
    if x.device.type != "cuda":
        return
    if torch.version.hip is not None:
        raise ValueError("activation 'a8' takes an NVIDIA GPU of capability 8.9 or newer")
    found = _capability(x.device)
    if found < CAPABILITY:
        raise ValueError(
            "activation 'a8' takes a GPU of capability 8.9 or newer, whose tensor cores take "
            f"E4M3; {x.device} has {found[0]}.{found[1]}; use 'a16'"
        )


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
