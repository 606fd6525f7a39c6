"""The sizes of the layers that are measured."""

import re
from dataclasses import dataclass

from qsrt_runtime.format.geometry import Geometry, TrueSizes

# hidden size H, intermediate size I, experts E, experts of a token k
SHAPES = {
    "fruit": (1024, 512, 256, 8),
    "qwen30b": (2048, 768, 128, 8),
    "glm": (6144, 2048, 32, 8),
    "mixtral": (4096, 14336, 8, 2),
}
_EXAMPLE = "H=2048,I=768,E=128,k=8"


@dataclass(frozen=True)
class Shape:
    """geometry: as stored.   sizes: as the model has them.   topk: experts a token goes to."""

    geometry: Geometry
    sizes: TrueSizes
    topk: int

    @property
    def dense_bytes(self) -> int:
        """Of a layer's experts in a type of 2 bytes."""
        return 2 * self.geometry.experts * self.sizes.weights_per_expert

    @property
    def packed_bytes(self) -> int:
        """Of a layer's slab."""
        return self.geometry.slots * self.geometry.slot_stride(self.geometry.experts)


def parse_shape(text: str) -> Shape | None:
    """The sizes that a name of SHAPES or a text as H=2048,I=768,E=128,k=8 stands for.

    None for any other text, which names a package. Raises ValueError for sizes that are missing,
    twice there, or none that a layer has.
    """
    if text in SHAPES:
        return _shape(*SHAPES[text])
    if not re.match(r"\w+=", text):
        return None
    parts = [part.partition("=") for part in text.split(",")]
    found = {name: value for name, _, value in parts}
    if len(found) < len(parts) or found.keys() != set("HIEk"):
        raise ValueError(f"{text!r} does not state H, I, E and k once each, as {_EXAMPLE} does")
    if not all(re.fullmatch("[1-9][0-9]{0,8}", value) for value in found.values()):
        raise ValueError(f"{text!r}: sizes are whole numbers from 1 on, as in {_EXAMPLE}")
    return _shape(*(int(found[name]) for name in "HIEk"))


def _shape(hidden: int, intermediate: int, experts: int, topk: int) -> Shape:
    geometry = Geometry(hidden, intermediate, experts)
    if topk > experts:
        raise ValueError(f"k is {topk}, and there are {experts} experts")
    return Shape(geometry, TrueSizes(hidden, intermediate), topk)
