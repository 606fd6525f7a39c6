"""How launches follow one another, and the table that several read."""

import functools

import torch

from qsrt_runtime.format import codebook


def dependent(pdl: bool) -> dict[str, bool]:
    """Options of a launch that may start before the one before has ended; CUDA alone has them."""
    return {"launch_pdl": True} if pdl else {}


@functools.cache
def labels(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The value of every state at 2, 3 and 4 bits: [3, 65536] in a type that holds it exactly."""
    return torch.stack([codebook.values(bits) for bits in codebook.BITS]).to(dtype).to(device)
