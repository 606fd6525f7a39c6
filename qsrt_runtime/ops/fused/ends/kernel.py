"""What stands around the products, a record of 128 channels of a route to a warp.

A lane has four channels after one another, so that a Hadamard matrix is two steps inside the lane
and five between lanes.
"""

import triton
import triton.language as tl

from qsrt_runtime.ops.fused.ends import ptx
from qsrt_runtime.ops.kernel import COLUMNS, PLACES, activate, expert_of
from qsrt_runtime.ops.warps.kernel import NORM, touch, warp_number

_GATE_UP, _GATE_UP_WORDS = tl.constexpr(ptx.sums(2)), tl.constexpr(ptx.sums_operands(2))
_GATE_UP_PARTS = tl.constexpr(ptx.PARTS[2])
_ROTATE, _ROTATE_WORDS = tl.constexpr(ptx.rotate()), tl.constexpr(ptx.ROTATE_OPERANDS)
_HALVES, _FLOATS = tl.constexpr(ptx.HALVES), tl.constexpr(ptx.FLOATS)


@triton.jit
def halves(pointer, there):
    """Four float16 as two words, anything unless there; the pointer is aligned."""
    low, high = tl.inline_asm_elementwise(
        _HALVES,
        "=r,=r,l,r",
        [pointer, there.to(tl.int32)],
        dtype=(tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )
    return low, high


@triton.jit
def _floats(words):
    low, high = words
    a, b, c, d = tl.inline_asm_elementwise(
        _FLOATS,
        "=f,=f,=f,=f,r,r",
        [low, high],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=False,
        pack=1,
    )
    return a, b, c, d


@triton.jit
def rotate(a, b, c, d, lane):
    """A warp's 128 channels times the Hadamard matrix, not normalized."""
    return tl.inline_asm_elementwise(
        _ROTATE,
        _ROTATE_WORDS,
        [a, b, c, d, lane],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def activated(
    g0, g1, g2, g3, h0, h1, h2, h3, gate, up, down, factor, activation, lane, BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
):  # fmt: skip
    """A lane's four channels of a warp's row of down, from their sums of gate, g, and of up, h.

    gate, up, down: halves of their scales.   factor: of the sums, with the norm.
    """
    g0, g1, g2, g3 = rotate(g0, g1, g2, g3, lane)
    h0, h1, h2, h3 = rotate(h0, h1, h2, h3, lane)
    s0, s1, s2, s3 = _floats(gate)
    g0, g1, g2, g3 = g0 * s0 * factor, g1 * s1 * factor, g2 * s2 * factor, g3 * s3 * factor
    s0, s1, s2, s3 = _floats(up)
    h0, h1, h2, h3 = h0 * s0 * factor, h1 * s1 * factor, h2 * s2 * factor, h3 * s3 * factor
    if activation == 1:
        g0 = activate(g0, h0, True, BETA, LINEAR_BETA)
        g1 = activate(g1, h1, True, BETA, LINEAR_BETA)
        g2 = activate(g2, h2, True, BETA, LINEAR_BETA)
        g3 = activate(g3, h3, True, BETA, LINEAR_BETA)
    else:
        g0 = activate(g0, h0, False, BETA, LINEAR_BETA)
        g1 = activate(g1, h1, False, BETA, LINEAR_BETA)
        g2 = activate(g2, h2, False, BETA, LINEAR_BETA)
        g3 = activate(g3, h3, False, BETA, LINEAR_BETA)
    s0, s1, s2, s3 = _floats(down)
    g0, g1, g2, g3 = g0 * s0 * NORM, g1 * s1 * NORM, g2 * s2 * NORM, g3 * s3 * NORM
    g0, g1, g2, g3 = rotate(g0, g1, g2, g3, lane)
    return g0, g1, g2, g3


@triton.jit
def parts_of(
    partial, tile, place, column, there, num_tiles, STEPS: tl.constexpr, PROGRAMS: tl.constexpr
):  # fmt: skip
    """Where a tile's first part is, how many there are (first_and_last_program), none unless
    there; and how many a tile has at most. num_tiles: of all blocks.
    """
    unit = tl.maximum(tl.cdiv(num_tiles * STEPS, PROGRAMS), 1)
    first = tile * STEPS // unit
    count = tl.where(there, (tile * STEPS + STEPS - 1) // unit - first + 1, 0)
    source = partial + ((first + tile) * PLACES + place).to(tl.int64) * COLUMNS + column
    aligned = (STEPS % unit == 0) | (unit % STEPS == 0)
    return source, count, (STEPS + tl.where(aligned, unit - 1, 2 * unit - 2)) // unit


@triton.jit
def _store(target, a, b, c, d, lane, there):
    """A lane's four channels to their places in their tile's fragment order."""
    target += 8 * (lane & 1) + (lane & 2)
    kind = target.dtype.element_ty
    tl.store(target, a.to(kind), mask=there)
    tl.store(target + 1, b.to(kind), mask=there)
    tl.store(target + 4, c.to(kind), mask=there)
    tl.store(target + 5, d.to(kind), mask=there)


@triton.jit
def touch_scales(
    slab, expert, position, end, HIDDEN: tl.constexpr, BUNDLE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Have the scales that make_middle reads first on their way to L2.

    Where there are no steps, the expert may be any number.
    """
    slots = tl.minimum(end - position + 6, 4 * PAIRS) // 4 * 8
    if warp_number() * 16 < slots:
        thread = tl.arange(0, 1024)
        slot = position % (4 * PAIRS) // 4 * 8 + (thread >> 1)
        there = ((thread >> 1) < slots) & (position < end)
        local = slab.to(tl.pointer_type(tl.uint8)) + expert.to(tl.int64) * BUNDLE + 36 * HIDDEN
        local += (slot % (8 * PAIRS)).to(tl.int64) * SLOT_STRIDE + (thread & 1) * 128
        touch(local, there)


@triton.jit
def block_rows(
    ids, expert_map, block_experts, block_routes, activations, block, num_blocks, num_ids,
    num_experts, SINGLE: tl.constexpr, HAS_MAP: tl.constexpr,
):  # fmt: skip
    """A block's expert, how many routes it has, 0 past the last block, and its activation."""
    there = block < num_blocks
    if SINGLE:
        expert, _ = expert_of(ids, expert_map, block, there, num_ids, num_experts, HAS_MAP)
        rows = (expert >= 0).to(tl.int32)
    else:
        expert = tl.load(block_experts + block, mask=there, other=0)
        rows = there.to(tl.int32)
        for place in tl.static_range(1, PLACES):
            route = tl.load(block_routes + block * PLACES + place, mask=there, other=-1)
            rows += (route >= 0).to(tl.int32)
    expert = tl.maximum(expert, 0)
    return expert, rows, tl.load(activations + expert)


@triton.jit
def _records(position, end, block, rows, TILES: tl.constexpr, PAIRS: tl.constexpr):
    """How many records of 128 channels of a block the steps position to end take, and of which pair
    the first is.
    """
    steps: tl.constexpr = 4 * PAIRS
    start = tl.maximum(position - block * (TILES * steps), 0)
    count = tl.minimum(end - block * (TILES * steps), TILES * steps) - start
    start %= steps
    return tl.minimum((start % 4 + count + 3) // 4, PAIRS) * rows * 2, start // 4


@triton.jit
def make_middle(
    partial, slab, activations, weights, ids, expert_map, block_experts, block_routes, middle,
    position, end, num_blocks, expert, rows, activation, num_ids, num_experts,
    HIDDEN: tl.constexpr, BUNDLE: tl.constexpr, SLOT_STRIDE: tl.constexpr, PAIRS: tl.constexpr,
    TILES: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, WEIGH: tl.constexpr,
    SINGLE: tl.constexpr, HAS_MAP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """The rows of down that its steps position to end take, to middle; see activate_kernel.

    Programs whose steps share rows make them each for itself, which is quicker than waiting.
    expert, rows, activation: block_rows of position's block.   PAIRS: held.
    TILES: of down, of a block.
    """
    block_steps: tl.constexpr = TILES * 4 * PAIRS
    block = position // block_steps
    while block * block_steps < end:
        count, first_pair = _records(position, end, block, rows, TILES, PAIRS)
        done = 0
        while done + warp_number() < count:
            _record(
                partial, slab, weights, block_routes, middle, block, num_blocks, expert, rows,
                activation, done, count, first_pair, HIDDEN, BUNDLE, SLOT_STRIDE, PAIRS, BETA,
                LINEAR_BETA, WEIGH, SINGLE, PROGRAMS,
            )  # fmt: skip
            done += 32
        block += 1
        if block * block_steps < end:
            expert, rows, activation = block_rows(
                ids, expert_map, block_experts, block_routes, activations, block, num_blocks,
                num_ids, num_experts, SINGLE, HAS_MAP,
            )  # fmt: skip


@triton.jit
def _record(
    partial, slab, weights, block_routes, middle, block, num_blocks, expert, rows, activation,
    done, count, first_pair,
    HIDDEN: tl.constexpr, BUNDLE: tl.constexpr, SLOT_STRIDE: tl.constexpr, PAIRS: tl.constexpr,
    BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, WEIGH: tl.constexpr, SINGLE: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """A block's records from `done` on, one to a warp, to middle."""
    thread = tl.arange(0, 1024)
    item, lane = done + (thread >> 5), thread & 31
    there = item < count
    side, number = item & 1, item >> 1
    place = number * 0
    if not SINGLE:
        place, number = number % rows, number // rows
    pair = (first_pair + number) % PAIRS
    route = block + place
    if not SINGLE:
        route = tl.load(block_routes + block * PLACES + place, mask=there, other=0)
    local = slab.to(tl.pointer_type(tl.uint8)) + expert.to(tl.int64) * BUNDLE + 36 * HIDDEN
    local += (pair * 8 + (lane >> 2)).to(tl.int64) * SLOT_STRIDE + side * 32 + (lane & 3) * 8
    gate, up, down = halves(local, there), halves(local + 64, there), halves(local + 128, there)
    factor = NORM
    if WEIGH:
        factor *= tl.load(weights + route, mask=there, other=0).to(tl.float32)
    source, parts, most = parts_of(
        partial, block * PAIRS + pair, place, side * 128 + lane * 4, there, num_blocks * PAIRS,
        HIDDEN // 64, PROGRAMS,
    )  # fmt: skip
    g0, g1, g2, g3 = lane * 0.0, lane * 0.0, lane * 0.0, lane * 0.0
    h0, h1, h2, h3 = g0, g0, g0, g0
    number = 0
    while number < most:
        g0, g1, g2, g3, h0, h1, h2, h3 = tl.inline_asm_elementwise(
            _GATE_UP,
            _GATE_UP_WORDS,
            [source.to(tl.int64), parts - number, g0, g1, g2, g3, h0, h1, h2, h3],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32,
                   tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=False,
            pack=1,
        )  # fmt: skip
        source += _GATE_UP_PARTS * PLACES * COLUMNS
        number += _GATE_UP_PARTS
    g0, g1, g2, g3 = activated(
        g0, g1, g2, g3, h0, h1, h2, h3, gate, up, down, factor, activation, lane, BETA, LINEAR_BETA
    )
    target = middle + route.to(tl.int64) * (256 * PAIRS) + pair * 256 + (lane >> 2) * 32
    _store(target + side * 16, g0, g1, g2, g3, lane, there)
