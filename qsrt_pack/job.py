"""Convert a checkpoint: the one place that knows source, encoder and package at once.

Everything is written beside the output, the seal last, and renamed into place when whole; a
failure removes it and leaves what stood there before.
"""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qsrt_pack.assemble.layer import expert_evidence, layer_evidence
from qsrt_pack.assemble.package import (
    GIT_ATTRIBUTES,
    build_config,
    build_manifest,
)
from qsrt_pack.assemble.shards import file_pieces, write_shards
from qsrt_pack.encode.expert import Settings, encode_expert
from qsrt_pack.output import check_output, replacing
from qsrt_pack.plan import make_plan
from qsrt_pack.progress import bar
from qsrt_pack.source.checkpoint import (
    Checkpoint,
    check_finite,
    digest_files,
    open_checkpoint,
    read_tensor,
    source_stamp,
)
from qsrt_pack.source.dtypes import to_float32
from qsrt_pack.source.models import RoutedExperts, carried_tensors, find_experts
from qsrt_runtime.format import manifest as manifests
from qsrt_runtime.format import paths, schema
from qsrt_runtime.format.container import LayerWriter
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.package import check_base, open_package, seal

_log = logging.getLogger(__name__)
_POOR_NMSE = 0.1  # six times what a matrix has at 3 bits: its scales are below float16's


@dataclass(frozen=True)
class Job:
    """A conversion that has been checked and planned and not begun.

    stamp: source_stamp of the checkpoint when its headers were read.
    """

    checkpoint: Checkpoint
    experts: RoutedExperts
    out: Path
    settings: Settings
    loader: str
    overwrite: bool
    plan: dict[str, Any]
    stamp: dict[str, tuple[int, ...]]


def prepare(
    source: Path, out: Path, settings: Settings, *, loader: str = "qsrt", overwrite: bool = False
) -> Job:
    """Check source and output and make the plan; writes nothing. FormatError on any doubt."""
    checkpoint = open_checkpoint(source)
    stamp = source_stamp(checkpoint)
    experts = find_experts(checkpoint)
    config_path = str(checkpoint.path / manifests.CONFIG)
    manifests.check_config(checkpoint.config, experts.geometry, experts.topk, config_path)
    check_output(out, checkpoint.path, overwrite)
    plan = make_plan(checkpoint, experts, out, settings, loader)
    free, need = plan["free_disk_bytes"], plan["bytes_out"]
    if free < need:
        raise FormatError(f"{out.parent} has {free:,} bytes free, the package takes {need:,}")
    return Job(checkpoint, experts, out, settings, loader, overwrite, plan, stamp)


def run(job: Job, *, show_progress: bool = True) -> None:
    """Convert. Leaves a sealed package at job.out, or raises and leaves what was there."""
    with replacing(job.out, overwrite=job.overwrite) as folder:
        _check_unchanged(job)
        source_sha256 = _read_source(job, show_progress)
        evidence = _write_layers(job, folder, source_sha256, show_progress)
        base_sha256 = _write_base(job, folder)
        manifest = build_manifest(
            job.experts.geometry,
            topk=job.experts.topk,
            activation=job.experts.activation,
            encoder_settings=job.settings.fingerprinted(),
            source_sha256=source_sha256,
            base_sha256=base_sha256,
            evidence=evidence,
        )
        config = build_config(job.checkpoint.config, manifest, job.loader)
        paths.write_file(folder / manifests.MANIFEST, schema.dump(manifest))
        paths.write_file(folder / manifests.CONFIG, schema.dump(config))
        _check_unchanged(job)
        seal(folder)
        check_base(open_package(folder))


def _check_unchanged(job: Job) -> None:
    if source_stamp(job.checkpoint) != job.stamp:
        raise FormatError(f"{job.checkpoint.path} changed since it was opened; convert it again")


def _read_source(job: Job, show_progress: bool) -> str:
    """Hash config, index and shards, then refuse weights that are not finite."""
    with bar("hash source", job.plan["bytes_in"], "B", show_progress) as advance:
        digests = digest_files(job.checkpoint, advance)
    names = job.experts.tensor_names()
    with bar("scan experts", len(names), "tensors", show_progress) as advance:
        for name in names:
            check_finite(job.checkpoint, name)
            advance(1)
    return schema.digest(digests)


def _write_layers(
    job: Job, folder: Path, source_sha256: str, show_progress: bool
) -> dict[int, dict[str, Any]]:
    fingerprint = manifests.encoder_fingerprint(job.settings.fingerprinted())
    evidence = {}
    with bar("encode", job.plan["expert_weights"], "weights", show_progress) as advance:
        for layer in job.experts.layers:
            start = time.perf_counter()
            path = folder / manifests.layer_file_name(layer)
            entries = []
            with LayerWriter(
                path, job.experts.geometry, layer, source_sha256, fingerprint
            ) as writer:
                for expert in range(job.experts.geometry.experts):
                    entries.append(_write_expert(job, writer, layer, expert))
                    advance(job.experts.geometry.weights_per_expert)
            evidence[layer] = layer_evidence(writer, job.settings.search, entries)
            data = schema.dump(evidence[layer])
            paths.write_file(folder / manifests.evidence_file_name(layer), data)
            _report_layer(layer, entries, time.perf_counter() - start)
    return evidence


def _write_expert(job: Job, writer: LayerWriter, layer: int, expert: int) -> dict[str, Any]:
    weights = {
        matrix: to_float32(
            read_tensor(job.checkpoint, job.experts.tensor_name(layer, expert, matrix))
        )
        for matrix in ("w1", "w3", "w2")
    }
    try:
        encoded = encode_expert(**weights, layer=layer, expert=expert, settings=job.settings)
    except ValueError as error:
        raise FormatError(f"layer {layer} expert {expert}: {error}") from error
    writer.write_expert(expert, encoded.coded)
    entry = expert_evidence(
        expert, encoded.coded, encoded.low_to_high_groups, encoded.nmse, encoded.rms
    )
    if entry["zero_matrices"]:
        _log.warning(
            "layer %d expert %d: %s all zero", layer, expert, ", ".join(entry["zero_matrices"])
        )
    poor = [name for name, error in entry["nmse"].items() if error > _POOR_NMSE]
    if poor:
        _log.warning("layer %d expert %d: %s coded poorly", layer, expert, ", ".join(poor))
    _log.debug("layer %d expert %d: NMSE %s", layer, expert, _mean_nmse([entry]))
    return entry


def _report_layer(layer: int, entries: list[dict[str, Any]], seconds: float) -> None:
    worst = max(entries, key=lambda entry: max(entry["nmse"].values()))
    _log.info(
        "layer %d: NMSE %s, worst expert %d %.5f, %.1f s",
        layer,
        _mean_nmse(entries),
        worst["expert"],
        max(worst["nmse"].values()),
        seconds,
    )


def _mean_nmse(entries: list[dict[str, Any]]) -> str:
    means = {m: sum(e["nmse"][m] for e in entries) / len(entries) for m in ("w1", "w3", "w2")}
    return " ".join(f"{matrix} {mean:.5f}" for matrix, mean in means.items())


def _write_base(job: Job, folder: Path) -> str:
    """Carry every other tensor and the side files; returns the digest over shards and index."""
    checkpoint = job.checkpoint

    def payload(name: str) -> Iterable[bytes]:
        shard, entry = checkpoint.tensors[name]
        return file_pieces(checkpoint.path / shard, entry.start, entry.end)

    index = write_shards(folder, carried_tensors(checkpoint, job.experts), payload)
    schema.check(index, "index", manifests.INDEX)
    paths.write_file(folder / manifests.INDEX, schema.dump(index))
    for name in checkpoint.carried:
        source, target = checkpoint.path / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        paths.write_pieces(target, file_pieces(source, 0, source.stat().st_size))
    paths.write_file(folder / ".gitattributes", GIT_ATTRIBUTES)
    names = sorted({manifests.INDEX, *index["weight_map"].values()})
    return schema.digest({name: paths.sha256_file(folder / name) for name in names})


def _ranges(numbers: list[int]) -> str:
    """0, 2, 3, 4 -> `0, 2..4`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("..".join(map(str, part)) for part in parts)


def describe(plan: dict[str, Any]) -> str:
    """A plan on one screen."""
    layers = plan["layers"]
    lines = [
        ("model", f"{plan['source']} ({plan['model_type']})"),
        ("package", plan["output"]),
        (
            "experts",
            f"{len(layers)} layers ({_ranges(layers)}) x {plan['experts_per_layer']}, "
            f"{plan['hidden_size']} x {plan['intermediate_size']}, top-{plan['topk']}, "
            f"{plan['activation']}: {plan['expert_weights']:,} weights",
        ),
        (
            "format",
            f"{plan['atom_slots']} slots, {plan['atoms_per_expert']} atoms an expert, "
            f"modes {plan['modes']}, {plan['search']} search, seed {plan['seed']}",
        ),
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
    if plan["left_out_files"]:
        lines.append(("not carried", ", ".join(plan["left_out_files"])))
    return "\n".join(f"{name:<12}{value}" for name, value in lines)
