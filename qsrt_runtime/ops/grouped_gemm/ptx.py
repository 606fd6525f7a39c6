"""PTX of labels to the rows' type, two at a time."""

import torch


def convert(byte: int, dtype: torch.dtype) -> str:
    """One byte of words $1 and $2, E4M3 but not NaN, to two numbers in $0, lower half first."""
    selector = f"0x{(4 + byte) | 8:X}{4 + byte}{byte | 8:X}{byte}"  # each byte, its sign before it
    return f"prmt.b32 $0,$1,$2,{selector}; {place_labels('$0', dtype)}"


def place_labels(register: str, dtype: torch.dtype) -> str:
    """Two E4M3 labels, each with its sign on to 16 bits, to two numbers. For any GPU from sm_80 on.

    The bits are put where the type has them, which divides normal and subnormal numbers alike by a
    power of two; the product with it is exact.
    """
    if dtype == torch.bfloat16:
        kind, shift, mask, scale = "bf16x2", 4, "0x87F087F0", "0x7B807B80"  # 2^120
    else:
        kind, shift, mask, scale = "f16x2", 7, "0xBF80BF80", "0x5C005C00"  # 2^8
    return (
        "{ .reg .b32 bits,scale,zero; "
        f"mov.b32 scale,{scale}; mov.b32 zero,0x80008000; "
        f"shl.b32 bits,{register},{shift}; and.b32 bits,bits,{mask}; "
        f"fma.rn.{kind} {register},bits,scale,zero; }}"
    )
