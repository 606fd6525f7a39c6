"""The inner loop of the packed search as PTX: costs as pairs of halves, exchanged in shared memory.

512 threads share a tile. A state is (oldest edge a, middle q, newest edge b), a cost belongs to
the node (a, q) before a step and (q, b) after it. A thread owns some middles and newest edges, so
that it needs 128 of the 65,536 values at every step and keeps them in 64 registers. It reads the
costs of its middles under every oldest edge, takes the least of (x - v)**2 + cost over a, and
writes its nodes, two neighbours to a word. For each pair of edges that is a subtraction, a fused
multiply-add and half a minimum (Hopper takes the least of three).

Everything here works on one thread: each text is a function of 32-bit registers in the notation
of inline assembly, outputs first.
"""

from dataclasses import dataclass

import torch

from qsrt_runtime.format import codebook

THREADS = 512
TABLE_WORDS = 64  # registers of a thread that hold its values
_SPLIT = {2: (8, 4), 3: (2, 8), 4: (1, 8)}  # middles and newest edges of a thread
_VECTOR = 4  # words of a 16-byte access


@dataclass(frozen=True)
class Routine:
    """Inline assembly: its text and constraints, and the number of words it returns."""

    text: str
    constraints: str
    outputs: int = 1


# The first byte of the compiler's shared memory. Input: 0, which makes it a value of each thread.
BASE = Routine("mov.u32 $0, global_smem; add.u32 $0, $0, $1;", "=&r,r")


def words(bits: int) -> int:
    """Words of costs that a thread owns."""
    middles, newest = _SPLIT[bits]
    return middles * newest // 2


def table(bits: int) -> torch.Tensor:
    """Each thread's values: [64, 512] int32, [(oldest edge, word), thread], two halves to a word.

    Half h of word w of thread t belongs to node (t * words + w) * 2 + h.
    """
    values = codebook.values(bits).to(torch.float16)
    values = values.view(1 << bits, THREADS, words(bits), 2).transpose(1, 2).contiguous()
    return values.view(torch.int32).view(TABLE_WORDS, THREADS)


def advance(bits: int) -> Routine:
    """One step: new costs, also written to shared memory.

    Inputs: the target twice in a word; a word to subtract from all costs (0: none); where the
    thread reads and where it writes; its table.
    """
    count, symbols = words(bits), 1 << bits
    middles, newest = _SPLIT[bits]
    pairs = newest // 2
    target, less, source, goal = (f"${count + i}" for i in range(4))
    lines = [f".reg .b32 d, r<{count}>, u<{middles}>; .reg .pred p; .reg .b16 h<{middles}>;"]
    lines += [_load_costs(bits, oldest, source) for oldest in range(symbols)]
    for oldest in range(symbols):
        lines += _doubled_costs(bits, oldest)
        for place in range(count):
            value = f"${count + 4 + oldest * count + place}"
            lines.append(f"sub.f16x2 d, {target}, {value};")
            lines += _relax(oldest, symbols, place, f"u{place // pairs}")
    lines.append(f"setp.eq.b32 p, {less}, 0; @p bra SKIP;")
    lines += [f"sub.f16x2 r{i}, r{i}, {less};" for i in range(count)]
    lines.append("SKIP:")
    lines += _store([f"r{i}" for i in range(count)], goal)
    lines += [f"mov.b32 ${i}, r{i};" for i in range(count)]
    return _routine(lines, count * ["=r"] + (4 + TABLE_WORDS) * ["r"], count)


def put(bits: int) -> Routine:
    """Write a thread's costs to shared memory. Inputs: where, and the words; returns 0."""
    lines = [*_store([f"${2 + i}" for i in range(words(bits))], "$1"), "mov.b32 $0, 0;"]
    return _routine(lines, ["=r", "r", *words(bits) * ["r"]])


def get(bits: int) -> Routine:
    """Read a thread's costs back. Input: where it writes."""
    count = words(bits)
    lines = []
    for start in range(0, count, _VECTOR):
        names = ", ".join(f"${start + i}" for i in range(_VECTOR))
        lines.append(f"{_chunk(start, f'${count}')} ld.shared.v4.b32 {{{names}}}, [w{start}];")
    return _routine(lines, [*count * ["=&r"], "r"], count)


def keep(bits: int) -> Routine:
    """Write a thread's costs to memory, chunk by chunk over all threads.

    Inputs: the address of the thread's first chunk, and the words; returns 0.
    """
    lines = []
    for start in range(0, words(bits), _VECTOR):
        names = ", ".join(f"${2 + start + i}" for i in range(_VECTOR))
        lines.append(f"st.global.cs.v4.b32 [$1+{4 * start * THREADS}], {{{names}}};")
    return _routine([*lines, "mov.b32 $0, 0;"], ["=r", "l", *words(bits) * ["r"]])


def least(bits: int) -> Routine:
    """The least cost of all threads twice in a word. Inputs: the thread's number and its words."""
    lines = [".reg .b32 k, a, w, s<16>; .reg .b16 lo, hi;", "mov.b32 k, $2;"]
    lines += [f"min.f16x2 k, k, ${2 + i};" for i in range(1, words(bits))]
    # Costs are not negative, so their bits sort as they do.
    lines += ["mov.b32 {lo, hi}, k; min.f16 lo, lo, hi; cvt.u32.u16 k, lo;", *_LEAST_OF_ALL]
    lines.append("prmt.b32 $0, s0, s0, 0x1010; bar.sync 0;")
    return _routine(lines, ["=r", "r", *words(bits) * ["r"]])


def best(bits: int) -> Routine:
    """The node of least cost, the smallest of equals. Inputs: the thread's number and its words."""
    lines = [".reg .b32 k, a, w, s<16>, n, e;", f"mul.lo.u32 n, $1, {2 * words(bits)};"]
    lines.append("mov.b32 k, 0xffffffff;")
    for i in range(words(bits)):
        for half, cut in enumerate(("and.b32 e, {}, 0xffff;", "shr.u32 e, {}, 16;")):
            key = f"shl.b32 e, e, 14; add.u32 e, e, n; add.u32 e, e, {2 * i + half};"
            lines.append(f"{cut.format(f'${2 + i}')} {key} min.u32 k, k, e;")
    lines += [*_LEAST_OF_ALL, "and.b32 $0, s0, 0x3fff; bar.sync 0;"]
    return _routine(lines, ["=r", "r", *words(bits) * ["r"]])


# The least k of all threads in s0: of each warp by a reduction, of the warps through memory.
_LEAST_OF_ALL = [
    "redux.sync.min.u32 k, k, 0xffffffff;",
    ".shared .align 16 .b32 slots[16]; mov.u32 a, slots;",
    "shr.u32 w, $1, 5; shl.b32 w, w, 2; add.u32 w, w, a; st.shared.b32 [w], k; bar.sync 0;",
    *(
        f"ld.shared.v4.b32 {{s{i}, s{i + 1}, s{i + 2}, s{i + 3}}}, [a+{4 * i}];"
        for i in range(0, 16, 4)
    ),
    *(f"min.u32 s0, s0, s{i};" for i in range(1, 16)),
]


def _routine(lines: list[str], constraints: list[str], outputs: int = 1) -> Routine:
    return Routine("\n".join(["{", *lines, "}"]), ",".join(constraints), outputs)


def _load_costs(bits: int, oldest: int, source: str) -> str:
    """Read the costs of the thread's middles under one oldest edge into c<oldest>."""
    address = f"[{source}+{oldest * (2 << (16 - 2 * bits))}]"
    name, middles = f"c{oldest}_", _SPLIT[bits][0]
    if middles == 8:
        names = ", ".join(f"{name}{i}" for i in range(4))
        return f".reg .b32 {name}<4>; ld.shared.v4.b32 {{{names}}}, {address};"
    kind = "b32" if middles == 2 else "b16"
    return f".reg .{kind} {name}0; ld.shared.{kind} {name}0, {address};"


def _doubled_costs(bits: int, oldest: int) -> list[str]:
    """Put each middle's cost twice into a word u<middle>."""
    name, middles = f"c{oldest}_", _SPLIT[bits][0]
    if middles == 1:
        return [f"mov.b32 u0, {{{name}0, {name}0}};"]
    lines = [f"mov.b32 {{h{i}, h{i + 1}}}, {name}{i // 2};" for i in range(0, middles, 2)]
    return lines + [f"mov.b32 u{i}, {{h{i}, h{i}}};" for i in range(middles)]


def _relax(oldest: int, symbols: int, place: int, cost: str) -> list[str]:
    """From the distance d to the least cost so far; two oldest edges at once."""
    least, other = f"r{place}", f"e{oldest | 1}_{place}"
    if oldest == 0:
        return [f"fma.rn.f16x2 {least}, d, d, {cost};"]
    if oldest % 2:
        lines = [f".reg .b32 {other}; fma.rn.f16x2 {other}, d, d, {cost};"]
        last = f"min.f16x2 {least}, {least}, {other};"
        return [*lines, last] if oldest == symbols - 1 else lines
    other = f"e{oldest - 1}_{place}"
    minima = f"min.f16x2 d, d, {other}; min.f16x2 {least}, {least}, d;"
    return [f"fma.rn.f16x2 d, d, d, {cost};", minima]


def _chunk(start: int, base: str) -> str:
    """The address of a 16-byte chunk; the caller's base has the bits that avoid bank conflicts."""
    return f".reg .b32 w{start}; xor.b32 w{start}, {base}, {4 * start};"


def _store(names: list[str], base: str) -> list[str]:
    return [
        f"{_chunk(start, base)} st.shared.v4.b32 [w{start}], "
        f"{{{', '.join(names[start : start + _VECTOR])}}};"
        for start in range(0, len(names), _VECTOR)
    ]
