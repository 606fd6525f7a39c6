"""From the source's tensors to packed experts, on one device or several."""

import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from qsrt_pack.assemble.layer import expert_evidence
from qsrt_pack.calibrate.hessian import layer_moment
from qsrt_pack.calibrate.statistics import PARTS, LayerRows, most_rows
from qsrt_pack.encode import lockstep
from qsrt_pack.encode.expert import (
    EncodedExpert,
    MatrixError,
    Modes,
    Settings,
    expert_steps,
)
from qsrt_pack.encode.incoherence import layer_scales
from qsrt_pack.encode.matrix import HiddenSide
from qsrt_pack.encode.ordered import one_thread, ordered_mean_square, ordered_sum
from qsrt_pack.encode.padding import unpad_matrices
from qsrt_pack.encode.viterbi import search
from qsrt_pack.guide import ACTIVATIONS, UNGUIDED, Guided, make_guide, row_bytes
from qsrt_pack.ranks import Ranks
from qsrt_pack.source.checkpoint import Checkpoint, read_weight
from qsrt_pack.source.models import RoutedExperts
from qsrt_pack.workers import THREADS, device_failure, in_order, is_out_of_memory
from qsrt_runtime.format import atom, decode
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import TrueSizes

_BATCH_WEIGHTS = 1 << 25  # encoded together on a GPU, so that small experts fill it
_BATCH_ROW_BYTES = 1 << 32  # of what calibration takes of the experts of a batch
_BYTES_PER_WEIGHT = 80  # of GPU memory at the peak, all rate modes tried
_ALIKE = 8  # binary orders of magnitude from the layer's median within which experts share
_PAIRED = 4  # the same between gate and up, which share too; their scales are float16


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
    rows: LayerRows | None = None,
) -> Iterator[PackedExpert]:
    """Read, encode and pack all experts of a layer, in their order.

    rows: what calibration knows of the layer.
    On ranks but the first: this rank's share, sent to the first; yields nothing.
    """
    calibrated = row_bytes(experts.geometry, most_rows(rows)) if rows is not None else 0
    batches = _batches(experts, settings, calibrated)
    threads = _threads(experts, devices[0], len(batches[0]), calibrated)
    hidden: dict[int, HiddenSide] = {}
    if settings.hidden_side == "layer":
        measure = partial(_measure, checkpoint, experts, layer)
        parts = ranks.deal(batches, lambda own: in_order(measure, own, devices, threads))
        sizes = [size for part in parts for size in part]
        hidden = ranks.told(_hidden_sides(sizes) if ranks.is_first else None)
    work = partial(_produce, checkpoint, experts, settings, hidden, layer, rows)
    for batch in ranks.deal(batches, lambda own: in_order(work, own, devices, threads)):
        yield from batch


def _batches(experts: RoutedExperts, settings: Settings, calibrated: int) -> list[range]:
    """Experts that are encoded together: on a GPU enough to fill it, else one.

    calibrated: bytes of what calibration knows of an expert.
    """
    count, weights = experts.geometry.experts, experts.geometry.weights_per_expert
    size = 1 if settings.device == "cpu" else -(-_BATCH_WEIGHTS // weights)
    if calibrated:
        size = max(1, min(size, _BATCH_ROW_BYTES // calibrated))
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def _threads(experts: RoutedExperts, device: torch.device, batch: int, calibrated: int) -> int:
    """Threads whose batches fit into three quarters of a GPU's memory, at least one."""
    if device.type == "cpu":
        return 1
    memory = torch.cuda.get_device_properties(device).total_memory
    expert = experts.geometry.weights_per_expert * _BYTES_PER_WEIGHT + calibrated
    each = batch * expert + memory // 16
    return max(1, min(THREADS, memory * 3 // 4 // each))


@dataclass(frozen=True)
class _Sizes:
    """What decides the layer's hidden side.

    rows: of w1 and of w3 the mean square of every hidden channel, [H] float64, on the CPU.
    means: the mean squares of w1, w3 and w2.
    """

    rows: list[torch.Tensor]
    means: list[float]


def _weights(
    checkpoint: Checkpoint,
    experts: RoutedExperts,
    layer: int,
    expert: int,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """The three matrices of an expert, float32 on a device."""
    places = {m: experts.weight(layer, expert, m) for m in atom.MATRICES}
    blocks = {place.block for place in places.values()}
    found = {block: read_weight(checkpoint, *block, device) for block in blocks}
    return {m: place.of(found[place.block]).contiguous() for m, place in places.items()}


def _where(layer: int, numbers: range) -> str:
    return f"layer {layer} experts {numbers[0]} to {numbers[-1]}"


@contextmanager
def _device_errors(layer: int, numbers: range, device: torch.device) -> Iterator[None]:
    """A device's memory that is too small and what CUDA reports, as errors of one line."""
    where = _where(layer, numbers)
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise FormatError(
                f"{where}: {device} has too little memory; give another with --devices"
            ) from error
        reason = device_failure(error)
        if reason is None:
            raise
        raise FormatError(  # a device's failure can be reported to those who work on another
            f"{where}: {reason}, reported on {device}; if it comes again, give others than the "
            "failing device with --devices"
        ) from error


def _measure(
    checkpoint: Checkpoint,
    experts: RoutedExperts,
    layer: int,
    numbers: range,
    device: torch.device,
) -> list[_Sizes]:
    """Of some experts of a layer."""
    found = []
    with _device_errors(layer, numbers, device):
        for expert in numbers:
            weights = _weights(checkpoint, experts, layer, expert, device)
            rows = [ordered_mean_square(weights[matrix].T).cpu() for matrix in ("w1", "w3")]
            means = [float(ordered_sum(power)) / len(power) for power in rows]
            means.append(ordered_mean_square(weights["w2"].flatten()).item())
            found.append(_Sizes(rows, means))
    return found


def _hidden_sides(sizes: list[_Sizes]) -> dict[int, HiddenSide]:
    """What the experts share, by expert; one far larger or smaller than most keeps its own.

    So do all where gate is far larger or smaller than up.
    """
    middle = [_median([size.means[matrix] for size in sizes]) for matrix in range(3)]
    if abs(math.log2(middle[0] / middle[1])) > 2 * _PAIRED:
        return {}
    alike = {
        expert
        for expert, size in enumerate(sizes)
        if all(
            not mean or abs(math.log2(mean / most)) <= 2 * _ALIKE
            for mean, most in zip(size.means, middle, strict=True)
        )
    }
    if not alike:
        return {}
    rows = [row for expert in sorted(alike) for row in sizes[expert].rows]
    shared = HiddenSide(layer_scales(rows), middle[2] ** 0.5)
    return dict.fromkeys(alike, shared)


def _median(means: list[float]) -> float:
    """The median of those that are not 0; 1 where all are."""
    return statistics.median_low([mean for mean in means if mean] or [1.0])


def _produce(
    checkpoint: Checkpoint,
    experts: RoutedExperts,
    settings: Settings,
    hidden: dict[int, HiddenSide],
    layer: int,
    rows: LayerRows | None,
    numbers: range,
    device: torch.device,
) -> list[PackedExpert]:
    with _device_errors(layer, numbers, device):
        try:
            shared = {
                expert: replace(side, scales=side.scales.to(device))
                for expert, side in hidden.items()
                if expert in numbers
            }
            weights = {e: _weights(checkpoint, experts, layer, e, device) for e in numbers}
            encode = partial(_encode, settings, layer, weights, shared)
            guides = _guides(experts, rows, layer, weights, held_out=settings.modes == "all")
            encoded = encode(guides)
            if rows is not None and settings.modes == "all":  # again, held back rows included
                modes = {e: (each.coded.mode13, each.coded.mode2) for e, each in encoded.items()}
                guides = _guides(experts, rows, layer, weights, held_out=False)
                encoded = encode(guides, modes)
            width = experts.true_sizes.hidden
            return [_packed(e, found, guides[e], width) for e, found in encoded.items()]
        except MatrixError as error:
            weight = experts.weight(layer, error.expert, error.matrix)
            name = weight.tensor if weight.index is None else f"{weight.tensor}[{weight.index}]"
            shard = checkpoint.path_of(checkpoint.weights[weight.tensor])
            raise FormatError(f"{shard}: tensor {name}: {error.reason}") from error
        except ValueError as error:
            raise FormatError(f"{_where(layer, numbers)}: {error}") from error


def _guides(
    experts: RoutedExperts,
    rows: LayerRows | None,
    layer: int,
    weights: dict[int, dict[str, torch.Tensor]],
    *,
    held_out: bool,
) -> dict[int, Guided]:
    """What calibration says of some experts. held_out: see make_guide."""
    if rows is None:
        return dict.fromkeys(weights, UNGUIDED)
    device = next(iter(weights.values()))["w1"].device
    with one_thread():
        prior = layer_moment(rows, device, PARTS[:1]) if held_out else None
        prior = layer_moment(rows, device) if prior is None else prior
    activation = ACTIVATIONS[experts.activation]
    return {
        e: make_guide(rows, prior, (layer, e), weights[e], activation, held_out=held_out)
        for e in weights
    }


def _encode(
    settings: Settings,
    layer: int,
    weights: dict[int, dict[str, torch.Tensor]],
    hidden: dict[int, HiddenSide],
    guides: dict[int, Guided],
    modes: dict[int, Modes] | None = None,
) -> dict[int, EncodedExpert]:
    """Some experts together. modes: of each, None to choose among the settings'."""
    steps = [
        expert_steps(
            weights[expert],
            layer=layer,
            expert=expert,
            settings=settings,
            hidden=hidden.get(expert),
            guide=guides[expert].guide,
            modes=modes and modes[expert],
        )
        for expert in weights
    ]
    found = lockstep.run(lockstep.together(steps), search)
    return dict(zip(weights, found, strict=True))


def _packed(expert: int, encoded: EncodedExpert, guided: Guided, hidden: int) -> PackedExpert:
    """hidden: the model's own size. Padded intermediate channels add nothing to an output."""
    coded = encoded.coded
    decoded = decode.dense_expert(coded) if guided.guide is not None else {}
    decoded = unpad_matrices(decoded, TrueSizes(hidden, len(coded.w1.svh)))
    groups = encoded.low_to_high_groups.cpu()
    return PackedExpert(
        expert_evidence(
            expert,
            coded,
            groups,
            encoded.nmse,
            encoded.rms,
            functional_nmse=guided.judge(tuple(decoded.values())),
            tokens=guided.tokens,
            fallback=guided.fallback,
        ),
        atom.pack_expert(coded).cpu(),
        coded.shared_scales.cpu(),
        (coded.mode13, coded.mode2),
    )
