"""What stands between the two products."""

import torch

from qsrt_runtime.format.manifest import SITU_BETA, SITU_LINEAR_BETA
from qsrt_runtime.ops.activate.kernel import activate_kernel
from qsrt_runtime.ops.launch import dependent
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import Workspace, quantized


def activate(
    layer: LayerWeights,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    weights: torch.Tensor | None,
    workspace: Workspace,
    places: int,
    pdl: bool,
    a8: torch.dtype | None = None,
) -> None:
    """Sums of gate and up, rotation, scales, activation, scales, rotation: rows for down.

    weights: [T, k], factors of gate and up, or None.   places: of a block of routes.
    a8: as prepare's.
    """
    middle, exponents = workspace.middle, workspace.middle
    if a8:
        middle, exponents = quantized(workspace.middle, a8)
    pairs, experts = len(layer.slots) // 8, layer.geometry.experts
    activate_kernel[(topk_ids.numel(), pairs)](
        workspace.partial,
        layer.atoms,
        layer.activations,
        layer.activations if weights is None else weights,
        topk_ids,
        topk_ids if expert_map is None else expert_map,
        workspace.counts,
        workspace.block_experts,
        workspace.route_places,
        middle,
        exponents,
        workspace.programs,
        experts if expert_map is None else len(expert_map),
        experts,
        HIDDEN=layer.geometry.hidden,
        BUNDLE=layer.bundle_bytes,
        LOCAL=layer.local_offset,
        SLOT_STRIDE=layer.atoms.shape[1],
        PAIRS=pairs,
        TOPK=topk_ids.shape[1],
        BETA=SITU_BETA,
        LINEAR_BETA=SITU_LINEAR_BETA,
        WEIGH=weights is not None,
        PLACES=places,
        SINGLE=len(topk_ids) == 1,
        PARTS=8 if len(topk_ids) == 1 else 2,
        HAS_MAP=expert_map is not None,
        QUANTIZED=a8 is not None,
        PDL=pdl,
        num_warps=4,
        **dependent(pdl),
    )
