"""Device functions that several launches share.

Each launch of moe_decode waits for the one before and only then lets the next one start: what a
launch reads before it waits must have been there before the launch before it.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

from qsrt_runtime import workspace
from qsrt_runtime.mxfp8 import LARGEST

PLACES = tl.constexpr(workspace.PLACES)  # the columns of a tensor core's B fragment
COLUMNS = tl.constexpr(workspace.COLUMNS)  # 32 strips of 16
STATES = tl.constexpr(65536)  # of a trellis
_SCALE = tl.constexpr(1 / LARGEST)
INTERPRETED = triton.knobs.runtime.interpret  # kernels run on CPU tensors


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the launch before has written all it writes, and let the next one start."""
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def expert_of(ids, expert_map, route, mask, num_ids, num_experts, HAS_MAP: tl.constexpr):
    """The expert of a route, -1 for none, int32; and whether what stands there is out of range."""
    expert = tl.load(ids + route, mask=mask, other=-1).to(tl.int64)
    wrong = (expert < -1) | (expert >= num_ids)
    if HAS_MAP:
        known = (expert >= 0) & (expert < num_ids)
        expert = tl.load(expert_map + expert, mask=mask & known, other=-1).to(tl.int64)
        wrong |= (expert < -1) | (expert >= num_experts)
    return tl.where(wrong, -1, expert).to(tl.int32), wrong & mask


@triton.jit
def low_bits(codes, expert, pair, layer, PAIRS: tl.constexpr, DOWN: tl.constexpr):
    """Bits of the low record of a physical pair of slots: 2 or 3; the high one has 6 less that."""
    code = tl.load(codes + expert).to(tl.int32)
    mode = code & 15
    if not DOWN:
        mode = code >> 4
    shift = (5 * expert + layer) % PAIRS
    return tl.where((pair - shift + PAIRS) % PAIRS < mode, 2, 3)


@triton.jit
def block_of(
    ids, expert_map, block_experts, block_routes, block, place, num_ids, num_experts,
    PLACES: tl.constexpr, SINGLE: tl.constexpr, HAS_MAP: tl.constexpr,
):  # fmt: skip
    """The expert of a block, and the routes at some of its places, -1 for none.

    SINGLE: every route is a block of its own, as those of a single token are.
    """
    if SINGLE:
        expert, _ = expert_of(ids, expert_map, block, True, num_ids, num_experts, HAS_MAP)
        route = tl.where((place == 0) & (expert >= 0), block, -1)
        return tl.maximum(expert, 0), route
    expert = tl.load(block_experts + block)
    route = tl.load(block_routes + block * PLACES + place, mask=place < PLACES, other=-1)
    return expert, route


@triton.jit
def _hadamard(SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A block diagonal of Sylvester Hadamard matrices: [SIZE, SIZE] float32 of 1, -1 and 0."""
    i = tl.arange(0, SIZE)
    both = i[:, None] & i[None, :] & (BLOCK - 1)
    both ^= both >> 2
    both ^= both >> 1
    is_inside = (i[:, None] // BLOCK) == (i[None, :] // BLOCK)
    return tl.where(is_inside, 1 - 2 * (both & 1), 0).to(tl.float32)


@triton.jit
def rotate(x, ROWS: tl.constexpr):
    """x B of rows x [ROWS, 128] float32, ROWS at least 2; B is the normalized Hadamard matrix.

    B is the Kronecker product of those of 8 and 16: both by small products, which leave the
    channels spread over the threads.
    """
    x = tl.reshape(x, (ROWS * 8, 16))
    x = tl.dot(x, _hadamard(16, 16), input_precision="ieee")
    x = tl.dot(_hadamard(ROWS * 8, 8), x, input_precision="ieee")
    return tl.reshape(x, (ROWS, 128)) * 0.08838834764831845  # 1 / sqrt(128)


@triton.jit
def in_fragment_order(channel):
    """Where a channel stands among those of its tile: 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15.

    Four after one another are what a lane of a tensor core's B fragment takes.
    """
    inside = channel & 15
    place = ((inside & 7) >> 1) * 4 + (inside & 1) + 2 * (inside >> 3)
    return channel - inside + place


@triton.jit
def in_word_order(channel):
    """Where a channel stands among 64 whose rows meet four labels a word: by byte, then word.

    The words hold labels in fragment order.
    """
    place = in_fragment_order(channel)
    inside = place & 63
    return place - inside + (inside & 3) * 16 + (inside >> 2)


@triton.jit
def first_and_last_program(num_blocks, tile, TILES: tl.constexpr, STEPS: tl.constexpr, programs):
    """The programs of expert_gemm that share a tile's steps: two int32.

    Program p takes `unit` steps from p * unit on, of all tiles one after another; what it makes
    of tile t is part p + t of the partial sums.
    """
    unit = tl.maximum(tl.cdiv(num_blocks * TILES * STEPS, programs), 1)
    return tile * STEPS // unit, (tile * STEPS + STEPS - 1) // unit


@triton.jit
def _tanh(x):
    """tanh, to float32's precision for small arguments and large ones of either sign."""
    small = tl.exp(-2 * tl.abs(x))
    size = (1 - small) / (1 + small)
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    return tl.where(tl.abs(x) < 0.125, series, tl.where(x < 0, -size, size))


@triton.jit
def _sigmoid(x):
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0, small, 1.0) / (1 + small)


@triton.jit
def activate(gate, up, is_situ, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):
    """SiLU: g sigmoid(g) u; SiTU: beta tanh(g / beta) sigmoid(g) * lin tanh(u / lin)."""
    kept = tl.where(is_situ, BETA * _tanh(gate / BETA), gate)
    linear = tl.where(is_situ, LINEAR_BETA * _tanh(up / LINEAR_BETA), up)
    return kept * _sigmoid(gate) * linear


@triton.jit
def quantize(x):
    """Blocks [N, 32] float32 to E4M3 bytes [N, 32] and exponents [N], uint8; see mxfp8.

    By integers, which no type or mode of a GPU changes.
    """
    bits = x.to(tl.int32, bitcast=True)
    sizes = bits & 0x7FFFFFFF
    largest = tl.max(sizes, 1).to(tl.float32, bitcast=True) * _SCALE
    largest = tl.minimum(largest.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F800000)
    exponents = (largest + 0x7FFFFF) >> 23
    inverse = (tl.maximum(254 - exponents, 0) << 23).to(tl.float32, bitcast=True)
    value = sizes.to(tl.float32, bitcast=True) * inverse[:, None]
    size = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    # Three bits of the mantissa are left, and 7 of the exponent's 127; below 2^-6 steps of 2^-9.
    normal = tl.minimum(((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960, 126)
    small = (value + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    number = tl.where(size < 0x3C800000, small, normal)
    number = tl.where(size > 0x7F800000, 127, number)
    number |= (bits >> 24) & 128
    return number.to(tl.uint8), exponents.to(tl.uint8)


@triton.jit
def power_of_two(exponent):
    """What an exponent of quantize stands for; 0 where it is 0, as all its numbers are."""
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_numbers(labels):
    """E4M3 bytes as float32."""
    bits = labels.to(tl.int32)
    bits = ((bits & 128) << 24) | ((bits & 127) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def store_quantized(x, out, order, exponents, place, mask, is_block, SIZE: tl.constexpr):
    """Rows' channels [SIZE] float32 as MXFP8: where out is of bytes as such, at out + order, and an
    exponent for each 32 at exponents + place; else the numbers that they stand for, in out's type.
    """
    found, power = quantize(tl.reshape(x, (SIZE // 32, 32)))
    if out.dtype.element_ty == tl.uint8:
        tl.store(exponents + place, power, mask=is_block)
    else:
        found = (e4m3_numbers(found) * power_of_two(power)[:, None]).to(out.dtype.element_ty)
    tl.store(out + order, tl.reshape(found, (SIZE,)), mask=mask)


@triton.jit
def rotate_rows(
    x,
    scales,
    ids,
    expert_map,
    out,
    exponents,
    row,
    part,
    num_rows,
    num_ids,
    num_experts,
    HIDDEN: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    TOPK: tl.constexpr,
    BY_ROUTE: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BY_WORD: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    """Rotate some blocks of a row by the scales of gate and, where INPUTS is 2, of up.

    BY_WORD: in word order, else in fragment order.   QUANTIZED: see store_quantized.
    """
    channel = part * BLOCKS * 128 + tl.arange(0, BLOCKS * 128)
    order = in_word_order(channel) if BY_WORD else in_fragment_order(channel)
    mask = channel < HIDDEN
    token, expert = row, row * 0
    if BY_ROUTE:
        token = row // TOPK
        expert, _ = expert_of(ids, expert_map, row, True, num_ids, num_experts, HAS_MAP)
        mask &= channel * 0 + expert >= 0
    value = tl.load(x + token.to(tl.int64) * HIDDEN + channel, mask=mask, other=0)
    if SCALE_ROWS == 1:
        expert = row * 0
    for matrix in tl.static_range(0, INPUTS):
        suh = scales + (matrix * SCALE_ROWS + expert).to(tl.int64) * HIDDEN
        scaled = value.to(tl.float32) * tl.load(suh + channel, mask=mask, other=0).to(tl.float32)
        rotated = rotate(tl.reshape(scaled, (BLOCKS, 128)), BLOCKS)
        rotated = tl.reshape(rotated, (BLOCKS * 128,))
        first = (matrix * num_rows + row).to(tl.int64) * HIDDEN
        if QUANTIZED:
            block = part * BLOCKS * 4 + tl.arange(0, BLOCKS * 4)
            is_block = block < HIDDEN // 32
            if BY_ROUTE:
                is_block &= block * 0 + expert >= 0
            store_quantized(
                rotated, out + first, order, exponents + first // 32, block, mask, is_block,
                BLOCKS * 128,
            )  # fmt: skip
        else:
            tl.store(out + first + order, rotated.to(out.dtype.element_ty), mask=mask)


@triton.jit
def decode(
    slab,
    labels,
    codes,
    expert,
    layer,
    first_pair,
    part,
    step,
    column,
    HIDDEN: tl.constexpr,
    BUNDLE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PAIRS: tl.constexpr,
    DOWN: tl.constexpr,
    UNIFORM: tl.constexpr,
):
    """Weights [64, n] of a step at some columns of a tile, in the type of the labels.

    slab: words, int32.   part: of the tile, a held pair or 512 hidden channels.   column: [n].
    """
    depth = tl.arange(0, 64)
    strip, width = column >> 4, column & 15
    block, height = depth >> 4, depth & 15
    row = height[:, None]
    col = width[None, :]
    if DOWN:
        tile_row = step * 4 + block  # slot and side
        slot, side = (tile_row >> 1)[:, None] + strip[None, :] * 0, (tile_row & 1)[:, None]
        hidden_tile = part * 32 + strip[None, :]
        matrix: tl.constexpr = 24 * HIDDEN // 4
        offset = matrix
    else:
        slot = part * 8 + (strip & 7)[None, :] + block[:, None] * 0
        side = ((strip >> 3) & 1)[None, :]
        hidden_tile = (step * 4 + block)[:, None]
        offset = ((strip >> 4) * (12 * HIDDEN // 4))[None, :]
    low = 3
    if not UNIFORM:
        low = low_bits(codes, expert, first_pair + slot // 8, layer, PAIRS, DOWN)
    bits = tl.where(side == 1, 6 - low, low)
    tiles = hidden_tile + slot * 0
    base = slot.to(tl.int64) * (SLOT_STRIDE // 4) + expert.to(tl.int64) * (BUNDLE // 4)
    base += offset + side * (HIDDEN // 16) * 8 * low + tiles * 8 * bits
    # Where a weight stands in its tile's path, and the last bit of its state.
    place = 8 * (4 * (col & 7) + ((row & 7) >> 1)) + (row & 1) + 2 * (row >> 3) + 4 * (col >> 3)
    end = bits * (place + 1)
    word = (end - 1) >> 5
    there = tiles < HIDDEN // 16
    new = tl.load(slab + base + word, mask=there, other=0).to(tl.uint32, bitcast=True)
    before = tl.where(word == 0, 8 * bits, word) - 1
    old = tl.load(slab + base + before, mask=there, other=0).to(tl.uint32, bitcast=True)
    both = (old.to(tl.uint64) << 32) | new.to(tl.uint64)
    state = ((both >> (32 * (word + 1) - end).to(tl.uint64)) & 0xFFFF).to(tl.int32)
    return tl.load(labels + (bits - 2) * STATES + state)


@triton.jit
def middle_scales(
    slab, activations, expert, pair,
    LOCAL: tl.constexpr, BUNDLE: tl.constexpr, SLOT_STRIDE: tl.constexpr,
):  # fmt: skip
    """Of a pair of an expert: svh of gate and up, suh of down, [256] each; whether it is SiTU.

    The channels are of the low record, then of the high one.   LOCAL: where in a bundle they begin.
    """
    channel = tl.arange(0, 256)
    side, slot, inside = channel // 128, channel // 16 % 8, channel % 16
    local = slab + (pair * 8 + slot).to(tl.int64) * SLOT_STRIDE + expert * BUNDLE + LOCAL
    local = local.to(tl.pointer_type(tl.float16)) + side * 16 + inside
    gate_scale = tl.load(local).to(tl.float32)
    up_scale = tl.load(local + 32).to(tl.float32)
    down_scale = tl.load(local + 64).to(tl.float32)
    return gate_scale, up_scale, down_scale, tl.load(activations + expert) == 1


@triton.jit
def store_middle(
    gate, up, gate_scale, up_scale, down_scale, is_situ, out, exponents,
    BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, BY_WORD: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """From a pair's sums of gate and up, [256] each, to what down receives of it, at out.

    A slot's 32 channels after one another, in word order where BY_WORD, else in fragment order.
    QUANTIZED: see store_quantized. 32 channels of a record, two slots', have an exponent; that of
    the low record's and that of the high one's, of two slots each, stand after one another.
    """
    gate = tl.reshape(rotate(tl.reshape(gate, (2, 128)), 2), (256,)) * gate_scale
    up = tl.reshape(rotate(tl.reshape(up, (2, 128)), 2), (256,)) * up_scale
    middle = activate(gate, up, is_situ, BETA, LINEAR_BETA) * down_scale
    middle = tl.reshape(rotate(tl.reshape(middle, (2, 128)), 2), (256,))
    channel = tl.arange(0, 256)
    side, slot, inside = channel // 128, channel // 16 % 8, channel % 16
    place = slot * 32 + side * 16 + inside
    order = in_word_order(place) if BY_WORD else in_fragment_order(place)
    if QUANTIZED:
        block = tl.arange(0, 8)
        place = (block & 3) * 2 + (block >> 2)
        store_quantized(middle, out, order, exponents, place, channel >= 0, block >= 0, 256)
    else:
        tl.store(out + order, middle.to(out.dtype.element_ty))


@triton.jit
def label_values(words, NUMBER: tl.constexpr, DTYPE: tl.constexpr, CONVERT: tl.constexpr):
    """Byte NUMBER of each word, an E4M3 number, in a type that holds it exactly.

    CONVERT: PTX that does it for two words at once, or None.
    """
    if CONVERT is not None:
        bits = tl.inline_asm_elementwise(
            CONVERT, "=r,r,r", [words], dtype=tl.int16, is_pure=True, pack=2
        )
        return bits.to(DTYPE, bitcast=True)
    else:
        shift: tl.constexpr = 4 if DTYPE.is_bf16() else 7  # of the exponent to its place
        scale: tl.constexpr = 1.329227995784916e36 if DTYPE.is_bf16() else 256.0  # 2^120, 2^8
        bits = (words >> (8 * NUMBER)).to(tl.int16)
        bits = ((bits & 128) << 8) | ((bits & 127) << shift)
        return bits.to(DTYPE, bitcast=True) * scale
