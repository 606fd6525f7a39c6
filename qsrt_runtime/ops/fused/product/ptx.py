"""PTX of a warp's step: 32 states a lane to labels, and four tensor core products.

A lane (g, q), g = lane // 4, q = lane % 4, holds the words of group g of a step's tile q, the 32
weights of columns g and g + 8, and the word before them; that is the A fragment of four
mma.m16n8k16 whose B fragments are the rows in fragment order. All for 3 bits.
"""

from collections.abc import Sequence
from functools import partial

from qsrt_runtime.ops.warps.ptx import LABELS, arithmetic, state

WORDS = ("$4", "$5", "$6", "$7")  # the word before the group, and the group's three


def _by_table(number: int, target: str, words: Sequence[str] = WORDS, labels: int = LABELS) -> str:
    """Weights number and number + 1, packed, from the labels in shared memory."""
    reads = [
        f"{state(words, place, number + i, 1)} and.b32 {place},{place},0x1FFFE; "
        f"ld.shared.u16 {label},[{place}+{labels}];"
        for i, (place, label) in enumerate((("sa", "la"), ("sb", "lb")))
    ]
    registers = ".reg .b32 sa,sb,la,lb;"
    return f"{{ {registers} {' '.join(reads)} mad.lo.u32 {target},lb,65536,la; }}"


def _by_arithmetic(
    number: int, target: str, is_bfloat16: bool, words: Sequence[str] = WORDS
) -> str:
    """As _by_table, by computing the labels."""
    steps = arithmetic(words, number)
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


def step(computed: Sequence[int], is_bfloat16: bool, labels: int = LABELS) -> str:
    """Words $4..$7, rows $8..$15 and sums $16..$19 to sums $0..$3.

    computed: those of its 16 pairs whose labels are computed.   labels: where those of others are.
    """
    body = []
    for product in range(4):
        # In the path's order: row g, k and k + 1; row g, k + 8; row g + 8; row g + 8, k + 8.
        for i, target in enumerate(("a0", "a2", "a1", "a3")):
            pair = 4 * product + i
            if pair in computed:
                body.append(_by_arithmetic(2 * pair, target, is_bfloat16))
            else:
                body.append(_by_table(2 * pair, target, labels=labels))
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


def wide_step(computed: Sequence[int], is_bfloat16: bool, blocks: int) -> str:
    """As step, for `blocks` blocks of 8 places: sums $0.. (4 blocks) of words, rows and sums.

    In: four words, a pointer, for each block the words from it on to the lane's row, and the sums.
    """
    count = 4 * blocks
    words = [f"${count + i}" for i in range(4)]
    pointer, offsets, sums = count + 4, count + 5, count + 5 + blocks
    registers = [f"c{i}" for i in range(count)]
    body = ["{ .reg .b32 a0,a1,a2,a3,b0,b1,b2,b3,x0,x1,x2,x3; .reg .b64 row;"]
    body.append(f".reg .f32 {','.join(registers)};")
    body += [f"mov.f32 {c},${sums + i};" for i, c in enumerate(registers)]
    for half in range(2):
        for product, name in ((2 * half, "a"), (2 * half + 1, "b")):
            for i, target in enumerate((0, 2, 1, 3)):
                pair = 4 * product + i
                by = _by_table
                if pair in computed:
                    by = partial(_by_arithmetic, is_bfloat16=is_bfloat16)
                body.append(by(2 * pair, f"{name}{target}", words=words))
        for block in range(blocks):
            body.append(f"{{ mad.wide.s32 row,${offsets + block},4,${pointer};")
            body.append(f"ld.global.v4.b32 {{x0,x1,x2,x3}},[row+{16 * half}]; }}")
            into = ",".join(registers[4 * block : 4 * block + 4])
            for name, rows in (("a", ("x0", "x1")), ("b", ("x2", "x3"))):
                weights = [f"{name}{i}" for i in range(4)]
                body.append(_product(into, weights, rows, is_bfloat16))
    results = [f"mov.f32 ${i},{c};" for i, c in enumerate(registers)]
    return "\n".join([*body, *results, "}"])


def wide_operands(blocks: int) -> str:
    """Constraints of wide_step."""
    floats = 4 * blocks
    return ",".join(["=f"] * floats + ["r"] * 4 + ["l"] + ["r"] * blocks + ["f"] * floats)


def operands(inputs: int) -> str:
    """Constraints: four float sums, some words, and the four sums before."""
    return ",".join(["=f"] * 4 + ["r"] * inputs + ["f"] * 4)


# Four words of a row, or zeros where the row's place is empty.
ROW = (
    "{ .reg .pred there; setp.ne.b32 there,$5,0; mov.b32 $0,0; mov.b32 $1,0; mov.b32 $2,0; "
    "mov.b32 $3,0; @there ld.global.v4.b32 {$0,$1,$2,$3},[$4]; }"
)
# As ROW, from shared memory.
SHARED_ROW = ROW.replace("ld.global", "ld.shared")
# A float and beside it a word to [$1] at once, unless $4 is 0.
SEND = (
    "{ .reg .pred p; .reg .b64 both; setp.ne.s32 p,$4,0; mov.b64 both,{$2,$3}; "
    "@p st.relaxed.gpu.global.b64 [$1],both; mov.u32 $0,0; }"
)
