"""What stands between the two products."""

import torch

from qsrt_runtime.format.manifest import SITU_BETA, SITU_LINEAR_BETA
from qsrt_runtime.ops.activate.kernel import activate_kernel
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import Workspace


def activate(
    layer: LayerWeights,
    weights: torch.Tensor | None,
    routes: int,
    workspace: Workspace,
    pdl: bool,
) -> None:
    """Sums of gate and up, rotation, scales, activation, scales, rotation: rows for down.

    weights: [T, k], factors of gate and up, or None.   routes: T k.
    """
    pairs = len(layer.slots) // 8
    activate_kernel[(routes, pairs)](
        workspace.partial,
        layer.atoms,
        layer.activations,
        layer.activations if weights is None else weights,
        workspace.counts,
        workspace.block_experts,
        workspace.route_places,
        workspace.middle,
        workspace.programs,
        HIDDEN=layer.geometry.hidden,
        BUNDLE=layer.geometry.bundle_bytes,
        SLOT_STRIDE=layer.atoms.shape[1],
        PAIRS=pairs,
        BETA=SITU_BETA,
        LINEAR_BETA=SITU_LINEAR_BETA,
        WEIGH=weights is not None,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
