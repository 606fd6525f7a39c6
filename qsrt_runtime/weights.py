"""One rank's part of one layer's packed experts, ready to run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.rates import MODES
from qsrt_runtime.format.slab import Slab


@dataclass(frozen=True)
class Traits:
    """What all experts of a layer have in common; kernels do less where it is more.

    inputs: rotated rows that a token needs. 0: two for each of its routes; where all experts have
    the same scales on the hidden side, 1 if gate's are also up's, else 2 for all routes.
    uniform: every pair of records is P33.
    """

    inputs: int = 0
    uniform: bool = False


@dataclass(frozen=True)
class LayerWeights(Slab):
    """One layer on a device, as stored or expanded, and what experts do between the matrices.

    slots: whole pairs; a rank that owns some of them computes its share of the sum over ranks.
    layer, geometry: where only a range of the experts is held, from expert f on, they are those of
    a layer of its own, l + 5 f, whose experts stand where these do (Geometry.pair_shift).
    activations: [E] uint8, the place of each expert's activation in format.manifest.ACTIVATIONS.
    traits: see traits_of; the default holds for every layer.
    hidden_padding: how many of the geometry's hidden channels the model does not have; their
    scales are 0, and they follow the others.
    """

    activations: torch.Tensor
    traits: Traits = Traits()
    hidden_padding: int = 0

    @property
    def width(self) -> int:
        """Channels of a token's row, in and out."""
        return self.geometry.hidden - self.hidden_padding


def traits_of(shared_scales: torch.Tensor, format_codes: torch.Tensor) -> Traits:
    """The traits of a layer from its small sections; waits for their device.

    Raises FormatError for format bytes that the kernels do not know, which look at none.
    """
    return _traits(format_codes.cpu(), *_differences(shared_scales).tolist())


def with_traits(layers: Sequence[LayerWeights]) -> list[LayerWeights]:
    """Layers of one package on one device with their traits, as traits_of; waits once for all."""
    if not layers:
        return []
    codes = torch.stack([layer.format_codes for layer in layers])
    differences = torch.stack([_differences(layer.shared_scales) for layer in layers])
    found = zip(layers, codes.cpu(), differences.tolist(), strict=True)
    return [replace(layer, traits=_traits(codes, *by)) for layer, codes, by in found]


def _differences(shared_scales: torch.Tensor) -> torch.Tensor:
    """[2] bool: whether scales differ by expert, and the first expert's for gate and up."""
    bits = shared_scales.view(torch.int16)
    return torch.stack([(bits != bits[:, :1]).any(), (bits[0, 0] != bits[1, 0]).any()])


def _traits(format_codes: torch.Tensor, by_expert: bool, by_matrix: bool) -> Traits:
    """format_codes: on the CPU."""
    if ((format_codes >> 4 > MODES[-1]) | ((format_codes & 15) > MODES[-1])).any():
        raise FormatError("a format byte is X4T or of a later profile; this version runs R0 to R2")
    return Traits(0 if by_expert else 2 if by_matrix else 1, uniform=not format_codes.any())
