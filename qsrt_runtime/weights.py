"""One rank's part of one layer's packed experts, ready to run."""

from dataclasses import dataclass

import torch

from qsrt_runtime.format.slab import Slab


@dataclass(frozen=True)
class LayerWeights(Slab):
    """The stored bytes of one layer on a device, and what its experts do between the matrices.

    slots: whole pairs; a rank that owns some of them computes its share of the sum over ranks.
    activations: [E] uint8, the place of each expert's activation in format.manifest.ACTIVATIONS.
    """

    activations: torch.Tensor
