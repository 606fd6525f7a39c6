"""Decode some experts' matrices to E4M3 labels."""

import torch

from qsrt_runtime.ops.expand.kernel import expand_kernel
from qsrt_runtime.ops.expand.warps import expand_warps
from qsrt_runtime.ops.launch import labels
from qsrt_runtime.weights import LayerWeights

WIDTH = 128  # rows of a program


def expand(
    layer: LayerWeights,
    experts: range,
    first_block: torch.Tensor,
    out: torch.Tensor,
    *,
    down: bool,
    by_warps: bool,
    beside: bool = False,
) -> None:
    """Gate and up, or down, of those experts of a range that have routes, to out.

    first_block: [E + 1] int32; an expert has routes where the next one's is another.
    out: uint8; has them as [experts, 2 I held, H], or [experts, H, I held], eight rows' 64 columns
    after one another, see format.labels.
    by_warps: see launching.ways.   beside: the next launch runs beside this one, by warps.
    """
    if by_warps:
        expand_warps(layer, experts, first_block, out, down=down, beside=beside)
        return
    geometry, pairs = layer.geometry, len(layer.slots) // 8
    rows = geometry.hidden if down else 512 * pairs
    steps = 4 * pairs if down else geometry.hidden // 64
    expand_kernel[(len(experts), -(-rows // WIDTH), steps)](
        layer.atoms.view(torch.int32),
        labels(torch.float8_e4m3fn, layer.atoms.device).view(torch.uint8),
        layer.format_codes,
        first_block,
        out,
        layer.layer,
        layer.slots.start // 8,
        experts.start,
        HIDDEN=geometry.hidden,
        BUNDLE=geometry.bundle_bytes,
        SLOT_STRIDE=layer.atoms.shape[1],
        PAIRS=geometry.pairs,
        ROWS=rows,
        STEPS=steps,
        DOWN=down,
        UNIFORM=layer.traits.uniform,
        WIDTH=WIDTH,
        num_warps=4,
    )
