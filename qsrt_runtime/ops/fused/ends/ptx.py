"""PTX of what stands around the products."""

from qsrt_runtime.ops.warps.ptx import LABELS
from qsrt_runtime.workspace import COLUMNS, PLACES

PARTS = {1: 8, 2: 4}  # that sums of so many matrices adds at once, as registers allow
_PART = 4 * PLACES * COLUMNS  # bytes


def sums(matrices: int) -> str:
    """Four floats of each matrix, 256 floats apart, of up to PARTS parts, added to others.

    Out: $0.. (4 matrices).   In: a pointer, how many parts there are, and what is added to.
    """
    count, parts = 4 * matrices, PARTS[matrices]
    values = [f"v{i}" for i in range(count * parts)]
    body = [f"{{ .reg .pred p; .reg .f32 {','.join(values)};"]
    body += [f"mov.f32 ${i},${count + 2 + i};" for i in range(count)]
    for part in range(parts):
        body.append(f"setp.le.s32 p,${count + 1},{part}; @p bra done{part};")
        for matrix in range(matrices):
            four = ",".join(values[count * part + 4 * matrix :][:4])
            body.append(f"ld.global.v4.f32 {{{four}}},[${count}+{part * _PART + 1024 * matrix}];")
    for part in reversed(range(parts)):
        body += [f"add.f32 ${i},${i},{values[count * part + i]};" for i in range(count)]
        body.append(f"done{part}:")
    return "\n".join([*body, "}"])


def sums_operands(matrices: int) -> str:
    """Constraints of sums."""
    floats = 4 * matrices
    return ",".join(["=&f"] * floats + ["l", "r"] + ["f"] * floats)


def rotate() -> str:
    """A warp's 128 floats, four a lane, times the Hadamard matrix of 128, not normalized.

    Out: $0..$3.   In: $4..$7 and the lane.
    """
    body = ["{ .reg .pred p; .reg .b32 bit; .reg .f32 sign,other,a,b,c,d;"]
    body.append("add.f32 a,$4,$5; sub.f32 b,$4,$5; add.f32 c,$6,$7; sub.f32 d,$6,$7;")
    body.append("add.f32 $0,a,c; add.f32 $1,b,d; sub.f32 $2,a,c; sub.f32 $3,b,d;")
    for bit in (1, 2, 4, 8, 16):
        body.append(f"and.b32 bit,$8,{bit}; setp.eq.b32 p,bit,0;")
        body.append("selp.f32 sign,0f3F800000,0fBF800000,p;")
        for i in range(4):
            body.append(f"shfl.sync.bfly.b32 other,${i},{bit},31,0xffffffff;")
            body.append(f"fma.rn.f32 ${i},${i},sign,other;")
    return "\n".join([*body, "}"])


ROTATE_OPERANDS = "=&f,=&f,=&f,=&f,f,f,f,f,r"
# Four float16 from [$2], anything where $3 is 0; and as floats.
HALVES = "{ .reg .pred p; setp.ne.s32 p,$3,0; @p ld.global.v2.b32 {$0,$1},[$2]; }"
FLOATS = (
    "{ .reg .b16 h<4>; mov.b32 {h0,h1},$4; mov.b32 {h2,h3},$5; "
    "cvt.f32.f16 $0,h0; cvt.f32.f16 $1,h1; cvt.f32.f16 $2,h2; cvt.f32.f16 $3,h3; }"
)
# Four floats to where labels may have been, $1 bytes on; and one from there.
PUT = f"{{ st.shared.v4.f32 [$1+{LABELS}],{{$2,$3,$4,$5}}; mov.u32 $0,0; }}"
GET = f"ld.shared.f32 $0,[$1+{LABELS}];"
