"""A token or two in one launch, on GPUs whose multiprocessors have 227 KB to share."""

import functools

import torch

from qsrt_runtime.format.manifest import SITU_BETA, SITU_LINEAR_BETA
from qsrt_runtime.ops.fused.alone import ptx
from qsrt_runtime.ops.fused.alone.kernel import alone_kernel
from qsrt_runtime.ops.fused.ends.output import MAX_TOPK
from qsrt_runtime.ops.fused.product import SHARED_BYTES, arithmetic_pairs, products, step
from qsrt_runtime.ops.launch import dependent, labels
from qsrt_runtime.ops.warps import check_shared
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import ALONE_TOKENS, COLUMNS, Workspace

MOST_PAIRS = 4  # of down's steps, for which a program makes rows that others make too
receive = functools.cache(ptx.receive)


def takes(layer: LayerWeights, topk_ids: torch.Tensor, programs: int) -> bool:
    """Whether a call goes in one launch: of a token or two, whose rows fit into shared memory."""
    (tokens, topk), geometry = topk_ids.shape, layer.geometry
    if tokens > ALONE_TOKENS or topk > MAX_TOPK or not layer.traits.inputs:
        return False
    steps = -(-tokens * topk * -(-geometry.hidden // COLUMNS) * len(layer.slots) // 2 // programs)
    middle = (steps + 6) // 4 * 512  # of the pairs that so many steps after one another can touch
    return 2 * layer.traits.inputs * tokens * geometry.hidden + middle <= ptx.ROWS_BYTES


def _most_parts(steps: int, unit: int) -> int:
    """Of a tile of so many steps, if each program takes `unit` of all steps."""
    is_aligned = steps % unit == 0 or unit % steps == 0
    return (steps + (unit - 1 if is_aligned else 2 * unit - 2)) // unit


def division(hidden: int, held: int, routes: int, programs: int) -> dict[str, int | str]:
    """How steps and rows are divided between programs, and sums read; arguments of alone_kernel.

    held: pairs of slots.
    """
    up_steps, down_steps, down_tiles = hidden // 64, 4 * held, -(-hidden // COLUMNS)
    up_unit = -(-routes * held * up_steps // programs)
    down_unit = -(-routes * down_tiles * down_steps // programs)
    is_aligned = down_unit % 4 == 0 or 4 % down_unit == 0
    pairs = max(1, down_unit // 4) if is_aligned else (down_unit + 2) // 4 + 1  # at most
    spread = pairs > MOST_PAIRS
    at_once = min(-(-routes * held // programs) if spread else pairs, held, 4)
    tiles = 1 << (at_once - 1).bit_length()
    up_parts = -(-_most_parts(up_steps, up_unit) * tiles // 4)
    down_parts = _most_parts(down_steps, down_unit)
    return {
        "TILES": tiles,
        "SPREAD": spread,
        "UP_UNIT": up_unit,
        "DOWN_UNIT": down_unit,
        "UP_RECEIVE": receive(2, min(ptx.AT_ONCE, up_parts), 4 // tiles * ptx.PART_BYTES),
        "UP_ROUNDS": -(-up_parts // ptx.AT_ONCE),
        "DOWN_RECEIVE": receive(4, min(ptx.AT_ONCE, down_parts), ptx.PART_BYTES),
        "DOWN_ROUNDS": -(-down_parts // ptx.AT_ONCE),
    }


def alone(
    x: torch.Tensor,
    layer: LayerWeights,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    topk_weights: torch.Tensor,
    weight_on_input: bool,
    workspace: Workspace,
    out: torch.Tensor,
    pdl: bool,
) -> None:
    """Both products, the activation, and the sum, to out; for calls that `takes` says.

    x: [T, H].   topk_ids, topk_weights: [T, k].   out: [T, H].
    """
    geometry, experts = layer.geometry, layer.geometry.experts
    (tokens, topk), is_bfloat16 = topk_ids.shape, out.dtype == torch.bfloat16
    held, programs = len(layer.slots) // 8, workspace.programs
    compiled = alone_kernel[(programs,)](
        x,
        layer.atoms.view(torch.int32),
        labels(out.dtype, out.device),
        layer.format_codes,
        layer.activations,
        layer.shared_scales,
        topk_weights,
        topk_ids,
        topk_ids if expert_map is None else expert_map,
        workspace.counts,
        workspace.calls,
        workspace.sent[0],
        workspace.sent_rows,
        workspace.sent[1],
        out,
        layer.layer,
        layer.slots.start // 8,
        experts if expert_map is None else len(expert_map),
        experts,
        HIDDEN=geometry.hidden,
        BUNDLE=geometry.bundle_bytes,
        SLOT_STRIDE=layer.atoms.shape[1],
        PAIRS=geometry.pairs,
        HELD=held,
        TOPK=topk,
        TOKENS=tokens,
        SCALE_ROWS=layer.shared_scales.shape[1],
        INPUTS=layer.traits.inputs,
        BETA=SITU_BETA,
        LINEAR_BETA=SITU_LINEAR_BETA,
        WEIGH="input" if weight_on_input else "output",
        UNIFORM=layer.traits.uniform,
        HAS_MAP=expert_map is not None,
        CHOICES=1 << (topk - 1).bit_length(),
        PROGRAMS=programs,
        STEP=step(arithmetic_pairs(layer, topk_ids), is_bfloat16, ptx.LABELS),
        PRODUCTS=products(is_bfloat16),
        PDL=pdl,
        **division(geometry.hidden, held, tokens * topk, programs),
        num_warps=32,
        launch_cooperative_grid=True,
        **dependent(pdl),
    )
    check_shared(compiled.metadata.shared, SHARED_BYTES)
