"""The layers that calls go through in turn, packed and in bfloat16."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from qsrt_pack.bench.shapes import Shape
from qsrt_runtime.format.atom import Expert
from qsrt_runtime.format.decode import dense_expert
from qsrt_runtime.format.geometry import Geometry, TrueSizes
from qsrt_runtime.format.slab import unpack_expert
from qsrt_runtime.weights import LayerWeights, traits_of

TIMES_L2 = 4  # what calls go through is so many times as large as the L2 cache
MOST_LAYERS = 16


@dataclass(frozen=True)
class DenseLayer:
    """w13: [E, 2 I, H], gate's rows, then up's.   w2: [E, H, I]."""

    w13: torch.Tensor
    w2: torch.Tensor


def layers_in_turn(shape: Shape, l2_bytes: int) -> int:
    """How many packed layers are larger than the L2 cache, by TIMES_L2; at most MOST_LAYERS."""
    return max(1, min(MOST_LAYERS, -(-TIMES_L2 * l2_bytes // shape.packed_bytes)))


def copied(layers: Sequence[LayerWeights], count: int) -> list[LayerWeights]:
    """So many layers: the given ones, then copies of their slabs elsewhere in memory."""
    found = list(layers[:count])
    for number in range(len(found), count):
        layer = layers[number % len(layers)]
        found.append(replace(layer, atoms=layer.atoms.clone()))
    return found


def random_layer(geometry: Geometry, device: torch.device) -> LayerWeights:
    """A layer of random words, with finite scales that all experts share, and SiLU."""
    experts, hidden, size = geometry.experts, geometry.hidden, geometry.bundle_bytes
    generator = torch.Generator(device).manual_seed(0)

    def scales(*shape: int) -> torch.Tensor:
        draw = torch.rand(shape, generator=generator, device=device) + 0.5
        return (draw * (draw * 1024 % 2 - 1).sign() / 16).half()

    shape = (geometry.slots, geometry.slot_stride(experts))
    atoms = torch.empty(shape, dtype=torch.uint8, device=device)
    for slot in atoms:  # one by one, for the memory that drawing takes
        slot.random_(0, 256, generator=generator)
    for expert in range(experts):
        local = slice(expert * size + 36 * hidden, (expert + 1) * size)
        atoms[:, local] = scales(geometry.slots, 96).view(torch.uint8)
    shared = scales(3, 1, hidden)
    shared[1] = shared[0]
    shared = shared.expand(3, experts, hidden).contiguous()
    codes = torch.zeros(experts, dtype=torch.uint8, device=device)
    return LayerWeights(
        layer=0,
        geometry=geometry,
        slots=range(geometry.slots),
        format_codes=codes,
        shared_scales=shared,
        atoms=atoms,
        activations=torch.zeros_like(codes),
        traits=traits_of(shared, codes),
    )


def dense_layer(layer: LayerWeights, sizes: TrueSizes, dtype: torch.dtype) -> DenseLayer:
    """What a packed layer's experts decode to, of the model's own sizes, rounded to a type."""
    experts, inner = layer.geometry.experts, sizes.intermediate
    w13 = torch.empty(experts, 2 * inner, sizes.hidden, dtype=dtype, device=layer.atoms.device)
    w2 = torch.empty(experts, sizes.hidden, inner, dtype=dtype, device=layer.atoms.device)
    for expert in range(experts):
        gate, up, down = _unpadded(unpack_expert(layer, expert), sizes)
        w13[expert, :inner], w13[expert, inner:], w2[expert] = gate, up, down
    return DenseLayer(w13, w2)


def _unpadded(expert: Expert, sizes: TrueSizes) -> tuple[torch.Tensor, ...]:
    """w1 and w3 [I, H], w2 [H, I], without as many channels of no scale as were added."""
    scales = torch.stack([expert.w1.svh, expert.w3.svh, expert.w2.suh])
    kept = scales.any(0).to(torch.uint8).argsort(descending=True, stable=True)
    kept = kept[: sizes.intermediate].sort().values
    dense = dense_expert(expert)
    w1, w3 = (dense[name][kept, : sizes.hidden] for name in ("w1", "w3"))
    return w1, w3, dense["w2"][: sizes.hidden, kept]
