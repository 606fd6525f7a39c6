"""The trellis search: from target weights to the edges of each tile's closed path."""

import torch

from qsrt_pack.encode.viterbi.cpu import search_cpu
from qsrt_pack.encode.viterbi.fast import search_fast

METHODS = ("exact", "fast")


def search(targets: torch.Tensor, bits: int, method: str = "exact") -> torch.Tensor:
    """Find edges whose decoded values are close to the targets; the targets' device decides how.

    targets: [n, 256] float32, trellis order, in codebook units.   bits: 2, 3 or 4.
    method: "exact" is the reference's search over all states: search_cpu on the CPU, search_kernel
    elsewhere; "fast" is search_fast, CPU only.
    Returns edges: [n, 256] uint8 on the same device, trellis order, each < 2**bits.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}, expected one of {METHODS}")
    if method == "fast":
        return search_fast(targets, bits)
    if targets.device.type == "cpu":
        return search_cpu(targets, bits)
    from qsrt_pack.encode.viterbi.kernel import search_kernel  # Triton is not everywhere

    return search_kernel(targets, bits)


def device_kind(device: torch.device) -> str:
    """Which search a device runs, and so which bytes it makes: `cpu`, `cuda` or `cuda_plain`."""
    if device.type == "cpu":
        return "cpu"
    from qsrt_pack.encode.viterbi.kernel import is_packed  # Triton is not everywhere

    return "cuda" if is_packed(device) else "cuda_plain"
