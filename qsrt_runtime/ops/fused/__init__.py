"""A few tokens in one launch or three, on GPUs whose multiprocessors have 227 KB to share."""

import torch

from qsrt_runtime.format.manifest import SITU_BETA, SITU_LINEAR_BETA
from qsrt_runtime.ops.fused.kernel import fused_kernel
from qsrt_runtime.ops.fused.product import SHARED_BYTES, products, step
from qsrt_runtime.ops.launch import dependent, labels
from qsrt_runtime.ops.warps import check_shared
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import ALONE_TOKENS, Workspace

MAX_TOPK = 32  # a warp each
# Of a call's routes; on an H200 1.0e8 gain by one launch, 1.5e8 lose (bench_decode.py --variants).
MAX_WEIGHTS = 1 << 27


def is_small(layer: LayerWeights, topk_ids: torch.Tensor) -> bool:
    """Whether a call is quicker in one launch than in three."""
    geometry = layer.geometry
    return 3 * geometry.hidden * geometry.intermediate * topk_ids.numel() <= MAX_WEIGHTS


def makes_rows(layer: LayerWeights, topk_ids: torch.Tensor) -> bool:
    """Whether a call needs no prepare: each program makes the rows, and routes are not grouped.

    An expert of both of two tokens is decoded twice then, which costs more than prepare where
    experts are large.
    """
    alone = ALONE_TOKENS if is_small(layer, topk_ids) else 1
    return len(topk_ids) <= alone and layer.traits.inputs > 0


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
    one = is_small(layer, topk_ids)
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
        STEP=step(is_bfloat16),
        PRODUCTS=products(is_bfloat16),
        FIRST=first,
        LAST=last,
        PDL=pdl,
        num_warps=32,
        launch_cooperative_grid=one,
        **dependent(pdl),
      )
      check_shared(compiled.metadata.shared, SHARED_BYTES)
