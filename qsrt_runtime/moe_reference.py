"""moe_forward in plain torch, float32: what every kernel is held to.

The rotations are applied to the activations and never to the weights, so that no dense expert
is built: each record's tiles are decoded, used and dropped.
"""

import torch

from qsrt_runtime.arguments import check_arguments, check_ids, check_types, padded_rows
from qsrt_runtime.format.atom import Expert, Matrix
from qsrt_runtime.format.decode import record_tiles
from qsrt_runtime.format.geometry import RECORD
from qsrt_runtime.format.manifest import ACTIVATIONS, SITU_BETA, SITU_LINEAR_BETA
from qsrt_runtime.format.rotation import rotate
from qsrt_runtime.format.slab import unpack_expert
from qsrt_runtime.mxfp8 import dequantize_rows, quantize_rows
from qsrt_runtime.weights import LayerWeights


@torch.no_grad()
def moe_forward_reference(
    x: torch.Tensor,
    layer: LayerWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    expert_map: torch.Tensor | None = None,
    weight_on_input: bool = False,
    activation: str = "a16",
) -> torch.Tensor:
    """The routed experts' output, each row's contributions summed in float32.

    x: [T, width] float32, float16 or bfloat16, see LayerWeights.
    topk_ids: [T, k] int32 or int64, expert ids; -1 takes part in nothing.
    topk_weights: [T, k] floating.
    expert_map: [n] int32 or int64; topk_ids are then places in it, and what stands there is the
    layer's expert, or -1 for one that is owned elsewhere.
    weight_on_input: a route's weight multiplies its row before the first product instead of its
    result after the last, for any k.
    activation: "a16" rounds nothing; "a8" takes both products' rows as mxfp8 makes them of the
    rotated ones (W4A8). A row is then made once for all its routes, and weight_on_input multiplies
    what the first product gives.
    Returns [T, width] in x's dtype, without a gradient: the whole sum, or the share of the layer's
    pairs in it when the layer holds only some.
    Raises ValueError for shapes, devices, ids or an activation that do not fit, TypeError for
    dtypes, FormatError for an expert that this version does not run (X4T).
    """
    if activation not in ("a16", "a8"):
        raise ValueError(f"activation is {activation!r}, expected 'a16' or 'a8'")
    check_types(x=x)
    x = padded_rows(x, layer)
    check_arguments(x, layer, topk_ids, topk_weights, expert_map)
    experts = layer.geometry.experts
    check_ids(topk_ids, experts if expert_map is None else len(expert_map), "topk_ids")
    if expert_map is not None:
        check_ids(expert_map, experts, "expert_map")
        topk_ids = torch.cat([expert_map, expert_map.new_tensor([-1])])[topk_ids]  # the last for -1
    with torch.autocast(x.device.type, enabled=False):
        out = _forward(x, layer, topk_ids, topk_weights, weight_on_input, activation == "a8")
    return out[:, : layer.width].contiguous() if layer.hidden_padding else out


def _forward(
    x: torch.Tensor,
    layer: LayerWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weight_on_input: bool,
    a8: bool,
) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in topk_ids.unique().tolist():
        if expert < 0:
            continue
        rows, choices = (topk_ids == expert).nonzero(as_tuple=True)
        weights = topk_weights[rows, choices].float()[:, None]
        coded = unpack_expert(layer, expert)
        activation = ACTIVATIONS[int(layer.activations[expert])]
        given = x[rows].float()
        if not weight_on_input:
            y = expert_forward_reference(given, coded, activation, a8=a8) * weights
        elif a8:
            y = expert_forward_reference(given, coded, activation, a8=True, factors=weights)
        else:
            y = expert_forward_reference(given * weights, coded, activation)
        out.index_add_(0, rows, y)
    return out.to(x.dtype)


def expert_forward_reference(
    x: torch.Tensor,
    expert: Expert,
    activation: str,
    *,
    a8: bool = False,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """One expert, or some of its pairs, on rows x [n, H] float32 -> [n, H] float32.

    a8: the products take quantized rows.   factors: [n, 1], of gate and up, or None.
    """
    gate, up = (matmul_reference(x, m, "out", a8=a8) for m in (expert.w1, expert.w3))
    if factors is not None:
        gate, up = gate * factors, up * factors
    return matmul_reference(activation_reference(activation, gate, up), expert.w2, "in", a8=a8)


def activation_reference(name: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """What stands between the products: SiLU or SiTU of float32 tensors of one shape."""
    if name == "silu":
        return torch.nn.functional.silu(gate) * up
    gate = SITU_BETA * torch.tanh(gate / SITU_BETA) * torch.sigmoid(gate)
    return gate * (SITU_LINEAR_BETA * torch.tanh(up / SITU_LINEAR_BETA))


def matmul_reference(
    x: torch.Tensor, matrix: Matrix, rate_axis: str, *, a8: bool = False
) -> torch.Tensor:
    """x W for x [n, K] float32: ((((x * suh) B) T) B) * svh, record by record -> [n, N].

    a8: T's rows are quantized, see mxfp8.
    """
    rotated = rotate(x * matrix.suh.to(x.device).float())
    if a8:
        rotated = dequantize_rows(*quantize_rows(rotated))
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
