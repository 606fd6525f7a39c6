"""What convert will do: sizes, memory and time, before anything is written."""

import shutil
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from qsrt_pack.encode.expert import Settings, modes_tried
from qsrt_pack.encode.matrix import scale_search_weights
from qsrt_pack.encode.viterbi import search
from qsrt_pack.guide import row_bytes
from qsrt_pack.source.census import source_formats
from qsrt_pack.source.checkpoint import Checkpoint
from qsrt_pack.source.models import RoutedExperts, carried_tensors
from qsrt_pack.statistics import Statistics
from qsrt_runtime.format import container, schema
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.format.tensorfile import tensor_bytes

_PROBE_SECONDS = 0.5
# Peak resident bytes were up to 520 MB and 20 float32 copies of one matrix, sources included, at
# 1024 x 512 and at 2048 x 1024; each further rate mode keeps what it decodes to.
_BASE_MEMORY = 520_000_000
_MATRIX_COPIES = 20
_COPIES_TOGETHER = 7  # more where matrices are coded together, under calibration
_COPIES_PER_MODE = 6
_PROBE_TILES = {"cpu": 32, "cuda": 2112}
# Reading, rotating, packing and checking, on two 2.5 GHz cores; on an H200.
_SECONDS_PER_WEIGHT = {"cpu": 2e-6, "cuda": 5e-9, "cuda_plain": 5e-9}
_SEARCH_BYTES = 17_000_000  # costs of the search on one thread, at most
_CALIBRATED = {
    "cpu": 2.5,
    "cuda": 1.8,
    "cuda_plain": 1.8,
}  # times the work without, on the same machines


def make_plan(
    checkpoint: Checkpoint,
    experts: RoutedExperts,
    out: Path,
    settings: Settings,
    loader: str,
    finished: Collection[int] = (),
    devices: tuple[torch.device, ...] = (torch.device("cpu"),),
    statistics: Statistics | None = None,
    carried_as: str = "bf16",
) -> dict[str, Any]:
    """The plan document, schema `plan`. Runs a short probe of the search to tell the time.

    finished: layers that a stopped run has left.   carried_as: see carried_tensors.
    """
    geometry = experts.geometry
    base = carried_tensors(checkpoint, experts, carried_as)
    formats = source_formats(checkpoint, experts)
    base_bytes = sum(tensor_bytes(*spec) for spec in base.values())
    side_bytes = sum((checkpoint.path / name).stat().st_size for name in checkpoint.carried)
    layer_bytes = container.layer_file_bytes(geometry, max(experts.layers))
    methods = {settings.search, "fast" if settings.device == "cpu" else settings.search}
    rates = {method: len(devices) * probe(method, devices[0]) for method in methods}
    memory, slower = memory_bytes(geometry, settings), 1.0
    if statistics is not None:
        memory += statistics.layer_bytes() + row_bytes(geometry, statistics.expert_rows())
        slower = _CALIBRATED[settings.device]
    remaining = len(set(experts.layers) - set(finished))
    weights = experts.true_sizes.weights_per_expert * geometry.experts * len(experts.layers)
    value = {
        "schema": "qsrt_plan_v1",
        "source": str(checkpoint.path),
        "output": str(out),
        "expert_key": experts.naming.template(),
        "expert_formats": formats.experts,
        "carried_formats": formats.carried,
        "carried_as": carried_as,
        "model_type": experts.model_type,
        "layers": list(experts.layers),
        "finished_layers": sorted(finished),
        "experts_per_layer": geometry.experts,
        "topk": experts.topk,
        "hidden_size": geometry.hidden,
        "intermediate_size": geometry.intermediate,
        "atom_slots": geometry.slots,
        "atoms_per_expert": geometry.atoms_per_expert,
        "true_hidden_size": experts.true_sizes.hidden,
        "true_intermediate_size": experts.true_sizes.intermediate,
        "padding_overhead": geometry.weights_per_expert / experts.true_sizes.weights_per_expert,
        "profile": geometry.profile,
        "activation": experts.activation,
        "expert_weights": weights,
        "modes": settings.modes,
        "search": settings.search,
        "hidden_side": settings.hidden_side,
        "seed": settings.seed,
        "loader": loader,
        "devices": [str(device) for device in devices],
        "bytes_in": sum(checkpoint.shard_bytes.values()),
        "bytes_out": layer_bytes * len(experts.layers) + base_bytes + side_bytes,
        "bytes_to_write": layer_bytes * remaining + base_bytes + side_bytes,
        "layer_file_bytes": layer_bytes,
        "base_bytes": base_bytes,
        "memory_bytes": memory,
        "calibration": statistics and str(statistics.path),
        "calibration_bytes": statistics and statistics.total_bytes(),
        "free_disk_bytes": shutil.disk_usage(_existing(out.parent)).free,
        "weights_per_second": rates[settings.search],
        "seconds": slower * remaining * layer_seconds(experts, settings, rates),
        "carried_files": list(checkpoint.carried),
        "left_out_files": list(checkpoint.left_out),
    }
    schema.check(value, "plan", "plan")
    return value


def describe(plan: dict[str, Any]) -> str:
    """A plan on one screen."""
    layers, calibration = plan["layers"], "no"
    if plan["calibration"] is not None:
        calibration = f"by {plan['calibration']}, {plan['calibration_bytes']:,} bytes"
    padding = []
    if plan["padding_overhead"] > 1:
        size = f"{plan['hidden_size']} x {plan['intermediate_size']}"
        more = 100 * (plan["padding_overhead"] - 1)
        padding = [("padded", f"with zeros to {size}: {more:.1f} % more expert bytes")]
    lines = [
        ("model", f"{plan['source']} ({plan['model_type']})"),
        ("stored in", _describe_formats(plan)),
        ("package", plan["output"]),
        (
            "experts",
            f"{len(layers)} layers ({_ranges(layers)}) x {plan['experts_per_layer']}, "
            f"{plan['true_hidden_size']} x {plan['true_intermediate_size']}, "
            f"top-{plan['topk']}, "
            f"{plan['activation']}: {plan['expert_weights']:,} weights",
        ),
        (
            "format",
            f"{plan['atom_slots']} slots, {plan['atoms_per_expert']} atoms an expert, "
            f"modes {plan['modes']}, {plan['search']} search, seed {plan['seed']}, "
            f"on {', '.join(plan['devices'])}",
        ),
        *padding,
        ("calibrated", calibration),
        ("bytes in", f"{plan['bytes_in']:,}"),
        (
            "bytes out",
            f"{plan['bytes_out']:,} ({plan['layer_file_bytes']:,} a layer, "
            f"{plan['base_bytes']:,} carried); {plan['free_disk_bytes']:,} free",
        ),
        ("memory", f"about {plan['memory_bytes'] / 1e9:.1f} GB"),
        (
            "time",
            f"about {plan['seconds']:,.0f} s at {plan['weights_per_second']:,.0f} weights/s",
        ),
    ]
    if plan["finished_layers"]:
        lines.append(("finished", f"layers {_ranges(plan['finished_layers'])}, by a run before"))
    if plan["left_out_files"]:
        lines.append(("not carried", ", ".join(plan["left_out_files"])))
    return "\n".join(f"{name:<12}{value}" for name, value in lines)


def _describe_formats(plan: dict[str, Any]) -> str:
    """`fp8 (experts); 12 other weights in fp8, written as bf16`."""
    text = f"{', '.join(plan['expert_formats'])} (experts)"
    if plan["carried_formats"]:
        how = {
            "bf16": "written as bf16",
            "stored": "carried as they are, for a loader that reads them",
        }
        count, names = sum(plan["carried_formats"].values()), ", ".join(plan["carried_formats"])
        text += f"; {count} other weights in {names}, {how[plan['carried_as']]}"
    return text


def probe(method: str, device: torch.device) -> float:
    """Weights a second of the search at 3 bits on normal noise, measured for half a second."""
    count = _PROBE_TILES[device.type]
    tiles = 1.2 * torch.randn(count, 256, generator=torch.Generator().manual_seed(0))
    tiles = tiles.to(device)
    search(tiles[:1], 3, method)  # compiles
    start, done = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < _PROBE_SECONDS:
        search(tiles, 3, method)[-1, -1].item()  # waits for the device
        done += tiles.numel()
    return done / elapsed


def layer_seconds(experts: RoutedExperts, settings: Settings, rates: dict[str, float]) -> float:
    """Seconds for a layer's experts: the searches at the measured rates, and the rest."""
    geometry = experts.geometry
    shapes = 2 * [(geometry.hidden, geometry.intermediate)]
    shapes += [(geometry.intermediate, geometry.hidden)]
    passes = len(modes_tried(settings, geometry.records))
    each = geometry.weights_per_expert * passes / rates[settings.search]
    each += geometry.weights_per_expert * _SECONDS_PER_WEIGHT[settings.device]
    for shape in shapes:
        coarse, fine = scale_search_weights(*shape)
        each += coarse / rates.get("fast", rates[settings.search]) + fine / rates[settings.search]
    return each * geometry.experts


def memory_bytes(geometry: Geometry, settings: Settings) -> int:
    """Peak memory while encoding: one expert's weights and one matrix's working copies."""
    more = len(modes_tried(settings, geometry.records)) - 1
    copies = _MATRIX_COPIES + _COPIES_PER_MODE * more
    if settings.calibration_sha256 is not None:
        copies += _COPIES_TOGETHER
    matrix = 4 * geometry.hidden * geometry.intermediate
    search = _SEARCH_BYTES * torch.get_num_threads()
    return _BASE_MEMORY + search + copies * matrix


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    return folder if folder.exists() else _existing(folder.parent)


def _ranges(numbers: list[int]) -> str:
    """0, 2, 3, 4 -> `0, 2..4`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("..".join(map(str, part)) for part in parts)
