"""Some experts' stored matrices to their labels, which a product with many rows reads."""

import triton
import triton.language as tl

from qsrt_runtime.ops.kernel import COLUMNS, decode, in_fragment_order


@triton.jit(
    do_not_specialize=["layer", "first_pair", "first_expert"],
    do_not_specialize_on_alignment=["codes"],
)
def expand_kernel(
    slab,
    labels,
    codes,
    first_block,
    out,
    layer,
    first_pair,
    first_expert,
    HIDDEN: tl.constexpr,
    BUNDLE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    DOWN: tl.constexpr,
    UNIFORM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """WIDTH rows and 64 columns of one expert that has routes.

    out: [experts, ROWS / 8, STEPS, 8, 64] uint8, tiles in fragment order along a row. Of gate and
    up together there are 512 rows for each physical pair (low then high record of either), of down
    the hidden channels.   labels: [3, 65536] uint8.
    """
    local, step = tl.program_id(0), tl.program_id(2)
    expert = first_expert + local
    if tl.load(first_block + expert) == tl.load(first_block + expert + 1):
        return
    row = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    part = tl.program_id(1) * WIDTH // COLUMNS
    found = decode(
        slab,
        labels,
        codes,
        expert,
        layer,
        first_pair,
        part,
        step,
        row % COLUMNS,
        HIDDEN,
        BUNDLE,
        SLOT_STRIDE,
        PAIRS,
        DOWN,
        UNIFORM,
    )
    place = in_fragment_order(tl.arange(0, 64))[:, None]
    first = ((local.to(tl.int64) * ROWS + row) // 8 * STEPS + step) * 512 + row % 8 * 64
    tl.store(out + first[None, :] + place, found, mask=(row < ROWS)[None, :])
