"""PTX of a lane's group of 32 weights at 3 bits to eight words of labels."""

from collections.abc import Sequence

from qsrt_runtime.ops.warps.ptx import LABELS, arithmetic, state

_WORDS = ("$8", "$9", "$10", "$11")


def _by_table(number: int, target: str) -> str:
    """Labels number and number + 1 in the lower half, from those in shared memory, of a byte."""
    reads = [
        f"{state(_WORDS, place, number + i, 0)} and.b32 {place},{place},0xFFFF; "
        f"ld.shared.u8 {place},[{place}+{LABELS}];"
        for i, place in enumerate(("sa", "sb"))
    ]
    return f"{{ .reg .b32 sa,sb; {' '.join(reads)} prmt.b32 {target},sa,sb,0x0040; }}"


def _by_arithmetic(number: int, target: str) -> str:
    return f"{{ {' '.join(arithmetic(_WORDS, number))} cvt.u32.u16 {target},pair; }}"


def group(computed: Sequence[int]) -> str:
    """Words $8..$11 to the labels $0..$3 of column g and $4..$7 of column g + 8.

    computed: those of its 16 pairs whose labels are computed.
    """
    body = []
    for word in range(8):  # in the path's order: column g, then g + 8, of each four rows
        for pair, target in ((2 * word, "p0"), (2 * word + 1, "p1")):
            by = _by_arithmetic if pair in computed else _by_table
            body.append(by(2 * pair, target))
        body.append(f"prmt.b32 r{word},p0,p1,0x5410;")
    results = [f"mov.b32 ${word // 2 + 4 * (word % 2)},r{word};" for word in range(8)]
    registers = f".reg .b32 p0,p1,{','.join(f'r{word}' for word in range(8))};"
    return "\n".join([f"{{ {registers}", *body, *results, "}"])


OPERANDS = ",".join(["=&r"] * 8 + ["r"] * 4)
# 16 bytes to where $1 points, unless $6 is 0.
STORE = (
    "{ .reg .pred there; setp.ne.b32 there,$6,0; @there st.global.v4.b32 [$1],{$2,$3,$4,$5}; "
    "mov.u32 $0,0; }"
)
