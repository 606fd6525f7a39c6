"""PTX of a warp's step of 64: 32 labels a lane to four tensor core products.

A lane (g, q), g = lane // 4, q = lane % 4, holds of rows g and g + 8 of a strip the four words of
the step's tile q. Word p of both is its A fragment of product p: the product's depths 2 q, 2 q + 1,
2 q + 8 and 2 q + 9 are the word's channels of tile q. The B fragment takes the same channels of a
place's row, two words of the tile's eight in fragment order.
"""

import torch

from qsrt_runtime.ops.grouped_gemm.ptx import place_labels


def load(stride: int) -> str:
    """Words $0..$3 from [$8] and $4..$7 from stride bytes on, each used once."""
    return (
        "ld.global.L1::no_allocate.v4.b32 {$0,$1,$2,$3},[$8]; "
        f"ld.global.L1::no_allocate.v4.b32 {{$4,$5,$6,$7}},[$8+{stride}];"
    )


LOAD_OPERANDS = ",".join(["=&r"] * 8 + ["l"])


def step(dtype: torch.dtype) -> str:
    """Words $4..$11, a place's row at [$12], zeros where $13 is 0, sums $14..$17 to $0..$3."""
    kind = "bf16" if dtype == torch.bfloat16 else "f16"
    body = [
        "{ .reg .pred there; .reg .f32 c0,c1,c2,c3; .reg .b32 a0,a1,a2,a3,x0,x1,x2,x3,x4,x5,x6,x7;",
        *(f"mov.b32 x{i},0;" for i in range(8)),
        "setp.ne.b32 there,$13,0; @there ld.global.v4.b32 {x0,x1,x2,x3},[$12];",
        "@there ld.global.v4.b32 {x4,x5,x6,x7},[$12+16];",
        *(f"mov.f32 c{i},${14 + i};" for i in range(4)),
    ]
    for product in range(4):
        low, high = f"${4 + product}", f"${8 + product}"
        for target, word, byte in (
            ("a0", low, 0),
            ("a1", high, 0),
            ("a2", low, 2),
            ("a3", high, 2),
        ):
            selector = f"0x{(byte + 1) | 8:X}{byte + 1}{byte | 8:X}{byte}"
            body.append(f"prmt.b32 {target},{word},{word},{selector};")
            body.append(place_labels(target, dtype))
        body.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{c0,c1,c2,c3}},"
            f"{{a0,a1,a2,a3}},{{x{2 * product},x{2 * product + 1}}},{{c0,c1,c2,c3}};"
        )
    return "\n".join([*body, *(f"mov.f32 ${i},c{i};" for i in range(4)), "}"])


STEP_OPERANDS = ",".join(["=f"] * 4 + ["r"] * 8 + ["l", "r"] + ["f"] * 4)
