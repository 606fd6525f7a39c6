"""PTX of a lane's group of 32 weights at 3 bits: from words to labels.

The words are the one before the group, then the group's three.
"""

import struct
from collections.abc import Sequence

LABELS = 1024  # where dynamic shared memory begins on sm_90, and the labels in it
# Which of a lane's 16 pairs are decoded by arithmetic while the others' labels are read from shared
# memory, by their number; spread out, so that both ways are busy at any time.
BY_ARITHMETIC = {
    2: (3, 11),
    3: (3, 8, 13),
    4: (3, 7, 11, 15),
    5: (3, 6, 9, 12, 15),
}
# Inverse of the normal distribution: with u in (-1, 1) and w = log2(_ONE - u^2) a label is u P(w)
# rounded to E4M3, for every 12-bit rank. Found by linear programming over P for each _ONE; what is
# rounded stays 1.3e-5 of itself away from where it would be another label.
_ONE = 0.9997354745864868
_POLYNOMIAL = (
    1.8791563537857647,
    -0.3433287238406125,
    0.009664456022054096,
    0.0012406422794232117,
)
_ARITHMETIC_REGISTERS = (
    ".reg .b32 high,low,both,mixed,more,product,other,lower,upper,rank,first,second; "
    ".reg .f32 fa,fb,ua,ub,wa,wb,ya,yb; .reg .b16 pair;"
)


def _float(value: float) -> str:
    return "0f{:08X}".format(*struct.unpack("<I", struct.pack("<f", value)))


def state(words: Sequence[str], target: str, number: int, shift: int, before: int = 0) -> str:
    """The state of a weight of the group, shifted left by `shift`, with other bits around it.

    before: of how many weights before it the states are there too, each 3 bits above the next.
    """
    end = 32 + 3 * (number + 1)  # of its last bit, from the word before the group on
    word = (end - 1) // 32
    below = 32 * (word + 1) - end - shift
    if below < 0:
        return f"shl.b32 {target},{words[word]},{-below};"
    if below + shift + 16 + 3 * before <= 32:
        return f"shr.u32 {target},{words[word]},{below};"
    return f"shf.r.wrap.b32 {target},{words[word]},{words[word - 1]},{below};"


def arithmetic(words: Sequence[str], number: int) -> list[str]:
    """The labels of weights number and number + 1 in the register `pair`, lower byte first.

    Both ranks are computed in one register, and the labels from them. Shifts, masks and
    permutations take one pipe, which is the fullest, and multiplications another: hence mad.lo.
    """
    steps = [
        _ARITHMETIC_REGISTERS,
        state(words, "low", number + 1, 0, before=1),
        "shl.b32 high,low,13; lop3.b32 both,high,low,0xFFFF0000,0xE4;",
        "shr.u32 mixed,both,14; and.b32 mixed,mixed,0x00030003;",
        "shr.u32 more,both,3; lop3.b32 mixed,more,0x1FFF1FFF,mixed,0x6A;",
        "shl.b32 more,mixed,11; lop3.b32 mixed,mixed,more,0x18001800,0x78;",
        "shr.u32 product,mixed,16; mad.lo.u32 product,product,0x3FA7D929,0xC928FD8E;",
        # Of the lower half: that of both, without 65536 times that of the upper one.
        f"mad.lo.u32 other,mixed,0x3FA7D929,{0xC928FD8E * 65537 & 0xFFFFFFFF:#X};",
        "mad.lo.u32 other,product,0xFFFF0000,other;",
        "prmt.b32 lower,product,other,0x5410; prmt.b32 upper,product,other,0x7632;",
        "brev.b32 rank,both; lop3.b32 rank,rank,upper,0xE000E000,0x28;",
        "lop3.b32 rank,lower,0x1FF01FF0,rank,0xEA;",
        # The 16-bit ranks, low four bits zero, as floats 2^23 + rank; u = rank / 2^15 - 1 + 2^-12.
        "prmt.b32 first,rank,0x4B000000,0x7632; prmt.b32 second,rank,0x4B000000,0x7610;",
        "mov.b32 fa,first; mov.b32 fb,second;",
    ]
    scale, offset = _float(2.0**-15), _float(-256 - 1 + 2.0**-12)
    for x in "ab":
        steps.append(f"fma.rn.f32 u{x},f{x},{scale},{offset}; neg.f32 f{x},u{x};")
        steps.append(f"fma.rn.f32 w{x},f{x},u{x},{_float(_ONE)}; lg2.approx.ftz.f32 w{x},w{x};")
        steps.append(f"mov.f32 y{x},{_float(_POLYNOMIAL[-1])};")
        steps += [f"fma.rn.f32 y{x},y{x},w{x},{_float(c)};" for c in _POLYNOMIAL[-2::-1]]
        steps.append(f"mul.f32 y{x},y{x},u{x};")
    steps.append("cvt.rn.satfinite.e4m3x2.f32 pair,ya,yb;")
    return steps


# The line of [$1] to L2, unless $2 is 0.
TOUCH = "{ .reg .pred p; setp.ne.s32 p,$2,0; @p prefetch.global.L2 [$1]; mov.u32 $0,0; }"
WARP = "{ .reg .b32 thread; mov.u32 thread,%tid.x; shr.u32 $0,thread,5; }"
NEIGHBOUR = "shfl.sync.idx.b32 $0,$1,$2,31,0xffffffff;"


def copy(first: int) -> str:
    """16 bytes of labels from [$1] to shared memory at $2, by the asynchronous copy.

    first: where the labels begin.
    """
    return f"{{ cp.async.cg.shared.global [$2+{first}],[$1],16; mov.u32 $0,0; }}"


COPY = copy(LABELS)
COPIED = "{ cp.async.wait_all; mov.u32 $0,$1; }"

# Swaps of a lane's four numbers with those of the lane whose bit `lane` is the other: (lane, slot),
# where the four numbers' index is slot 0 + 2 slot 1. What the slot told apart the lane's bit does
# then, and the other way round. Each of them stands for one bit of a channel of 128:
#   in order: slots 0 1, lanes 2 3 4 5 6, so that a lane's four channels stand after one another;
#   turned:   slots 0 1, lanes 3 4 5 6 2, likewise, but the lanes turned by one.
IN_PLACE = ((4, 0), (3, 0), (2, 0), (1, 0), (0, 0), (4, 0))  # from in order to turned
TO_WORDS = ((4, 0), (3, 0), (2, 0), (1, 0), (0, 0))  # to slots 2 1, lanes 3 4 5 6 0
TURNED_TO_WORDS = ((3, 0), (2, 0), (1, 0), (0, 0), (4, 0))  # to slots 2 1, lanes 4 5 6 0 3
TO_FRAGMENTS = ((2, 1), (3, 1), (4, 1), (0, 1), (1, 1))  # to slots 0 3, lanes 6 2 1 4 5


def rotate(swaps: Sequence[tuple[int, int]]) -> str:
    """A warp's 128 floats, four a lane, times the Hadamard matrix of 128, not normalized.

    Out: $0..$3, but for signs.   In: $4..$7 and the lane.   Each swap with a new bit is a step of
    the transform; so are the two within the lane. A step's differences have the wrong sign in lanes
    whose bit is set. By the end that is one sign for each pair of neighbouring steps both of whose
    bits are set, and for the last step's differences one more where its bit is; a swap with an old
    bit makes of the first a sign of those with that bit.
    """
    body = ["{ .reg .pred p; .reg .b32 bits; .reg .f32 sent,other,a,b,c,d,v0,v1,v2,v3;"]
    body.append("add.f32 a,$4,$5; sub.f32 b,$4,$5; add.f32 c,$6,$7; sub.f32 d,$6,$7;")
    body.append("add.f32 v0,a,c; add.f32 v1,b,d; sub.f32 v2,a,c; sub.f32 v3,b,d;")
    steps = list(dict.fromkeys(swaps))
    for number, (lane, slot) in enumerate(swaps):
        body.append(f"and.b32 bits,$8,{1 << lane}; setp.ne.b32 p,bits,0;")
        is_step = number < len(steps)
        for low in ((0, 2), (0, 1))[slot]:
            first, second = f"v{low}", f"v{low + 1 + slot}"
            body.append(f"selp.f32 sent,{first},{second},p; selp.f32 {first},{second},{first},p;")
            body.append(f"shfl.sync.bfly.b32 other,sent,{1 << lane},31,0xffffffff;")
            if is_step:
                body.append(f"sub.f32 {second},{first},other; add.f32 {first},{first},other;")
            else:
                body.append(f"selp.f32 {second},{first},other,p; selp.f32 {first},other,{first},p;")
    return "\n".join([*body, *(f"mov.f32 ${i},v{i};" for i in range(4)), "}"])


ROTATE_OPERANDS = "=f,=f,=f,=f,f,f,f,f,r"
# Four numbers from [$4], or zeros where $5 is 0.
LOAD_FLOATS = (
    "{ .reg .pred p; setp.ne.s32 p,$5,0; mov.f32 $0,0f00000000; mov.f32 $1,0f00000000; "
    "mov.f32 $2,0f00000000; mov.f32 $3,0f00000000; @p ld.global.v4.f32 {$0,$1,$2,$3},[$4]; }"
)
_LOAD_HALVES = (
    "{ .reg .pred p; .reg .b32 l,h; .reg .b16 h0,h1,h2,h3; setp.ne.s32 p,$5,0; mov.b32 l,0; "
    "mov.b32 h,0; @p ld.global.v2.b32 {l,h},[$4]; "
)
LOAD_HALVES = _LOAD_HALVES + (
    "mov.b32 {h0,h1},l; mov.b32 {h2,h3},h; "
    "cvt.f32.f16 $0,h0; cvt.f32.f16 $1,h1; cvt.f32.f16 $2,h2; cvt.f32.f16 $3,h3; }"
)
LOAD_BFLOATS = _LOAD_HALVES + (
    "shl.b32 $0,l,16; and.b32 $1,l,0xFFFF0000; shl.b32 $2,h,16; and.b32 $3,h,0xFFFF0000; }"
)
LOAD_OPERANDS = "=f,=f,=f,=f,l,r"
# Four floats to [$1] as numbers of half the size, unless $6 is 0.
_STORE = (
    "{{ .reg .pred p; .reg .b32 l,h; setp.ne.s32 p,$6,0; cvt.rn.{0}.f32 l,$3,$2; "
    "cvt.rn.{0}.f32 h,$5,$4; @p st.global.v2.b32 [$1],{{l,h}}; mov.u32 $0,0; }}"
)
STORE_HALVES, STORE_BFLOATS = _STORE.format("f16x2"), _STORE.format("bf16x2")
STORE_OPERANDS = "=r,l,f,f,f,f,r"
