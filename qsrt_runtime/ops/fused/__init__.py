"""A few tokens in one launch or three, on GPUs whose multiprocessors have 227 KB to share."""

import torch

from qsrt_runtime.format.geometry import ATOM
from qsrt_runtime.format.manifest import SITU_BETA, SITU_LINEAR_BETA
from qsrt_runtime.ops.fused.alone import alone as by_alone
from qsrt_runtime.ops.fused.kernel import fused_kernel
from qsrt_runtime.ops.fused.product import SHARED_BYTES, arithmetic_pairs, products, step
from qsrt_runtime.ops.launch import dependent, labels
from qsrt_runtime.ops.warps import check_shared
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import ALONE_TOKENS, Workspace

MAX_TOPK = 32  # a warp each
# Weights of a call's routes up to which one launch is best, and three (bench_decode.py --variants).
# On an H200 one gains at 2.5e7 and loses at 3.8e7; three gain at 7.0e8, and at 1.2e9 no more.
ONE_LAUNCH_WEIGHTS = 1 << 25
THREE_LAUNCH_WEIGHTS = 1 << 30
# Weights from which on a program's steps are many, see products: what is 2 to 4 % quicker at 1.2e9
# and 1 % at 3.0e8 loses 0.5 us at 3.8e7, on an H200.
LONG_WEIGHTS = 1 << 28
MAX_ROWS = 12288  # channels of the rows that each program makes, a round of its warps


def launches(layer: LayerWeights, topk_ids: torch.Tensor) -> int:
    """In how many launches a call is quickest: 1 or 3, see fused_kernel; or 0, by others.

    All routes count, also those to experts that are not held here.
    """
    weights = _weights(layer, topk_ids)
    if topk_ids.shape[1] > MAX_TOPK or weights > THREE_LAUNCH_WEIGHTS:
        return 0
    return 1 if weights <= ONE_LAUNCH_WEIGHTS else 3


def _weights(layer: LayerWeights, topk_ids: torch.Tensor) -> int:
    """Of a call's routes."""
    return 3 * layer.geometry.hidden * ATOM * len(layer.slots) * topk_ids.numel()


def makes_rows(layer: LayerWeights, topk_ids: torch.Tensor) -> bool:
    """Whether a call needs no prepare: each program makes the rows, and routes are not grouped.

    An expert of both of two tokens is decoded twice then, which costs more than prepare where
    experts are large.
    """
    tokens = len(topk_ids)
    most = ALONE_TOKENS if launches(layer, topk_ids) == 1 else 1
    few = tokens <= most and tokens * layer.geometry.hidden <= MAX_ROWS
    return few and layer.traits.inputs > 0


def fused(
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
    """Both products, the activation, and the sum, to out.

    x: [T, H]; prepare has made rows and map of it unless makes_rows.
    topk_ids, topk_weights: [T, k], k at most MAX_TOPK.   out: [T, H].
    """
    geometry, experts = layer.geometry, layer.geometry.experts
    tokens, topk = topk_ids.shape
    by_route = layer.traits.inputs == 0
    divisor = 1 if by_route else topk
    is_bfloat16, alone = out.dtype == torch.bfloat16, makes_rows(layer, topk_ids)
    one = launches(layer, topk_ids) == 1
    if one and alone:
        by_alone(x, layer, topk_ids, expert_map, topk_weights, weight_on_input, workspace, out, pdl)
        return
    for first, last in ((0, 2),) if one else ((0, 0), (1, 1), (2, 2)):
        compiled = fused_kernel[(workspace.programs,)](
            x,
            workspace.rotated,
            layer.atoms.view(torch.int32),
            labels(out.dtype, out.device),
            layer.format_codes,
            layer.activations,
            layer.shared_scales,
            topk_weights,
            topk_ids,
            topk_ids if expert_map is None else expert_map,
            workspace.counts,
            workspace.arrivals,
            workspace.block_experts,
            workspace.block_routes,
            workspace.route_places,
            workspace.partial[0],
            workspace.middle,
            workspace.partial[1],
            out,
            layer.layer,
            layer.slots.start // 8,
            0 if layer.traits.inputs == 1 else tokens * topk // divisor,  # rows from gate's to up's
            tokens,
            experts if expert_map is None else len(expert_map),
            experts,
            HIDDEN=geometry.hidden,
            BUNDLE=geometry.bundle_bytes,
            SLOT_STRIDE=layer.atoms.shape[1],
            PAIRS=geometry.pairs,
            HELD=len(layer.slots) // 8,
            DIVISOR=divisor,
            TOPK=topk,
            CHOICES=1 << (topk - 1).bit_length(),
            SCALE_ROWS=layer.shared_scales.shape[1],
            INPUTS=layer.traits.inputs if alone else 0,
            BY_ROUTE=by_route,
            BETA=SITU_BETA,
            LINEAR_BETA=SITU_LINEAR_BETA,
            WEIGH="input" if weight_on_input else "output",
            UNIFORM=layer.traits.uniform,
            TOKENS=tokens if alone or tokens == 1 else 0,
            HAS_MAP=expert_map is not None,
            PROGRAMS=workspace.programs,
            STEP=step(arithmetic_pairs(layer, topk_ids), is_bfloat16),
            PRODUCTS=products(is_bfloat16),
            LONG=_weights(layer, topk_ids) >= LONG_WEIGHTS,
            FIRST=first,
            LAST=last,
            PDL=pdl,
            num_warps=32,
            launch_cooperative_grid=one,
            **dependent(pdl),
        )
        check_shared(compiled.metadata.shared, SHARED_BYTES)
