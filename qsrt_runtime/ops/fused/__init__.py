"""A few tokens in three launches, on GPUs whose multiprocessors have 227 KB to share."""

import torch

from qsrt_runtime.format.geometry import ATOM
from qsrt_runtime.format.manifest import SITU_BETA, SITU_LINEAR_BETA
from qsrt_runtime.ops.fused.ends.output import MAX_TOPK
from qsrt_runtime.ops.fused.kernel import fused_kernel
from qsrt_runtime.ops.fused.product import SHARED_BYTES, arithmetic_pairs, products, step
from qsrt_runtime.ops.launch import dependent, labels
from qsrt_runtime.ops.warps import check_shared
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import Workspace

# Weights of a call's routes up to which three launches are best (bench_decode.py --variants): on an
# H200 they gain at 7.0e8, and at 1.2e9 no more.
THREE_LAUNCH_WEIGHTS = 1 << 30
# Weights from which on a program's steps are many, see products: what is 2 to 4 % quicker at 1.2e9
# and 1 % at 3.0e8 loses 0.5 us at 3.8e7, on an H200.
LONG_WEIGHTS = 1 << 28


def takes(layer: LayerWeights, topk_ids: torch.Tensor) -> bool:
    """Whether a call is quicker in three launches than in five.

    All routes count, also those to experts that are not held here.
    """
    return topk_ids.shape[1] <= MAX_TOPK and _weights(layer, topk_ids) <= THREE_LAUNCH_WEIGHTS


def _weights(layer: LayerWeights, topk_ids: torch.Tensor) -> int:
    """Of a call's routes."""
    return 3 * layer.geometry.hidden * ATOM * len(layer.slots) * topk_ids.numel()


def fused(
    layer: LayerWeights,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    topk_weights: torch.Tensor,
    weight_on_input: bool,
    workspace: Workspace,
    out: torch.Tensor,
    pdl: bool,
) -> None:
    """Both products, the activation, and the sum, to out, of prepare's rows and map.

    topk_ids, topk_weights: [T, k], k at most MAX_TOPK.   out: [T, H].
    """
    geometry, experts = layer.geometry, layer.geometry.experts
    tokens, topk = topk_ids.shape
    by_route = layer.traits.inputs == 0
    divisor = 1 if by_route else topk
    is_bfloat16 = out.dtype == torch.bfloat16
    for stage in range(3):
        compiled = fused_kernel[(workspace.programs,)](
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
            BY_ROUTE=by_route,
            BETA=SITU_BETA,
            LINEAR_BETA=SITU_LINEAR_BETA,
            WEIGH="input" if weight_on_input else "output",
            UNIFORM=layer.traits.uniform,
            SINGLE=tokens == 1,
            HAS_MAP=expert_map is not None,
            PROGRAMS=workspace.programs,
            STEP=step(arithmetic_pairs(layer, topk_ids), is_bfloat16),
            PRODUCTS=products(is_bfloat16),
            LONG=_weights(layer, topk_ids) >= LONG_WEIGHTS,
            STAGE=stage,
            PDL=pdl,
            num_warps=32,
            **dependent(pdl),
        )
        check_shared(compiled.metadata.shared, SHARED_BYTES)
