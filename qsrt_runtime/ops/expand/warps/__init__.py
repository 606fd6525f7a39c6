"""Decode some experts' matrices to E4M3 labels by warps."""

import functools

import torch

from qsrt_runtime.ops.expand.warps import ptx
from qsrt_runtime.ops.expand.warps.kernel import expand_warps_kernel
from qsrt_runtime.ops.launch import labels
from qsrt_runtime.ops.warps import check_shared
from qsrt_runtime.ops.warps.ptx import BY_ARITHMETIC
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import COLUMNS

SHARED_BYTES = 65536  # of the labels of 3 bits
ARITHMETIC = BY_ARITHMETIC[4]


def expand_warps(
    layer: LayerWeights,
    experts: range,
    first_block: torch.Tensor,
    out: torch.Tensor,
    *,
    down: bool,
    beside: bool,
) -> None:
    """As expand, on GPUs whose multiprocessors have 227 KB to share."""
    geometry, pairs = layer.geometry, len(layer.slots) // 8
    rows = geometry.hidden if down else COLUMNS * pairs
    device = torch.cuda.get_device_properties(layer.atoms.device)
    compiled = expand_warps_kernel[(device.multi_processor_count,)](
        layer.atoms.view(torch.int32),
        labels(torch.float8_e4m3fn, layer.atoms.device).view(torch.uint8),
        layer.format_codes,
        first_block,
        out,
        layer.layer,
        layer.slots.start // 8,
        experts.start,
        len(experts),
        HIDDEN=geometry.hidden,
        BUNDLE=geometry.bundle_bytes,
        SLOT_STRIDE=layer.atoms.shape[1],
        PAIRS=geometry.pairs,
        ROWS=rows,
        TILES=-(-rows // COLUMNS),
        STEPS=4 * pairs if down else geometry.hidden // 64,
        DOWN=down,
        UNIFORM=layer.traits.uniform,
        GROUP=group(ARITHMETIC),
        BESIDE=beside,
        num_warps=32,
    )
    check_shared(compiled.metadata.shared, SHARED_BYTES)


group = functools.cache(ptx.group)
