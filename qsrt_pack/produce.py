"""From the source's tensors to packed experts, on one device or several."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from qsrt_pack.assemble.layer import expert_evidence
from qsrt_pack.encode import lockstep
from qsrt_pack.encode.expert import EncodedExpert, HiddenSide, Settings, expert_steps
from qsrt_pack.encode.incoherence import layer_scales
from qsrt_pack.encode.ordered import ordered_mean_square
from qsrt_pack.encode.viterbi import search
from qsrt_pack.ranks import Ranks
from qsrt_pack.source.checkpoint import Checkpoint, read_tensor
from qsrt_pack.source.dtypes import to_float32
from qsrt_pack.source.models import RoutedExperts
from qsrt_pack.workers import in_order
from qsrt_runtime.format import atom
from qsrt_runtime.format.errors import FormatError

_BATCH_WEIGHTS = 1 << 25  # encoded together on a GPU, so that small experts fill it


@dataclass(frozen=True)
class PackedExpert:
    """An expert on its way into a layer file, on the CPU.

    entry: its evidence.   bundles, shared_scales, modes: see LayerWriter.write_bundles.
    """

    entry: dict[str, Any]
    bundles: torch.Tensor
    shared_scales: torch.Tensor
    modes: tuple[int, int]


def produce_layer(
    checkpoint: Checkpoint,
    experts: RoutedExperts,
    settings: Settings,
    devices: tuple[torch.device, ...],
    layer: int,
    ranks: Ranks,
) -> Iterator[PackedExpert]:
    """Read, encode and pack all experts of a layer, in their order.

    On ranks but the first: this rank's share, sent to the first; yields nothing.
    """
    batches = _batches(experts, settings)
    hidden = None
    if settings.hidden_side == "layer":
        measure = partial(_row_powers, checkpoint, experts, layer)
        parts = list(ranks.deal(batches, lambda own: in_order(measure, own, devices)))
        powers = [power for part in parts for power in part]
        hidden = HiddenSide(ranks.told(layer_scales(powers) if ranks.is_first else None))
    work = partial(_produce, checkpoint, experts, settings, hidden, layer)
    for batch in ranks.deal(batches, lambda own: in_order(work, own, devices)):
        yield from batch


def _row_powers(
    checkpoint: Checkpoint,
    experts: RoutedExperts,
    layer: int,
    numbers: range,
    device: torch.device,
) -> list[torch.Tensor]:
    """The mean square of every hidden channel of each gate and up matrix: [H] float64."""
    names = [experts.tensor_name(layer, e, matrix) for e in numbers for matrix in ("w1", "w3")]
    weights = (to_float32(read_tensor(checkpoint, name).to(device)) for name in names)
    return [ordered_mean_square(weight.T).cpu() for weight in weights]


def _batches(experts: RoutedExperts, settings: Settings) -> list[range]:
    """Experts that are encoded together: on a GPU enough to fill it, else one."""
    count, weights = experts.geometry.experts, experts.geometry.weights_per_expert
    size = 1 if settings.device == "cpu" else -(-_BATCH_WEIGHTS // weights)
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def _produce(
    checkpoint: Checkpoint,
    experts: RoutedExperts,
    settings: Settings,
    hidden: HiddenSide | None,
    layer: int,
    numbers: range,
    device: torch.device,
) -> list[PackedExpert]:
    if hidden is not None:
        hidden = HiddenSide(hidden.scales.to(device))

    def weights(expert: int) -> dict[str, torch.Tensor]:
        names = {m: experts.tensor_name(layer, expert, m) for m in atom.MATRICES}
        return {
            m: to_float32(read_tensor(checkpoint, name).to(device)) for m, name in names.items()
        }

    steps = [
        expert_steps(weights(expert), layer=layer, expert=expert, settings=settings, hidden=hidden)
        for expert in numbers
    ]
    try:
        encoded = lockstep.run(lockstep.together(steps), search)
    except ValueError as error:
        raise FormatError(str(error)) from error
    return [_packed(expert, found) for expert, found in zip(numbers, encoded, strict=True)]


def _packed(expert: int, encoded: EncodedExpert) -> PackedExpert:
    coded = encoded.coded
    groups = encoded.low_to_high_groups.cpu()
    return PackedExpert(
        expert_evidence(expert, coded, groups, encoded.nmse, encoded.rms),
        atom.pack_expert(coded).cpu(),
        coded.shared_scales.cpu(),
        (coded.mode13, coded.mode2),
    )
