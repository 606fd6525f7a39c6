"""Stored numbers as float32, exactly.

E2M1 and E8M0 are those of the OCP Microscaling Formats specification 1.0; E4M3 is torch's
float8_e4m3fn.
"""

import torch

from qsrt_runtime.format.errors import FormatError

PLAIN = ("BF16", "F16", "F32")
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_VALUES = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
_INT4_VALUES = torch.arange(16.0) - 8
_E8M0_VALUES = torch.tensor([*(2.0 ** (byte - 127) for byte in range(255)), float("nan")])


def to_float32(tensor: torch.Tensor) -> torch.Tensor:
    """A bfloat16, float16, float32 or float8_e4m3fn tensor as float32."""
    return tensor.to(torch.float32)


def to_bfloat16(weight: torch.Tensor, where: str) -> torch.Tensor:
    """A decoded weight for storing; FormatError where a number of it is, or becomes, infinite."""
    rounded = weight.to(torch.bfloat16)
    if not torch.isfinite(rounded).all():
        raise FormatError(f"{where} does not fit into bfloat16; expected finite weights")
    return rounded


def e2m1_to_float32(codes: torch.Tensor) -> torch.Tensor:
    """Two E2M1 numbers a byte, the first in the low half: [..., n] uint8 -> [..., 2 n]."""
    return _halves(codes, _E2M1_VALUES)


def int4_to_float32(words: torch.Tensor) -> torch.Tensor:
    """Eight numbers -8..7 a word, each plus 8 in its four bits, the first in the lowest.

    words: [..., n] int32.   Returns [..., 8 n].
    """
    codes = words.flatten().view(torch.uint8).view(*words.shape[:-1], -1)
    return _halves(codes, _INT4_VALUES)


def e8m0_to_float32(exponents: torch.Tensor) -> torch.Tensor:
    """2 ** (byte - 127) of a uint8 tensor; byte 255 is NaN."""
    return _E8M0_VALUES.to(exponents.device)[exponents.int()]


def _halves(codes: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The values [16] of the low and the high half of every byte: [..., n] -> [..., 2 n]."""
    byte = torch.arange(256)
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], dim=-1)
    return pairs.to(codes.device)[codes.int()].flatten(-2)
