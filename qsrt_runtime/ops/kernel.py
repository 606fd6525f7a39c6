"""Device functions that several launches share.

Each launch waits for the one before and only then lets the next one start: what a launch reads
before it waits must have been there before the launch before it.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

from qsrt_runtime import workspace

PLACES = tl.constexpr(workspace.PLACES)  # the columns of a tensor core's B fragment
COLUMNS = tl.constexpr(workspace.COLUMNS)  # 32 strips of 16
STATES = tl.constexpr(65536)  # of a trellis
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
    SINGLE: tl.constexpr, HAS_MAP: tl.constexpr,
):  # fmt: skip
    """The expert of a block, and the routes at some of its places, -1 for none."""
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
