"""The output of many tokens from the sums of down."""

import torch

from qsrt_runtime.ops.combine_routes.kernel import combine_routes_kernel
from qsrt_runtime.ops.combine_routes.warps import combine_routes_warps_kernel
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import PrefillWorkspace

WARPS = 4


def combine_routes(
    layer: LayerWeights,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    weights: torch.Tensor | None,
    workspace: PrefillWorkspace,
    out: torch.Tensor,
    by_warps: bool,
) -> None:
    """Sum each token's routes, rotate and scale.

    weights: [T, k], factors of the routes' results, or None.   out: [T, H], contiguous.
    by_warps: see launching.ways.
    """
    hidden, experts = layer.geometry.hidden, layer.geometry.experts
    tensors = (
        workspace.down_sums,
        layer.shared_scales[2],
        layer.activations if weights is None else weights,
        topk_ids,
        topk_ids if expert_map is None else expert_map,
        out,
    )
    options = {}
    if by_warps:
        kernel, grid = combine_routes_warps_kernel, (-(-len(out) * (hidden // 128) // WARPS),)
        tensors += (len(out),)
        options = {"WARPS": WARPS}
    else:
        kernel, grid = combine_routes_kernel, (len(out), -(-hidden // 256))
    kernel[grid](
        *tensors,
        experts if expert_map is None else len(expert_map),
        experts,
        HIDDEN=hidden,
        SCALE_ROWS=layer.shared_scales.shape[1],
        TOPK=topk_ids.shape[1],
        BY_ROUTE=layer.traits.inputs == 0,
        WEIGH=weights is not None,
        HAS_MAP=expert_map is not None,
        num_warps=WARPS,
        **options,
    )
