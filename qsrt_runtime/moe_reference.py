"""moe_forward in plain torch, float32: what every kernel is held to.

The rotations are applied to the activations and never to the weights, so that no dense expert
is built: each record's tiles are decoded, used and dropped.
"""

import torch

from qsrt_runtime.format.atom import Expert, Matrix
from qsrt_runtime.format.container import unpack_expert
from qsrt_runtime.format.decode import record_tiles
from qsrt_runtime.format.geometry import RECORD
from qsrt_runtime.format.rotation import rotate
from qsrt_runtime.weights import LayerWeights


@torch.no_grad()
def moe_forward_reference(
    x: torch.Tensor, layer: LayerWeights, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """The routed experts' output, each row's contributions summed in float32.

    x: [T, H] float32, float16 or bfloat16.   topk_ids: [T, k] int32 or int64, expert ids; -1
    takes part in nothing.   topk_weights: [T, k] floating.
    Returns [T, H] in x's dtype, without a gradient.
    Raises ValueError for shapes or ids that do not fit, TypeError for dtypes, FormatError for an
    expert that this version does not run (X4T).
    """
    _check_arguments(x, layer, topk_ids, topk_weights)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in topk_ids.unique().tolist():
        if expert < 0:
            continue
        rows, choices = (topk_ids == expert).nonzero(as_tuple=True)
        coded = unpack_expert(layer.stored, expert)
        y = expert_forward_reference(x[rows].float(), coded, layer, layer.activations[expert])
        out.index_add_(0, rows, y * topk_weights[rows, choices].float()[:, None])
    return out.to(x.dtype)


def expert_forward_reference(
    x: torch.Tensor, expert: Expert, layer: LayerWeights, activation: str
) -> torch.Tensor:
    """One expert on rows x [n, H] float32 -> [n, H] float32."""
    gate, up = matmul_reference(x, expert.w1, "out"), matmul_reference(x, expert.w3, "out")
    if activation == "silu":
        middle = torch.nn.functional.silu(gate) * up
    else:
        beta, linear = layer.situ_beta, layer.situ_linear_beta
        middle = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
        middle = middle * (linear * torch.tanh(up / linear))
    return matmul_reference(middle, expert.w2, "in")


def matmul_reference(x: torch.Tensor, matrix: Matrix, rate_axis: str) -> torch.Tensor:
    """x W for x [n, K] float32: ((((x * suh) B) T) B) * svh, record by record -> [n, N]."""
    rotated = rotate(x * matrix.suh.to(x.device).float())
    if rate_axis == "out":
        parts = [rotated @ record_tiles(r.to(x.device), "out") for r in matrix.records]
        product = torch.cat(parts, dim=1)
    else:
        rows = rotated.split(RECORD, dim=1)
        product = sum(
            part @ record_tiles(r.to(x.device), "in")
            for part, r in zip(rows, matrix.records, strict=True)
        )
    return rotate(product) * matrix.svh.to(x.device).float()


def _check_arguments(
    x: torch.Tensor, layer: LayerWeights, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> None:
    geometry = layer.geometry
    for name, value in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}, expected a torch tensor")
    if x.ndim != 2 or x.shape[1] != geometry.hidden:
        raise ValueError(f"x has shape {list(x.shape)}, expected [T, {geometry.hidden}]")
    if topk_ids.ndim != 2 or len(topk_ids) != len(x) or topk_ids.shape != topk_weights.shape:
        raise ValueError(
            f"topk_ids {list(topk_ids.shape)} and topk_weights {list(topk_weights.shape)} must "
            f"both be [{len(x)}, k]"
        )
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_ids is {topk_ids.dtype}, expected int32 or int64")
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"x is {x.dtype}, expected float32, float16 or bfloat16")
    if not topk_weights.is_floating_point():
        raise TypeError(f"topk_weights is {topk_weights.dtype}, expected a floating type")
    if topk_ids.numel() and not -1 <= int(topk_ids.min()) <= int(topk_ids.max()) < geometry.experts:
        raise ValueError(
            f"topk_ids lie in {int(topk_ids.min())}..{int(topk_ids.max())}, "
            f"expected -1..{geometry.experts - 1}"
        )
