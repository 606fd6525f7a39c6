"""PTX of a warp's step with quantized rows: 32 states a lane to labels, and the products.

A lane (g, q) has the labels of columns g and g + 8 of a step's tile q, four words of either, and of
place g's row the same tile's four words of E4M3 bytes, both in fragment order. Words 2 p and
2 p + 1 of them are its parts of product p, an mma.m16n8k32 whose depths are the channels so named:
an order of its own, but of labels and rows alike. Two of four lanes' tiles are of one block of 32
channels, two of the other, and their powers of two differ: each product is taken twice, with zeros
for the other block's rows, and the two sums are multiplied each by its block's power.
sm_89 has such a product, which is said to add in fewer bits than float32 has (13 of the mantissa:
some 6e-5 of a sum, where the rounding of rows costs 4.8e-2); on sm_90 ptxas makes two of float16,
which holds E4M3 exactly, of each.
"""

from collections.abc import Sequence

from qsrt_runtime.ops.fused.product import ptx
from qsrt_runtime.ops.warps.ptx import arithmetic, state

LABELS = {(8, 9): 0, (9, 0): 1024}  # where dynamic shared memory begins
_SUMS = {"c": "c0,c1,c2,c3", "d": "d0,d1,d2,d3"}  # of the first block, and of the second


def _by_table(number: int, target: str, labels: int) -> str:
    """Labels number and number + 1 in the lower half, from those in shared memory, of a byte."""
    reads = [
        f"{state(ptx.WORDS, place, number + i, 0)} and.b32 {place},{place},0xFFFF; "
        f"ld.shared.u8 {place},[{place}+{labels}];"
        for i, place in enumerate(("sa", "sb"))
    ]
    return f"{{ .reg .b32 sa,sb; {' '.join(reads)} prmt.b32 {target},sa,sb,0x0040; }}"


def _by_arithmetic(number: int, target: str) -> str:
    return f"{{ {' '.join(arithmetic(ptx.WORDS, number))} cvt.u32.u16 {target},pair; }}"


def _product(name: str, rows: tuple[str, str]) -> str:
    sums = _SUMS[name]
    return (
        f"mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {{{sums}}},{{a0,a1,a2,a3}},"
        f"{{{','.join(rows)}}},{{{sums}}};"
    )


def step(computed: Sequence[int], labels: int) -> str:
    """Words $4..$7, rows $8..$11 and sums $14..$17 to sums $0..$3.

    $12: all bits set in lanes whose tile is of the first block, else none.
    $13: exponents by byte, of the first block and the second of place 2 q, whose sums the lane has,
    and of both of place 2 q + 1.   computed: as ptx.step's.   labels: where they begin.
    """
    body = ["{ .reg .b32 a0,a1,a2,a3,x0,x1,y0,y1,p0,p1,s; .reg .f32 scale;"]
    body.append(".reg .f32 c0,c1,c2,c3,d0,d1,d2,d3;")
    body += [f"mov.f32 {name}{i},0f00000000;" for name in _SUMS for i in range(4)]
    for product in range(2):
        # In the path's order: column g, then g + 8, of each four rows.
        for word in range(4):
            number = 4 * product + word
            for pair, target in ((2 * number, "p0"), (2 * number + 1, "p1")):
                if pair in computed:
                    body.append(_by_arithmetic(2 * pair, target))
                else:
                    body.append(_by_table(2 * pair, target, labels))
            body.append(f"prmt.b32 a{word},p0,p1,0x5410;")
        for i in range(2):
            row = f"${8 + 2 * product + i}"
            body.append(f"and.b32 x{i},{row},$12; xor.b32 y{i},{row},x{i};")
        body += [_product("c", ("x0", "x1")), _product("d", ("y0", "y1"))]
    body += [f"mov.f32 ${i},${14 + i};" for i in range(4)]
    for block, name in enumerate(_SUMS):
        for place in range(2):
            first = 16 * place + 8 * block  # of the exponent's bits, which become a float's
            body.append(f"bfe.u32 s,$13,{first},8; shl.b32 s,s,23; mov.b32 scale,s;")
            for i in (place, place + 2):
                body.append(f"fma.rn.f32 ${i},scale,{name}{i},${i};")
    return "\n".join([*body, "}"])


OPERANDS = ",".join(["=&f"] * 4 + ["r"] * 10 + ["f"] * 4)
