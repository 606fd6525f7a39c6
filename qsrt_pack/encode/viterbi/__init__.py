"""The trellis search: from target weights to the edges of each tile's closed path."""

import torch

from qsrt_pack.encode.viterbi.cpu import search_cpu
from qsrt_pack.encode.viterbi.fast import search_fast
from qsrt_pack.encode.viterbi.reference import search_reference

METHODS = ("exact", "fast")


def search(targets: torch.Tensor, bits: int, method: str = "exact") -> torch.Tensor:
    """Find edges whose decoded values are close to the targets; the targets' device decides how.

    targets: [n, 256] float32, trellis order, in codebook units.   bits: 2, 3 or 4.
    method: "exact" is the least squared error (search_cpu, off the CPU search_reference, which
    agree to the bit); "fast" is search_fast, CPU only.
    Returns edges: [n, 256] uint8 on the same device, trellis order, each < 2**bits.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}, expected one of {METHODS}")
    if method == "fast":
        return search_fast(targets, bits)
    return (search_cpu if targets.device.type == "cpu" else search_reference)(targets, bits)
