"""Source dtypes that can be read as float32."""

import torch

READABLE = ("BF16", "F16", "F32")


def to_float32(tensor: torch.Tensor) -> torch.Tensor:
    """A bfloat16, float16 or float32 tensor as float32, exactly."""
    return tensor.to(torch.float32)
