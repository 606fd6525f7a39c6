"""Device functions of kernels that decode by warps: 1,024 threads, a strip of tiles to a warp."""

import triton
import triton.language as tl

from qsrt_runtime.ops.kernel import STATES, expert_of
from qsrt_runtime.ops.warps import ptx

_COPY, _COPIED = tl.constexpr(ptx.COPY), tl.constexpr(ptx.COPIED)
_NEIGHBOUR, _WARP = tl.constexpr(ptx.NEIGHBOUR), tl.constexpr(ptx.WARP)
_LOAD_FLOATS, _LOAD_HALVES = tl.constexpr(ptx.LOAD_FLOATS), tl.constexpr(ptx.LOAD_HALVES)
_LOAD_BFLOATS, _LOAD_OPERANDS = tl.constexpr(ptx.LOAD_BFLOATS), tl.constexpr(ptx.LOAD_OPERANDS)
_STORE_HALVES, _STORE_BFLOATS = tl.constexpr(ptx.STORE_HALVES), tl.constexpr(ptx.STORE_BFLOATS)
_STORE_OPERANDS, _ROTATE_OPERANDS = (
    tl.constexpr(ptx.STORE_OPERANDS),
    tl.constexpr(ptx.ROTATE_OPERANDS),
)
_TO_WORDS = tl.constexpr(ptx.rotate(ptx.TO_WORDS))
_TO_FRAGMENTS = tl.constexpr(ptx.rotate(ptx.TO_FRAGMENTS))
_TOUCH = tl.constexpr(ptx.TOUCH)
NORM = tl.constexpr(0.08838834764831845)  # 1 / sqrt(128)


@triton.jit
def copy_labels(
    labels, layer, FIRST: tl.constexpr = 0, LAST: tl.constexpr = 8, COPY: tl.constexpr = _COPY
):  # fmt: skip
    """Start copying the 3-bit labels to where dynamic shared memory begins, eighths FIRST to LAST,
    and have that memory.

    labels: [3, 65536], of one byte or two; 64 or 128 KiB of shared memory.   COPY: ptx.copy.
    """
    size: tl.constexpr = labels.dtype.element_ty.primitive_bitwidth // 8
    if layer < 0:  # never so: a gather, for which Triton sets that much memory aside
        place = tl.arange(0, 16384 * size)
        words = labels.to(tl.pointer_type(tl.int32))
        kept = tl.gather(tl.load(words + place), tl.load(words + place + 1) & (16384 * size - 1), 0)
        tl.store(words + place, kept)
    copy_more_labels(labels, FIRST, LAST, COPY)


@triton.jit
def copy_more_labels(labels, FIRST: tl.constexpr, LAST: tl.constexpr, COPY: tl.constexpr):
    """As copy_labels, where the memory is there already."""
    size: tl.constexpr = labels.dtype.element_ty.primitive_bitwidth // 8
    thread = tl.arange(0, 1024)
    source = labels + STATES + thread * (16 // size)
    for start in tl.static_range(FIRST * size // 2, LAST * size // 2):
        tl.inline_asm_elementwise(
            COPY, "=r,l,r", [source + start * (16384 // size), thread * 16 + start * 16384],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def await_labels():
    """Wait until all threads have copied their labels."""
    thread = tl.arange(0, 1024)
    tl.inline_asm_elementwise(_COPIED, "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit
def share(total, programs):
    """The run of steps that is this program's: first and end."""
    unit = tl.cdiv(total, programs)
    start = tl.program_id(0) * unit
    return start, tl.minimum(start + unit, total)


@triton.jit
def warp_number():
    """A scalar: what one warp does and others do not stands under a condition on it.

    Nothing there may be for all warps, as barriers and what goes through shared memory. In the
    interpreter, where all warps are one, it is 0: conditions are such that it does what any does.
    """
    return tl.inline_asm_elementwise(_WARP, "=r", [], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def touch(pointer, there):
    """Have what stands there on its way to L2."""
    tl.inline_asm_elementwise(
        _TOUCH, "=r,l,r", [pointer, there.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def from_lane(value, lane):
    """What another lane of the warp has."""
    return tl.inline_asm_elementwise(
        _NEIGHBOUR, "=r,r,r", [value, lane], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def place_of(word, HIDDEN: tl.constexpr, SLOT_STRIDE: tl.constexpr, DOWN: tl.constexpr):
    """Where one of a step's 96 words stands, from the step's first on."""
    if not DOWN:
        return word
    tile = word // 24
    slot = (tile >> 1) * (SLOT_STRIDE // 4)
    return slot + (tile & 1) * (HIDDEN // 16 * 24) + word % 24


@triton.jit
def exchange(r0, r1, r2, lane, number):
    """Word 3 d + number of a step for each lane, d = 8 (lane % 4) + lane // 4.

    r0, r1, r2: words lane, 32 + lane and 64 + lane. Each lane gives one word and takes one: the
    word that it gives is of the lane with d = (lane - number) / 3, modulo 32.
    """
    given = (3 * (((lane - number) * 11) & 31) + number) >> 5
    value = tl.where(given == 0, r0, tl.where(given == 1, r1, r2))
    return from_lane(value, (3 * (8 * (lane & 3) + (lane >> 2)) + number) & 31)


@triton.jit
def load_words(words, there, HIDDEN: tl.constexpr, SLOT_STRIDE: tl.constexpr, DOWN: tl.constexpr):
    """A lane's three of a step's 96 words, where all pairs are of 3 bits."""
    lane = tl.arange(0, 1024) & 31
    first = place_of(lane, HIDDEN, SLOT_STRIDE, DOWN)
    second = place_of(lane + 32, HIDDEN, SLOT_STRIDE, DOWN) - first
    third = place_of(lane + 64, HIDDEN, SLOT_STRIDE, DOWN) - first
    n1 = tl.load(words, mask=there, other=0, cache_modifier=".cg")
    n2 = tl.load(words + second, mask=there, other=0, cache_modifier=".cg")
    n3 = tl.load(words + third, mask=there, other=0, cache_modifier=".cg")
    return n1, n2, n3


@triton.jit
def load_four(pointer, there):
    """Four numbers after one another as floats, zeros unless there; the pointer is aligned."""
    kind: tl.constexpr = pointer.dtype.element_ty
    asm: tl.constexpr = (
        _LOAD_FLOATS
        if kind == tl.float32
        else (_LOAD_HALVES if kind == tl.float16 else _LOAD_BFLOATS)
    )
    a, b, c, d = tl.inline_asm_elementwise(
        asm,
        _LOAD_OPERANDS,
        [pointer, there.to(tl.int32)],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=False,
        pack=1,
    )
    return a, b, c, d


@triton.jit
def store_four(pointer, a, b, c, d, there):
    """Four floats after one another as float16 or bfloat16; the pointer is aligned."""
    asm: tl.constexpr = _STORE_HALVES if pointer.dtype.element_ty == tl.float16 else _STORE_BFLOATS
    tl.inline_asm_elementwise(
        asm, _STORE_OPERANDS, [pointer.to(tl.int64), a, b, c, d, there.to(tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def rotate_lanes(a, b, c, d, lane, ROTATE: tl.constexpr):
    """A warp's 128 channels times the Hadamard matrix, but for lane_signs.   ROTATE: ptx.rotate."""
    a, b, c, d = tl.inline_asm_elementwise(
        ROTATE,
        _ROTATE_OPERANDS,
        [a, b, c, d, lane],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=False,
        pack=1,
    )
    return a, b, c, d


@triton.jit
def turn(lane):
    """The lane's bits turned by one, bit 4 to bit 0."""
    return (lane << 1 & 31) | (lane >> 4)


@triton.jit
def lane_signs(lane, PAIRS: tl.constexpr, LAST: tl.constexpr):
    """What rotate_lanes leaves to multiply by, the norm with it: of the sums and of the differences
    of its last step.

    PAIRS: the bits i where the steps of lane bit i and of the one before it (of bit 0 bit 4) are
    neighbours.   LAST: the last step's bit.
    """
    both = lane & turn(lane) & PAIRS
    both ^= both >> 4
    both ^= both >> 2
    both ^= both >> 1
    sums = tl.where((both & 1) == 1, -NORM, NORM)
    return sums, tl.where((lane >> LAST & 1) == 1, -sums, sums)


@triton.jit
def load_scaled(x, suh, there):
    """Four channels of a row times their scales; at any address."""
    a = tl.load(x, mask=there, other=0).to(tl.float32)
    b = tl.load(x + 1, mask=there, other=0).to(tl.float32)
    c = tl.load(x + 2, mask=there, other=0).to(tl.float32)
    d = tl.load(x + 3, mask=there, other=0).to(tl.float32)
    a *= tl.load(suh, mask=there, other=0).to(tl.float32)
    b *= tl.load(suh + 1, mask=there, other=0).to(tl.float32)
    c *= tl.load(suh + 2, mask=there, other=0).to(tl.float32)
    d *= tl.load(suh + 3, mask=there, other=0).to(tl.float32)
    return a, b, c, d


@triton.jit
def rotate_rows_by_warps(
    x, scales, ids, expert_map, out, start, num_rows, num_ids, num_experts,
    HIDDEN: tl.constexpr, SCALE_ROWS: tl.constexpr, TOPK: tl.constexpr, BY_ROUTE: tl.constexpr,
    INPUTS: tl.constexpr, HAS_MAP: tl.constexpr, BY_WORD: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """As rotate_rows: blocks start to start + WARPS of all rows' blocks of 128, one to a warp."""
    thread = tl.arange(0, 32 * WARPS)
    item, lane = start + (thread >> 5), thread & 31
    row, part = item // (HIDDEN // 128), item % (HIDDEN // 128)
    there = row < num_rows
    token, expert = row, row * 0
    if BY_ROUTE:
        token = row // TOPK
        expert, _ = expert_of(ids, expert_map, row, there, num_ids, num_experts, HAS_MAP)
        there &= expert >= 0
    if SCALE_ROWS == 1:
        expert = row * 0
    source = x + token.to(tl.int64) * HIDDEN + part * 128 + lane * 4
    bit0, bit1, bit2, bit3, bit4 = lane & 1, lane >> 1 & 1, lane >> 2 & 1, lane >> 3 & 1, lane >> 4
    if BY_WORD:
        place = 64 * bit3 + 16 * bit4 + 32 * bit0 + 4 * bit1 + 8 * bit2
    else:
        place = 16 * bit3 + 32 * bit4 + 64 * bit0 + 4 * bit2 + 8 * bit1
    for matrix in tl.static_range(0, INPUTS):
        suh = scales + (matrix * SCALE_ROWS + expert).to(tl.int64) * HIDDEN
        a, b, c, d = load_scaled(source, suh + part * 128 + lane * 4, there)
        target = out + (matrix * num_rows + row).to(tl.int64) * HIDDEN + part * 128 + place
        if BY_WORD:
            a, b, c, d = rotate_lanes(a, b, c, d, lane, _TO_WORDS)
            sums, rest = lane_signs(lane, 30, 0)
            store_four(target, a * sums, c * sums, b * rest, d * rest, there)
        else:
            a, b, c, d = rotate_lanes(a, b, c, d, lane, _TO_FRAGMENTS)
            sums, rest = lane_signs(lane, 27, 1)
            store_four(target, a * sums, b * sums, c * rest, d * rest, there)
