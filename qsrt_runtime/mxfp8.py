"""MXFP8: rows as E4M3 numbers with a power of two for each 32 channels, as W4A8 has them."""

import torch

BLOCK = 32  # channels that share a power of two
LARGEST = 448.0  # of E4M3
_INFINITE = 0x7F800000  # bits of a float32


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., K], K a multiple of 32, to E4M3 [..., K] and exponents [..., K / 32] uint8.

    An exponent b stands for 2^(b - 127), the least that is not below the block's largest size
    times float32's 1/448; sizes below float32's normal numbers count. Channels are divided by it,
    which is exact, and rounded to nearest even; beyond 448 they become 448. Signs are kept, of
    zeros too. A block of zeros has exponent 0, one with an infinity or NaN 255.
    """
    blocks = rows.float().unflatten(-1, (-1, BLOCK))
    one = torch.tensor(1 / LARGEST, dtype=torch.float32, device=rows.device)
    bits = (blocks.abs().amax(-1) * one).view(torch.int32).clamp(max=_INFINITE)
    exponents = (bits + 0x7FFFFF) >> 23  # the next power of two where a bit of the mantissa is set
    inverse = ((254 - exponents).clamp(min=0) << 23).view(torch.float32)
    values = (blocks * inverse[..., None]).clamp(-LARGEST, LARGEST)
    return values.to(torch.float8_e4m3fn).flatten(-2), exponents.to(torch.uint8)


def dequantize_rows(values: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """What quantize_rows gives as float32 [..., K]; of exponent 255 nothing is finite."""
    bits = torch.where(exponents == 0, 1 << 22, exponents.int() << 23)  # 2^-127 is no normal number
    scales = bits.int().view(torch.float32)
    return (values.float().unflatten(-1, (-1, BLOCK)) * scales[..., None]).flatten(-2)
