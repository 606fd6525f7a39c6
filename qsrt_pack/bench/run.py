"""Measures a layer in all ways, for several numbers of tokens, one after another."""

import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qsrt_pack.assemble.package import library_versions
from qsrt_pack.bench.check import Check, WrongError
from qsrt_pack.bench.inputs import Input, count_calls, experts_of, input_bytes, make_inputs
from qsrt_pack.bench.layers import (
    DenseLayer,
    copied,
    dense_layer,
    layers_in_turn,
    random_layer,
)
from qsrt_pack.bench.machine import Machine, copy_rate
from qsrt_pack.bench.shapes import Shape
from qsrt_pack.bench.ways import Choice, Unavailable, Way, make_ways
from qsrt_runtime.format import schema
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.package import open_package
from qsrt_runtime.load import load_package
from qsrt_runtime.weights import LayerWeights

_REPEATS, _TUNING_REPEATS = 15, 3  # replays
_USABLE = 0.9  # of the free memory; the rest is for graphs, what torch keeps, and fragments
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Subject:
    """What is measured. layers: packed, gone through in turn.   facts: of the report."""

    shape: Shape
    layers: list[LayerWeights]
    facts: dict[str, Any]


def bench(
    what: Path | Shape,
    tokens: Sequence[int],
    machine: Machine,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Measure a layer in every way that there is, and return the report.

    what: a package, whose layers are loaded, or sizes, of which a layer is made of random words.
    The dense ways have what the very layer decodes to, rounded to dtype. For each number of tokens
    every way is first compared with the reference and with the way before it, and only then timed,
    in replays of a graph whose calls go through more than the L2 cache holds.
    Raises FormatError where the GPU has no room, or a packed way's output is wrong; a dense way
    whose output is wrong is left out.
    """
    start = time.perf_counter()
    rate = copy_rate(machine)
    subject = _made(what, machine) if isinstance(what, Shape) else _loaded(what, machine)
    dense, absent = _dense(subject, machine, dtype)
    ways = make_ways(subject.layers, dense, subject.shape.topk, machine)
    rows = [_row(subject, ways, count, machine, dtype, rate) for count in tokens]
    shape = subject.shape
    report = {
        "schema": "qsrt_report_v1",
        "kind": "bench",
        **subject.facts,
        "hidden_size": shape.sizes.hidden,
        "intermediate_size": shape.sizes.intermediate,
        "experts": shape.geometry.experts,
        "topk": shape.topk,
        "dtype": str(dtype).removeprefix("torch."),
        "gpu": _gpu(machine, rate),
        "layers_in_turn": len(subject.layers),
        "ways": [
            {"way": way.name, "weights": way.weights, "expert_bytes": way.expert_bytes}
            for way in ways
        ],
        "dense_absent": absent,
        "rows": rows,
        "versions": library_versions(),
        "seconds": time.perf_counter() - start,
    }
    schema.check(report, "report", "report")
    return report


def _gpu(machine: Machine, rate: float) -> dict[str, Any]:
    return {
        "name": machine.name,
        "capability": "{}.{}".format(*machine.capability),
        "multiprocessors": machine.multiprocessors,
        "memory_bytes": machine.memory_bytes,
        "l2_bytes": machine.l2_bytes,
        "copy_bytes_per_s": rate,
    }


def _made(shape: Shape, machine: Machine) -> _Subject:
    """Copies of a layer of random words."""
    count = layers_in_turn(shape, machine.l2_bytes)
    _require(count * shape.packed_bytes, machine, f"{count} packed layers of these sizes take")
    layers = copied([random_layer(shape.geometry, machine.device)], count)
    return _Subject(shape, layers, {"package": None, "seal_sha256": None, "load": None})


def _loaded(path: Path, machine: Machine) -> _Subject:
    """A package's first layers, or copies of them. All are loaded for the time that it takes."""
    package = open_package(path)
    topk = package.documents.manifest["geometry"]["topk"]
    shape = Shape(package.geometry, package.true_sizes, topk)
    count = layers_in_turn(shape, machine.l2_bytes)
    numbers = package.layers
    _require(count * shape.packed_bytes, machine, f"{count} of its layers take")
    if len(numbers) * shape.packed_bytes > _USABLE * machine.free_bytes():
        numbers = numbers[:count]
    loaded = load_package(path, device=machine.device, layers=numbers)
    load = {
        "layers": len(loaded.layers),
        "bytes": loaded.load_bytes,
        "seconds": loaded.load_s,
        "verify_seconds": loaded.verify_s,
    }
    layers = copied(list(loaded.layers.values()), count)
    facts = {"package": str(path), "seal_sha256": loaded.seal_sha256, "load": load}
    return _Subject(shape, layers, facts)


def _require(needed: int, machine: Machine, what: str) -> None:
    free = _USABLE * machine.free_bytes()
    if needed > free:
        raise FormatError(
            f"{what} {_gb(needed)} of memory, and {machine.name} has {_gb(free)} free; use one "
            "with more, or smaller sizes"
        )


def _dense(
    subject: _Subject, machine: Machine, dtype: torch.dtype
) -> tuple[list[DenseLayer], str | None]:
    """The layers that the packed ones decode to; without them, why not."""
    needed = len(subject.layers) * subject.shape.dense_bytes
    free = _USABLE * machine.free_bytes()
    if needed > free:
        return [], f"their weights take {_gb(needed)} of memory, {_gb(free)} are free"
    if any(layer.activations.any() for layer in subject.layers):
        return [], "the experts have another activation than SiLU"
    decoded: dict[int, DenseLayer] = {}
    found = []
    for layer in subject.layers:
        known = decoded.get(layer.layer)
        if known is None:
            known = decoded[layer.layer] = dense_layer(layer, subject.shape.sizes, dtype)
            found.append(known)
        else:
            found.append(DenseLayer(known.w13.clone(), known.w2.clone()))
    return found, None


def _row(
    subject: _Subject,
    ways: Sequence[Way],
    tokens: int,
    machine: Machine,
    dtype: torch.dtype,
    rate: float,
) -> dict[str, Any]:
    """All ways for one number of tokens."""
    shape, layers = subject.shape, subject.layers
    calls = count_calls(shape, tokens, len(layers), machine.l2_bytes)
    rows = calls * input_bytes(shape, tokens, dtype)
    row = {"tokens": tokens, "calls": calls, "experts": None, "distinct_bytes": None}
    needs = {way.name: 4 * rows + way.buffer_bytes(tokens, dtype) for way in ways}
    free = _USABLE * machine.free_bytes()
    skipped = {
        name: f"takes {_gb(needed)} of memory, {_gb(free)} are free"
        for name, needed in needs.items()
        if needed > free
    }
    measured: dict[str, dict[str, Any]] = {}
    if len(skipped) < len(ways):
        inputs = make_inputs(shape, tokens, calls, len(layers), dtype, machine.device)
        experts, distinct = experts_of(inputs)
        row |= {"experts": experts, "distinct_bytes": distinct * ways[0].expert_bytes}
        check = Check(inputs, layers)
        for way in ways:
            if way.name in skipped:
                continue
            try:
                found = _measure(way, inputs, check, machine)
            except (Unavailable, WrongError) as reason:
                if isinstance(reason, WrongError) and way.weights == "packed":
                    raise
                skipped[way.name] = str(reason)
                continue
            moved = experts * way.expert_bytes + 2 * input_bytes(shape, tokens, dtype)
            share = moved / found["us"] * 1e6 / rate
            measured[way.name] = found | {"bytes": moved, "share": share}
    results = [
        {"way": way.name} | (measured.get(way.name) or {"skipped": skipped[way.name]})
        for way in ways
    ]
    _log.info("M = %d: %s", tokens, ", ".join(map(_line, results)))
    return row | {"results": results}


def _measure(way: Way, inputs: Sequence[Input], check: Check, machine: Machine) -> dict[str, Any]:
    """A way's fastest choice: its error, and the times of its replays."""

    def tuning(choice: Choice) -> float:
        check.error(way.name, choice)
        return statistics.median(machine.times(choice.calls, _TUNING_REPEATS))

    try:
        choice = way.tune(inputs, tuning)
        error = check.error(way.name, choice)
        times = machine.times(choice.calls, _REPEATS)
    except torch.OutOfMemoryError:
        raise Unavailable("ran out of memory") from None
    check.keep(choice)
    return {
        "choice": choice.name,
        "us": statistics.median(times),
        "us_low": min(times),
        "us_high": max(times),
        "error": error,
    }


def _line(result: dict[str, Any]) -> str:
    if "us" not in result:
        return f"{result['way']} left out ({result['skipped']})"
    return f"{result['way']} {result['us']:.1f} us"


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
