"""PTX of a call in one launch, whose programs hand each other sums, and rows of down.

A sum stands beside the number of the call, in one word of 64 bits, and so do two numbers of a row:
who reads it sees by itself whether it is there, without a barrier, a fence or a counter. What is
there from before has another number; they repeat after 2^32 calls. Rows that a program needs stay
in shared memory, before the labels.
"""

from qsrt_runtime.ops.warps.ptx import LABELS as SHARED
from qsrt_runtime.ops.warps.ptx import copy
from qsrt_runtime.workspace import COLUMNS

SUMS_BYTES = 8192  # of four tiles' sums of gate and up, or of four shares of them
ROWS_BYTES = 40960  # of the tokens, and of down's steps
SUMS = SHARED
ROWS = SUMS + SUMS_BYTES
LABELS = ROWS + ROWS_BYTES
PART_BYTES = 8 * COLUMNS
AT_ONCE = 4  # parts that a thread has on their way, as registers allow

COPY = copy(LABELS)
# Sets the memory before the labels aside; thread $1.
RESERVE = (
    f"{{ .shared .align 16 .b8 kept[{SUMS_BYTES + ROWS_BYTES}]; .reg .pred p; "
    "setp.ne.s32 p,$1,0; @p bra kept_is; st.shared.b32 [kept],0; kept_is: mov.u32 $0,0; }"
)
PUT_TWO = f"{{ st.shared.v2.f32 [$1+{SUMS}],{{$2,$3}}; mov.u32 $0,0; }}"
GET_FOUR = f"ld.shared.v4.f32 {{$0,$1,$2,$3}},[$4+{SUMS}];"
# Two words, four numbers, of a row to [$1].
_STORE_ROW = (
    "{{ .reg .pred p; .reg .b32 l,h; setp.ne.s32 p,$6,0; cvt.rn.{0}.f32 l,$3,$2; "
    "cvt.rn.{0}.f32 h,$5,$4; @p st.shared.b32 [$1],l; @p st.shared.b32 [$1+8],h; mov.u32 $0,0; }}"
)
STORE_HALVES, STORE_BFLOATS = _STORE_ROW.format("f16x2"), _STORE_ROW.format("bf16x2")


def receive(columns: int, parts: int, stride: int) -> str:
    """Sums of up to `parts` parts, `stride` bytes apart, added to others, when all are there.

    Out: $0.. (`columns`, 2 or 4).   In: a pointer, how many parts there are, the call's number, and
    what is added to.
    """
    pointer, count, call = (f"${columns + i}" for i in range(3))
    words = [[f"w{part}{i}" for i in range(columns)] for part in range(parts)]
    every = [word for each in words for word in each]
    body = [f"{{ .reg .pred p,{','.join(f'p{part}' for part in range(parts))};"]
    body.append(f".reg .b64 none,{','.join(every)}; .reg .b32 found,missing; .reg .f32 value;")
    body += [f"mov.f32 ${i},${columns + 3 + i};" for i in range(columns)]
    body.append(f"mov.b64 none,{{0,{call}}};")
    body += [f"setp.gt.s32 p{part},{count},{part};" for part in range(parts)]
    body.append("waiting: mov.b32 missing,0;")
    body += [f"mov.b64 {word},none;" for word in every]
    for part, each in enumerate(words):
        for i in range(0, columns, 2):
            two, at = ",".join(each[i : i + 2]), f"[{pointer}+{part * stride + 8 * i}]"
            body.append(f"@p{part} ld.relaxed.gpu.global.v2.b64 {{{two}}},{at};")
    for word in every:
        body.append(f"mov.b64 {{value,found}},{word}; lop3.b32 missing,missing,found,{call},0xF6;")
    body.append("setp.ne.s32 p,missing,0; @p bra waiting;")
    for each in words:
        for i, word in enumerate(each):
            body.append(f"mov.b64 {{value,found}},{word}; add.f32 ${i},${i},value;")
    return "\n".join([*body, "}"])


def receive_operands(columns: int) -> str:
    """Constraints of receive."""
    return ",".join(["=&f"] * columns + ["l", "r", "r"] + ["f"] * columns)


# Two words from [$2] when they are there, of the call $3; zeros where $4 is 0.
RECEIVE_WORDS = (
    "{ .reg .pred p,there; .reg .b64 w0,w1; .reg .b32 found,missing; setp.ne.s32 there,$4,0; "
    "mov.b64 w0,{0,$3}; mov.b64 w1,{0,$3}; "
    "waiting: @there ld.relaxed.gpu.global.v2.b64 {w0,w1},[$2]; "
    "mov.b64 {$0,found},w0; xor.b32 missing,found,$3; "
    "mov.b64 {$1,found},w1; lop3.b32 missing,missing,found,$3,0xF6; "
    "setp.ne.s32 p,missing,0; @p bra waiting; }"
)
PUT_WORDS = "{ .reg .pred p; setp.ne.s32 p,$4,0; @p st.shared.v2.b32 [$1],{$2,$3}; mov.u32 $0,0; }"
# Four numbers as two words to [$1] and 16 bytes on, beside the call $6, unless $7 is 0.
_SEND_ROW = (
    "{{ .reg .pred p; .reg .b32 l,h; .reg .b64 low,high; setp.ne.s32 p,$7,0; "
    "cvt.rn.{0}.f32 l,$3,$2; cvt.rn.{0}.f32 h,$5,$4; mov.b64 low,{{l,$6}}; mov.b64 high,{{h,$6}}; "
    "@p st.relaxed.gpu.global.b64 [$1],low; @p st.relaxed.gpu.global.b64 [$1+16],high; "
    "mov.u32 $0,0; }}"
)
SEND_HALVES, SEND_BFLOATS = _SEND_ROW.format("f16x2"), _SEND_ROW.format("bf16x2")
