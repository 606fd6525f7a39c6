"""PTX of a warp's step: 32 states a lane to labels, and four tensor core products.

A lane (g, q), g = lane // 4, q = lane % 4, holds the words of group g of a step's tile q, the 32
weights of columns g and g + 8, and the word before them; that is the A fragment of four
mma.m16n8k16 whose B fragments are the rows in fragment order. All for 3 bits.
"""

import struct
from collections.abc import Sequence

WORDS = ("$4", "$5", "$6", "$7")  # the word before the group, and the group's three
LABELS = 1024  # where dynamic shared memory begins, and the labels in it
# Which pairs are decoded by arithmetic while the others' labels are read from shared memory, by
# their number; spread out, so that both ways are busy at any time.
BY_ARITHMETIC = {
    2: (3, 11),
    3: (3, 8, 13),
    4: (3, 7, 11, 15),
    5: (0, 3, 6, 9, 12),
}
# ln-free inverse of the normal distribution: with u in (-1, 1) and w = log2(1 - u^2) a label is
# u P(w) rounded to E4M3, for every 12-bit rank (found by linear programming, exact).
_POLYNOMIAL = (
    1.8797026872634888,
    -0.34162741899490356,
    0.01132929790765047,
    0.0016589440638199449,
    3.0834060453344136e-05,
)
_ARITHMETIC_REGISTERS = (
    ".reg .b32 high,low,both,mixed,more,product,other,lower,upper,rank,first,second; "
    ".reg .f32 fa,fb,ua,ub,wa,wb,ya,yb; .reg .b16 pair;"
)


def _float(value: float) -> str:
    return "0f{:08X}".format(*struct.unpack("<I", struct.pack("<f", value)))


def _state(target: str, number: int, shift: int) -> str:
    """The state of a lane's weight, shifted left by `shift`, with other bits around it."""
    end = 32 + 3 * (number + 1)  # of its last bit, from the word before the group on
    word = (end - 1) // 32
    below = 32 * (word + 1) - end - shift
    if below < 0:
        return f"shl.b32 {target},{WORDS[word]},{-below};"
    if below + shift <= 16:
        return f"shr.u32 {target},{WORDS[word]},{below};"
    return f"shf.r.wrap.b32 {target},{WORDS[word]},{WORDS[word - 1]},{below};"


def _by_table(number: int, target: str) -> str:
    """Weights number and number + 1, packed, from the labels in shared memory."""
    reads = [
        f"{_state(state, number + i, 1)} and.b32 {state},{state},0x1FFFE; "
        f"ld.shared.b16 {label},[{state}+{LABELS}];"
        for i, (state, label) in enumerate((("sa", "la"), ("sb", "lb")))
    ]
    registers = ".reg .b32 sa,sb; .reg .b16 la,lb;"
    return f"{{ {registers} {' '.join(reads)} mov.b32 {target},{{la,lb}}; }}"


def _by_arithmetic(number: int, target: str, is_bfloat16: bool) -> str:
    """As _by_table, by computing both ranks in one register and the labels from them."""
    steps = [
        _ARITHMETIC_REGISTERS,
        _state("high", number, 0),
        _state("low", number + 1, 0),
        "prmt.b32 both,high,low,0x1054;",
        "shr.u32 mixed,both,14; and.b32 mixed,mixed,0x00030003;",
        "shr.u32 more,both,3; lop3.b32 mixed,more,0x1FFF1FFF,mixed,0x6A;",
        "shl.b32 more,mixed,11; lop3.b32 mixed,mixed,more,0x18001800,0x78;",
        "shr.u32 product,mixed,16; mad.lo.u32 product,product,0x3FA7D929,0xC928FD8E;",
        "and.b32 other,mixed,0xFFFF; mad.lo.u32 other,other,0x3FA7D929,0xC928FD8E;",
        "prmt.b32 lower,product,other,0x5410; prmt.b32 upper,product,other,0x7632;",
        "brev.b32 rank,both; xor.b32 rank,rank,upper;",
        "lop3.b32 rank,lower,0x1FFF1FFF,rank,0xE2;",
        # The 12-bit ranks as mantissas of floats in [1, 2), and u = 2 v - 3 + 1 / 4096.
        "shr.u32 first,rank,9; lop3.b32 first,first,0x007FF800,0x3F800000,0xEA;",
        "shl.b32 second,rank,7; lop3.b32 second,second,0x007FF800,0x3F800000,0xEA;",
        "mov.b32 fa,first; mov.b32 fb,second;",
    ]
    offset = _float(-2.999755859375)
    for x in "ab":
        steps.append(f"fma.rn.f32 u{x},f{x},{_float(2.0)},{offset}; neg.f32 f{x},u{x};")
        steps.append(f"fma.rn.f32 w{x},f{x},u{x},{_float(1.0)}; lg2.approx.ftz.f32 w{x},w{x};")
        steps.append(f"mov.f32 y{x},{_float(_POLYNOMIAL[-1])};")
        steps += [f"fma.rn.f32 y{x},y{x},w{x},{_float(c)};" for c in _POLYNOMIAL[-2::-1]]
        steps.append(f"mul.f32 y{x},y{x},u{x};")
    steps.append("cvt.rn.satfinite.e4m3x2.f32 pair,ya,yb;")
    if is_bfloat16:
        steps.append("{ .reg .b32 halves; .reg .b16 ha,hb; cvt.rn.f16x2.e4m3x2 halves,pair;")
        steps.append("mov.b32 {ha,hb},halves; cvt.f32.f16 ya,ha; cvt.f32.f16 yb,hb;")
        steps.append(f"cvt.rn.bf16x2.f32 {target},yb,ya; }}")
    else:
        steps.append(f"cvt.rn.f16x2.e4m3x2 {target},pair;")
    return f"{{ {' '.join(steps)} }}"


def _product(sums: str, weights: Sequence[str], rows: tuple[str, str], is_bfloat16: bool) -> str:
    kind = "bf16" if is_bfloat16 else "f16"
    return (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{sums}}},"
        f"{{{','.join(weights)}}},{{{','.join(rows)}}},{{{sums}}};"
    )


def _with_sums(body: list[str], first: int) -> str:
    """A block around products: sums come in as operands first to first + 3, go out as 0 to 3."""
    copies = " ".join(f"mov.f32 c{i},${first + i};" for i in range(4))
    results = " ".join(f"mov.f32 ${i},c{i};" for i in range(4))
    registers = ".reg .b32 a0,a1,a2,a3; .reg .f32 c0,c1,c2,c3;"
    return "\n".join([f"{{ {registers} {copies}", *body, f"{results} }}"])


def step(arithmetic: int, is_bfloat16: bool) -> str:
    """Words $4..$7, rows $8..$15 and sums $16..$19 to sums $0..$3.

    arithmetic: a key of BY_ARITHMETIC.
    """
    body = []
    for product in range(4):
        # In the path's order: row g, k and k + 1; row g, k + 8; row g + 8; row g + 8, k + 8.
        for i, target in enumerate(("a0", "a2", "a1", "a3")):
            pair = 4 * product + i
            if pair in BY_ARITHMETIC[arithmetic]:
                body.append(_by_arithmetic(2 * pair, target, is_bfloat16))
            else:
                body.append(_by_table(2 * pair, target))
        rows = (f"${8 + 2 * product}", f"${9 + 2 * product}")
        body.append(_product("c0,c1,c2,c3", ("a0", "a1", "a2", "a3"), rows, is_bfloat16))
    return _with_sums(body, 16)


def products(is_bfloat16: bool) -> str:
    """Weights $4..$19 in the path's order, rows $20..$27 and sums $28..$31 to sums $0..$3."""
    body = []
    for product in range(4):
        weights = [f"${4 + 4 * product + i}" for i in (0, 2, 1, 3)]
        rows = (f"${20 + 2 * product}", f"${21 + 2 * product}")
        body.append(_product("c0,c1,c2,c3", weights, rows, is_bfloat16))
    return _with_sums(body, 28)


def operands(inputs: int) -> str:
    """Constraints: four float sums, some words, and the four sums before."""
    return ",".join(["=f"] * 4 + ["r"] * inputs + ["f"] * 4)


# Four words of a row, or zeros where the row's place is empty.
ROW = (
    "{ .reg .pred there; setp.ne.b32 there,$5,0; mov.b32 $0,0; mov.b32 $1,0; mov.b32 $2,0; "
    "mov.b32 $3,0; @there ld.global.v4.b32 {$0,$1,$2,$3},[$4]; }"
)
NEIGHBOUR = "shfl.sync.idx.b32 $0,$1,$2,31,0xffffffff;"
# 16 bytes of labels from [$1] to shared memory at $2, by the asynchronous copy.
COPY = f"{{ cp.async.cg.shared.global [$2+{LABELS}],[$1],16; mov.u32 $0,0; }}"
COPIED = "{ cp.async.wait_all; mov.u32 $0,$1; }"
