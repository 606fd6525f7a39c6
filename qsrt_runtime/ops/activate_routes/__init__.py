"""What stands between the two products of many rows."""

import torch

from qsrt_runtime.format.manifest import SITU_BETA, SITU_LINEAR_BETA
from qsrt_runtime.ops.activate_routes.kernel import activate_routes_kernel
from qsrt_runtime.ops.activate_routes.warps.kernel import activate_routes_warps_kernel
from qsrt_runtime.ops.launch import dependent
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import PrefillWorkspace


def activate_routes(
    layer: LayerWeights,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    weights: torch.Tensor | None,
    workspace: PrefillWorkspace,
    by_warps: bool,
    beside: bool,
) -> None:
    """Rotation, scales, activation, scales, rotation of the sums: rows for down.

    weights: [T, k], factors of gate and up, or None.   by_warps: see launching.ways.
    beside: it runs beside the launch before, by warps.
    """
    pairs, experts = len(layer.slots) // 8, layer.geometry.experts
    kernel, grid, warps = activate_routes_kernel, (topk_ids.numel(), pairs), 4
    options = {}
    if by_warps:
        kernel, warps = activate_routes_warps_kernel, 4 if pairs <= 2 else 8
        grid = (topk_ids.numel(), -(-2 * pairs // warps))
        options = {"WARPS": warps, "BESIDE": beside, **dependent(beside)}
    kernel[grid](
        workspace.sums,
        layer.atoms,
        layer.activations,
        layer.activations if weights is None else weights,
        topk_ids,
        topk_ids if expert_map is None else expert_map,
        workspace.middle,
        experts if expert_map is None else len(expert_map),
        experts,
        BUNDLE=layer.bundle_bytes,
        LOCAL=layer.local_offset,
        SLOT_STRIDE=layer.atoms.shape[1],
        PAIRS=pairs,
        BETA=SITU_BETA,
        LINEAR_BETA=SITU_LINEAR_BETA,
        WEIGH=weights is not None,
        HAS_MAP=expert_map is not None,
        num_warps=warps,
        **options,
    )
