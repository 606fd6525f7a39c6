"""Measures a layer in all ways, for several numbers of tokens, one after another."""

import logging
import statistics
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from qsrt_pack.assemble.package import library_versions
from qsrt_pack.bench.check import Check, WrongError
from qsrt_pack.bench.choice import Choice, Unavailable, Way
from qsrt_pack.bench.inputs import Input, count_calls, experts_of, input_bytes, make_inputs
from qsrt_pack.bench.machine import Machine, copy_rate
from qsrt_pack.bench.shapes import Shape
from qsrt_pack.bench.subject import USABLE, Subject, dense_layers, gigabytes, loaded_from, made
from qsrt_pack.bench.ways import make_ways
from qsrt_runtime.format import schema

_REPEATS, _TUNING_REPEATS = 15, 3  # replays
_log = logging.getLogger(__name__)


def bench(
    what: Path | Shape,
    tokens: Sequence[int],
    machine: Machine,
    *,
    also: Collection[str] = (),
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Measure a layer in every way that there is, and return the report.

    what: a package, whose layers are loaded, or sizes, of which a layer is made of random words.
    also: "a8", the packed layer with rows in MXFP8, and "expanded", its copy expanded to E4M3.
    The dense ways have what the very layer decodes to, rounded to dtype. For each number of tokens
    every way is first compared with the reference and with a way before it, and only then timed,
    in replays of a graph whose calls go through more than the L2 cache holds.
    Raises FormatError where the GPU has no room, or a packed way's output is wrong; a dense way
    whose output is wrong is left out.
    """
    start = time.perf_counter()
    rate = copy_rate(machine)
    subject = made(what, machine) if isinstance(what, Shape) else loaded_from(what, machine)
    dense, absent = dense_layers(subject, machine, dtype)
    _log.info("compiling and measuring; each kernel's first call takes seconds")
    ways = make_ways(subject.layers, dense, subject.shape.topk, machine, also)
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


def _row(
    subject: Subject,
    ways: Sequence[Way],
    tokens: int,
    machine: Machine,
    dtype: torch.dtype,
    rate: float,
) -> dict[str, Any]:
    """All ways for one number of tokens."""
    shape, layers = subject.shape, subject.layers
    calls = count_calls(shape, tokens, len(layers), machine.l2_bytes)
    row = {"tokens": tokens, "calls": calls, "experts": None, "distinct_bytes": None}
    size = input_bytes(shape, tokens, dtype)
    results = _left_out(ways, tokens, 4 * calls * size, machine, dtype)
    if len(results) < len(ways):
        inputs = make_inputs(shape, tokens, calls, len(layers), dtype, machine.device)
        experts, distinct = experts_of(inputs)
        row |= {"experts": experts, "distinct_bytes": distinct * ways[0].expert_bytes}
        check = Check(inputs, layers)
        for way in ways:
            if way.name not in results:
                found = results[way.name] = _measure(way, inputs, check, machine)
                if "us" in found:
                    found["bytes"] = experts * way.expert_bytes + 2 * size
                    found["share"] = found["bytes"] / found["us"] * 1e6 / rate
    row["results"] = [{"way": way.name} | results[way.name] for way in ways]
    _log.info("M = %d: %s", tokens, ", ".join(map(_line, row["results"])))
    return row


def _left_out(
    ways: Sequence[Way], tokens: int, rows: int, machine: Machine, dtype: torch.dtype
) -> dict[str, dict[str, Any]]:
    """The results of ways that take fewer tokens, or more memory than there is.

    rows: bytes of all calls' rows.
    """
    free = USABLE * machine.free_bytes()
    found = {}
    for way in ways:
        try:
            needed = rows + way.buffer_bytes(tokens, dtype)
        except Unavailable as reason:
            found[way.name] = {"skipped": str(reason)}
            continue
        if needed > free:
            needs = f"takes {gigabytes(needed)} of memory, {gigabytes(free)} are free"
            found[way.name] = {"skipped": needs}
    return found


def _measure(way: Way, inputs: Sequence[Input], check: Check, machine: Machine) -> dict[str, Any]:
    """A way's fastest choice: its error, and the times of its replays; or why it has none."""

    def tuning(choice: Choice) -> float:
        check.error(way.name, choice)
        return statistics.median(machine.times(choice.calls, _TUNING_REPEATS))

    try:
        choice = way.tune(inputs, tuning)
        error = check.error(way.name, choice)
        times = machine.times(choice.calls, _REPEATS)
    except torch.OutOfMemoryError:
        return {"skipped": "ran out of memory"}
    except Unavailable as reason:
        return {"skipped": str(reason)}
    except WrongError as wrong:
        if way.weights == "packed":
            raise
        return {"skipped": str(wrong)}
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
