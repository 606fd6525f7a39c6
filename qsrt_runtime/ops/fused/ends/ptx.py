"""PTX of what stands around the products."""

from qsrt_runtime.ops.fused.product.ptx import LABELS

# Four floats from [$4], or zeros where $5 is 0.
SUMS = (
    "{ .reg .pred there; setp.ne.b32 there,$5,0; mov.f32 $0,0f00000000; mov.f32 $1,0f00000000; "
    "mov.f32 $2,0f00000000; mov.f32 $3,0f00000000; "
    "@there ld.global.v4.f32 {$0,$1,$2,$3},[$4]; }"
)
# Four float16 from [$4] as floats, or zeros where $5 is 0.
HALVES = (
    "{ .reg .pred there; .reg .b32 a,b; .reg .b16 h<4>; setp.ne.b32 there,$5,0; mov.b32 a,0; "
    "mov.b32 b,0; @there ld.global.v2.b32 {a,b},[$4]; mov.b32 {h0,h1},a; mov.b32 {h2,h3},b; "
    "cvt.f32.f16 $0,h0; cvt.f32.f16 $1,h1; cvt.f32.f16 $2,h2; cvt.f32.f16 $3,h3; }"
)
# Of all lanes: the value of the lane whose number differs in the bits of $2.
OTHER = "shfl.sync.bfly.b32 $0,$1,$2,31,0xffffffff;"
# Four floats to the labels' memory, $1 bytes on; and one from there.
PUT = f"{{ st.shared.v4.f32 [$1+{LABELS}],{{$2,$3,$4,$5}}; mov.u32 $0,0; }}"
GET = f"ld.shared.f32 $0,[$1+{LABELS}];"
# Thread 0 of each of $3 programs arrives at [$1] and waits for the others.
MEET = (
    "{ .reg .pred p; .reg .b32 arrived; setp.ne.b32 p,$2,0; @p bra met; fence.acq_rel.gpu; "
    "red.release.gpu.global.add.u32 [$1],1; "
    "waiting: ld.acquire.gpu.global.u32 arrived,[$1]; setp.lt.u32 p,arrived,$3; "
    "@p bra waiting; met: mov.u32 $0,0; }"
)
