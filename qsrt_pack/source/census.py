"""How many of a checkpoint's weights are in which format."""

from collections import Counter
from dataclasses import dataclass

from qsrt_pack.source.checkpoint import Checkpoint
from qsrt_pack.source.config import RoutedExperts


@dataclass(frozen=True)
class SourceFormats:
    """How many weights are stored in which format.

    experts: of the routed experts' weights.   carried: of the others that are quantized.
    """

    experts: dict[str, int]
    carried: dict[str, int]


def source_formats(checkpoint: Checkpoint, experts: RoutedExperts) -> SourceFormats:
    """Count the formats of a checkpoint."""
    routed, carried = experts.stored(), quantized_carried(checkpoint, experts)
    counts = [Counter(checkpoint.weights[n].format for n in names) for names in (routed, carried)]
    return SourceFormats(*map(dict, counts))


def quantized_carried(checkpoint: Checkpoint, experts: RoutedExperts) -> list[str]:
    """The quantized weights that are no routed expert's."""
    routed = experts.stored()
    weights = checkpoint.weights.items()
    return [name for name, weight in weights if not weight.is_plain and name not in routed]
