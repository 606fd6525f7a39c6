"""One layer's packed experts, ready to run."""

from dataclasses import dataclass

from qsrt_runtime.format.container import Layer
from qsrt_runtime.format.geometry import Geometry


@dataclass(frozen=True)
class LayerWeights:
    """The stored bytes of one layer and what its experts do between the matrices.

    stored: the layer file's content, slab [I/32, slot stride] uint8 included.
    activations: "silu" or "situ" for each expert.
    situ_beta, situ_linear_beta: beta and lin of
        SiTU(g, u) = beta tanh(g / beta) sigmoid(g) * lin tanh(u / lin).
    """

    stored: Layer
    activations: tuple[str, ...]
    situ_beta: float
    situ_linear_beta: float

    @property
    def geometry(self) -> Geometry:
        return self.stored.geometry
