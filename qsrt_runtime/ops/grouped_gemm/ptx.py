"""PTX of labels to the rows' type, two at a time."""

import torch


def convert(byte: int, dtype: torch.dtype) -> str:
    """One byte of words $1 and $2, E4M3 but not NaN, to a pair of numbers in $0, lower half first.

    The bits are put where the type has them, which divides normal and subnormal numbers alike by a
    power of two; the product with it is exact. For any GPU from sm_80 on.
    """
    if dtype == torch.bfloat16:
        shift, mask = 4, "0x87F087F0"
        times, scale = "fma.rn.bf16x2 $0,bits,scale,zero;", "0x7B807B80"  # 2^120
    else:
        shift, mask = 7, "0xBF80BF80"
        times, scale = "fma.rn.f16x2 $0,bits,scale,zero;", "0x5C005C00"  # 2^8
    selector = f"0x{(4 + byte) | 8:X}{4 + byte}{byte | 8:X}{byte}"  # each byte, its sign before it
    return (
        "{ .reg .b32 bits,scale,zero; "
        f"mov.b32 scale,{scale}; mov.b32 zero,0x80008000; "
        f"prmt.b32 bits,$1,$2,{selector}; shl.b32 bits,bits,{shift}; "
        f"and.b32 bits,bits,{mask}; {times} }}"
    )
