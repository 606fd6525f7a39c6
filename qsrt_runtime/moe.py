"""moe_forward: the routed experts of a loaded layer as one opaque torch operator."""

import torch

from qsrt_runtime.arguments import check_arguments, check_types, padded_rows
from qsrt_runtime.arithmetic import arithmetic_of, check_known
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.moe_reference import moe_forward_reference
from qsrt_runtime.weights import LayerWeights, Traits


def moe_forward(
    x: torch.Tensor,
    layer: LayerWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    expert_map: torch.Tensor | None = None,
    weight_on_input: bool = False,
    activation: str = "a16",
) -> torch.Tensor:
    """The routed experts' output; arguments, result and errors as moe_forward_reference.

    activation: "a16"; "a8", whose rows are rounded to MXFP8; or "auto", the quicker of the two on
    this GPU. See arithmetic.

    Calls the operator `qsrt::moe_forward`, which torch.compile and graphs see as one node. It
    runs on the stored hidden size: where that is padded, rows get zeros here, and results lose
    them. On CUDA, float16 and bfloat16 go by the kernels, see moe_kernels; everything else runs the
    reference. There an id that names no expert takes part in nothing, and nothing is
    waited for. It has no backward: a result that is asked for a gradient raises RuntimeError, and
    so does torch.compile where x wants one.
    """
    if not isinstance(layer, LayerWeights):
        raise TypeError(
            f"layer is a {type(layer).__name__}, expected one of a package's layers, as "
            "package.layers[0]"
        )
    check_known(activation)
    given = {"x": x, "topk_ids": topk_ids, "topk_weights": topk_weights}
    check_types(**given, **({} if expert_map is None else {"expert_map": expert_map}))
    out = torch.ops.qsrt.moe_forward(
        padded_rows(x, layer),
        topk_ids,
        topk_weights,
        expert_map,
        layer.atoms,
        layer.format_codes,
        layer.shared_scales,
        layer.activations,
        layer.labels,
        layer.layer,
        layer.slots.start,
        layer.geometry.intermediate,
        layer.traits.inputs,
        layer.traits.uniform,
        weight_on_input,
        activation,
    )
    return out[:, : layer.width].contiguous() if layer.hidden_padding else out


@torch.library.custom_op("qsrt::moe_forward", mutates_args=())
def _moe_forward(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
    atoms: torch.Tensor,
    format_codes: torch.Tensor,
    shared_scales: torch.Tensor,
    activations: torch.Tensor,
    labels: torch.Tensor | None,
    layer: int,
    first_slot: int,
    intermediate: int,
    inputs: int,
    uniform: bool,
    weight_on_input: bool,
    activation: str,
) -> torch.Tensor:
    weights = _layer_weights(
        atoms,
        format_codes,
        shared_scales,
        activations,
        labels,
        layer,
        first_slot,
        intermediate,
        inputs,
        uniform,
    )
    if activation != "a16":  # what it takes is told after the arguments, which all ways check
        check_arguments(x, weights, topk_ids, topk_weights, expert_map)
        activation = arithmetic_of(activation, x, weights)
    forward = moe_forward_reference
    if x.device.type == "cuda" and x.dtype in (torch.float16, torch.bfloat16):
        from qsrt_runtime.moe_kernels import moe_forward_kernels as forward  # brings triton
    return forward(
        x,
        weights,
        topk_ids,
        topk_weights,
        expert_map=expert_map,
        weight_on_input=weight_on_input,
        activation=activation,
    )


@_moe_forward.register_fake
def _(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
    *held: torch.Tensor | int | bool | str | None,
) -> torch.Tensor:
    *layer, _weight_on_input, activation = held
    weights = _layer_weights(*layer)
    check_arguments(x, weights, topk_ids, topk_weights, expert_map)
    arithmetic_of(activation, x, weights)
    return x.new_empty(x.shape)


def _no_backward(_context: object, *_gradients: torch.Tensor) -> None:
    raise RuntimeError(
        "packed experts have no backward; run them under torch.no_grad(), or dequantize the model"
    )


_moe_forward.register_autograd(_no_backward)


def _layer_weights(
    atoms: torch.Tensor,
    format_codes: torch.Tensor,
    shared_scales: torch.Tensor,
    activations: torch.Tensor,
    labels: torch.Tensor | None,
    layer: int,
    first_slot: int,
    intermediate: int,
    inputs: int,
    uniform: bool,
) -> LayerWeights:
    """The layer from the operator's arguments."""
    return LayerWeights(
        layer=layer,
        geometry=Geometry(shared_scales.shape[2], intermediate, len(format_codes)),
        slots=range(first_slot, first_slot + len(atoms)),
        format_codes=format_codes,
        shared_scales=shared_scales,
        atoms=atoms,
        activations=activations,
        labels=labels,
        traits=Traits(inputs, uniform),
    )
