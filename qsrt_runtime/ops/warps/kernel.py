"""Device functions of kernels that decode by warps: 1,024 threads, a strip of tiles to a warp."""

import triton
import triton.language as tl

from qsrt_runtime.ops.kernel import STATES
from qsrt_runtime.ops.warps import ptx

_COPY, _COPIED = tl.constexpr(ptx.COPY), tl.constexpr(ptx.COPIED)
_NEIGHBOUR = tl.constexpr(ptx.NEIGHBOUR)


@triton.jit
def copy_labels(labels, layer):
    """Start copying the 3-bit labels to where dynamic shared memory begins.

    labels: [3, 65536], of one byte or two; 64 or 128 KiB of shared memory.
    """
    size: tl.constexpr = labels.dtype.element_ty.primitive_bitwidth // 8
    thread = tl.arange(0, 1024)
    if layer < 0:  # never so: a gather, for which Triton sets that much memory aside
        place = tl.arange(0, 16384 * size)
        words = labels.to(tl.pointer_type(tl.int32))
        kept = tl.gather(tl.load(words + place), tl.load(words + place + 1) & (16384 * size - 1), 0)
        tl.store(words + place, kept)
    for start in tl.static_range(0, 4 * size):
        source = labels + STATES + (start * 1024 + thread) * (16 // size)
        target = (start * 1024 + thread) * 16
        tl.inline_asm_elementwise(
            _COPY, "=r,l,r", [source, target], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def await_labels():
    """Wait until all threads have copied their labels."""
    thread = tl.arange(0, 1024)
    tl.inline_asm_elementwise(_COPIED, "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit
def share(total):
    """The run of steps that is this program's: first and end."""
    unit = tl.cdiv(total, tl.num_programs(0))
    start = tl.program_id(0) * unit
    return start, tl.minimum(start + unit, total)


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
