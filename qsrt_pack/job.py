"""Convert a checkpoint: check, plan, and write a package layer by layer.

Everything is written beside the output, the seal last, and renamed into place when whole. A
failure leaves what stood there before, and the finished layers beside it for the next run.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from qsrt_pack.assemble.layer import layer_evidence
from qsrt_pack.assemble.package import (
    build_manifest,
    build_producer,
    library_versions,
)
from qsrt_pack.assist import facts, layer_rows
from qsrt_pack.carry import how_carried, package_config, source_format, write_base
from qsrt_pack.encode.expert import Settings
from qsrt_pack.encode.viterbi import device_kind
from qsrt_pack.output import (
    check_content,
    check_output,
    discard,
    has_content,
    leftover_bytes,
    new_folder,
    replacing,
    state_file,
)
from qsrt_pack.plan import make_plan
from qsrt_pack.produce import produce_layer
from qsrt_pack.progress import bar
from qsrt_pack.quality import report_expert, report_layer
from qsrt_pack.ranks import Ranks
from qsrt_pack.repository import Repository
from qsrt_pack.scan import Block, scan
from qsrt_pack.source.census import quantized_carried
from qsrt_pack.source.checkpoint import (
    Checkpoint,
    digest_small_files,
)
from qsrt_pack.source.models import RoutedExperts, find_experts
from qsrt_pack.state import (
    State,
    changes,
    check_same,
    layer_files,
    read_finished,
    read_state,
    remove_all_but,
    write_state,
)
from qsrt_pack.statistics import Statistics
from qsrt_pack.supply import Readers, Supply, find_readers
from qsrt_runtime.format import manifest as manifests
from qsrt_runtime.format import paths, schema
from qsrt_runtime.format.container import LayerWriter
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.package import (
    check_base,
    open_package,
    read_evidence,
    seal,
    verify_files,
)

_log = logging.getLogger(__name__)
_ALONE = Ranks()
_CPU = (torch.device("cpu"),)

Evidence = dict[int, dict[str, Any]]  # the evidence document of each layer


@dataclass(frozen=True)
class Job:
    """A conversion that has been checked and planned and not begun.

    carried_as: see carried_tensors.
    complete: out holds a package with these settings already; of this source, as far as known.
    """

    supply: Supply
    experts: RoutedExperts
    readers: Readers
    out: Path
    settings: Settings
    loader: str
    carried_as: str
    overwrite: bool
    plan: dict[str, Any]
    complete: bool
    devices: tuple[torch.device, ...]
    statistics: Statistics | None

    @property
    def checkpoint(self) -> Checkpoint:
        return self.supply.checkpoint


def prepare(
    source: Path | Repository,
    out: Path,
    settings: Settings,
    *,
    loader: str = "qsrt",
    keep_dense_format: bool = False,
    overwrite: bool = False,
    devices: tuple[torch.device, ...] = _CPU,
    statistics: Statistics | None = None,
    drop_source: bool = False,
) -> Job:
    """Check source and output and make the plan. FormatError on any doubt.

    Writes nothing, but puts back what a killed run had moved aside.
    keep_dense_format: carry quantized weights that are no routed expert's as they are stored.
    devices: of the settings' kind; a package does not depend on how many there are.
    statistics: of a calibration of this source, the settings state their digest; here compared
    by config, index and names of shards, by `run` as a whole.
    drop_source: see Supply.
    """
    if {device_kind(device) for device in devices} != {settings.device}:
        raise ValueError(f"the settings are for {settings.device}, the devices are {devices}")
    supply = _open_supply(source, out, drop_source)
    checkpoint = supply.checkpoint
    experts = find_experts(checkpoint)
    config_path = str(checkpoint.path / manifests.CONFIG)
    counts = (experts.geometry.experts, experts.topk)
    config = manifests.text_config(checkpoint.config)
    manifests.check_config(config, experts.true_sizes, *counts, config_path)
    if loader == "kquant" and experts.true_sizes.is_padded:
        raise FormatError(
            f"{config_path}: experts of {experts.true_sizes.hidden} x "
            f"{experts.true_sizes.intermediate} are stored padded, which the published loader "
            "does not read; leave out --loader kquant"
        )
    carried_as = how_carried(checkpoint, experts, loader) if keep_dense_format else "bf16"
    if statistics is not None:
        statistics.check_source(digest_small_files(checkpoint, statistics.document["source"]))
        _warn_of_missing_parts(statistics, settings)
    check_output(out, checkpoint.path, overwrite=True, resumable=True)
    filled = has_content(out)  # asked first: another process may be about to finish it
    complete = not overwrite and _is_result(out, checkpoint, settings, loader, carried_as)
    if filled:
        check_content(out, overwrite or complete)
    finished = experts.layers if complete else _claimed_layers(out, settings)
    plan = make_plan(
        checkpoint, experts, out, settings, loader, finished, devices, statistics, carried_as
    )
    left = leftover_bytes(out, layer_files(finished))
    readers = find_readers(checkpoint, experts)
    meanwhile = supply.disk_bytes(readers)
    free, need = plan["free_disk_bytes"] + left, plan["bytes_to_write"] + meanwhile
    if free < need and not complete:
        what = f", {meanwhile:,} of them of the source for a while" if meanwhile else ""
        raise FormatError(f"{out.parent} has {free:,} bytes free, {need:,} are to be written{what}")
    return Job(
        supply,
        experts,
        readers,
        out,
        settings,
        loader,
        carried_as,
        overwrite,
        plan,
        complete,
        devices,
        statistics,
    )


def _open_supply(source: Path | Repository, out: Path, drop: bool) -> Supply:
    try:
        return Supply(source, out, read_state(state_file(out)), drop)
    except FormatError as error:
        if drop and (out / manifests.MARKER).is_file():
            error.add_note(f"{out} is a package already; check it with qsrt-pack validate")
        raise


def _warn_of_missing_parts(statistics: Statistics, settings: Settings) -> None:
    missing = statistics.missing_parts()
    if settings.modes == "all" and missing:
        _log.warning(
            "the calibration text is short: no documents for %s, without which all rate modes "
            "are R0 or unmeasured",
            " and ".join(missing),
        )


def run(job: Job, *, show_progress: bool = True, ranks: Ranks = _ALONE) -> Evidence:
    """Convert. Leaves a sealed package at job.out, or raises and leaves what was there.

    Layers that a run before has finished are kept if they have the digests it recorded, and those
    that this one finishes are there for the next. Returns the evidence of all layers.
    ranks: rank 0's; the others' part is `assist.assist`.
    """
    if job.complete:
        ranks.told([])
        evidence = _confirm(job, show_progress)
        ranks.told(None)
        return evidence
    state = None
    try:
        with (
            job.supply.held(),
            replacing(job.out, overwrite=job.overwrite, resumable=True) as folder,
        ):
            job.supply.check_unchanged()
            state = _open_state(job, show_progress)
            size = job.plan["layer_file_bytes"] * len(state.layers)
            with bar("check finished layers", size, "B", show_progress) as advance:
                evidence = read_finished(folder, state, advance)
            missing = (layer for layer in job.experts.layers if layer not in evidence)
            job.supply.check_there(job.readers.needed(missing))
            remove_all_but(folder, layer_files(evidence))
            _write_layers(job, folder, state, evidence, show_progress, ranks)
            _write_documents(job, folder, state, evidence, show_progress)
            job.supply.check_unchanged()
            seal(folder)
            check_base(open_package(folder))
    except BaseException as error:
        if state is not None and state.layers:
            error.add_note(
                f"{len(state.layers)} of {len(job.experts.layers)} layers are finished and kept "
                f"in {state_file(job.out).parent}; the same command continues"
            )
        raise
    ranks.told(None)
    return evidence


def _claimed_layers(out: Path, settings: Settings) -> list[int]:
    """The layers that a stopped run says it has finished; FormatError for one of other settings."""
    path = state_file(out)
    state = read_state(path)
    if state is None:
        return []
    check_same(state, _new_state(settings, {}), path)
    return [n for n in state.layers if (new_folder(out) / manifests.layer_file_name(n)).exists()]


def _is_result(
    out: Path, checkpoint: Checkpoint, settings: Settings, loader: str, carried_as: str
) -> bool:
    """Whether out is a sealed package with these settings, versions and config."""
    try:
        documents = open_package(out).documents
    except (FormatError, OSError):
        return False
    manifest = documents.manifest
    return (
        manifest["producer"] == build_producer(settings.fingerprinted())
        and manifest.get("source_format", {}).get("carried_as", "bf16") == carried_as
        and documents.config == package_config(checkpoint, manifest, loader, carried_as)
    )


def _confirm(job: Job, show_progress: bool) -> Evidence:
    """Check that a complete output is this conversion's, and whole."""
    package = open_package(job.out)
    source = _hash_source(job, show_progress)
    folder = job.checkpoint.path
    sides = {name: paths.sha256_file(folder / name) for name in job.checkpoint.carried}
    found = {name: package.digests[name] for name in package.side_files}
    stated = package.documents.manifest["source"]["source_sha256"]
    if schema.digest(source) != stated or sides != found:
        raise FormatError(
            f"{job.out} is the package of another source; choose another or give --overwrite to "
            "replace it"
        )
    size = sum((job.out / name).stat().st_size for name in package.digests)
    with bar("check package", size, "B", show_progress) as advance:
        verify_files(package, package.digests, advance)
    check_base(package)
    state = read_state(state_file(job.out))
    if state is None or not changes(state, _new_state(job.settings, source)):
        discard(job.out)
    return {layer: read_evidence(package, layer) for layer in package.layers}


def _new_state(settings: Settings, source: dict[str, str]) -> State:
    return State(source, settings.fingerprinted(), library_versions())


def _hash_source(job: Job, show_progress: bool) -> dict[str, str]:
    size = 0 if job.supply.is_remote else job.plan["bytes_in"]
    with bar("hash source", size, "B", show_progress) as advance:
        return job.supply.digests(advance)


def _open_state(job: Job, show_progress: bool) -> State:
    """The state to continue; a new one has had a folder scanned for weights not finite.

    Of a repository each layer is scanned when its shards are there. Statistics are of this source
    and every file of them whole.
    """
    state = _new_state(job.settings, _hash_source(job, show_progress))
    if job.statistics is not None:
        job.statistics.check_source(state.source)
        size = job.statistics.total_bytes()
        with bar("check statistics", size, "B", show_progress) as advance:
            job.statistics.verify(advance)
    found = read_state(state_file(job.out))
    if found is not None:
        check_same(found, state, state_file(job.out))
        return replace(found, slices=job.supply.slices)
    state = replace(state, slices=job.supply.slices)
    if job.supply.keeps_downloads:
        write_state(state_file(job.out), state)  # without which they go when this run fails
    if not job.supply.is_remote:
        blocks = job.experts.blocks() + _decoded_blocks(job)
        scan(job.checkpoint, blocks, show_progress)
    return state


def _decoded_blocks(job: Job) -> list[Block]:
    """The carried weights that are decoded."""
    if job.carried_as == "stored":
        return []
    return [(name, None) for name in quantized_carried(job.checkpoint, job.experts)]


def _write_layers(
    job: Job,
    folder: Path,
    state: State,
    evidence: Evidence,
    show_progress: bool,
    ranks: Ranks,
) -> None:
    """Encode the layers that have no evidence yet, and record each in the state when on disk."""
    source_sha256 = schema.digest(state.source)
    remaining = [layer for layer in job.experts.layers if layer not in evidence]
    if ranks.told(remaining):
        ranks.agree(facts(job.settings, state.source))
    experts = job.experts.geometry.experts
    weights = job.experts.geometry.weights_per_expert * experts * len(remaining)
    with bar("encode", weights, "weights", show_progress) as advance:
        for number, layer in enumerate(remaining):
            job.supply.bring(job.readers.layers[layer])
            if job.supply.is_remote:
                scan(job.checkpoint, job.experts.layer_blocks(layer), show_progress=False)
            start = time.perf_counter()
            evidence[layer] = _write_layer(job, folder, layer, source_sha256, advance, ranks)
            job.supply.check_unchanged()  # or the next run would take the layer for the old one's
            digest = paths.sha256_file(folder / manifests.evidence_file_name(layer))
            layers = {**state.layers, layer: digest}
            write_state(state_file(job.out), replace(state, layers=layers))
            state.layers[layer] = digest
            report_layer(layer, evidence[layer]["experts"], time.perf_counter() - start)
            needed = job.readers.needed(remaining[number + 1 :])
            job.supply.release(needed, job.readers.carried, _recorder(job, state))


def _recorder(job: Job, state: State) -> Callable[[], None]:
    return partial(write_state, state_file(job.out), state)


def _write_layer(
    job: Job,
    folder: Path,
    layer: int,
    source_sha256: str,
    advance: Callable[[int], None],
    ranks: Ranks,
) -> dict[str, Any]:
    geometry = job.experts.geometry
    fingerprint = manifests.encoder_fingerprint(job.settings.fingerprinted())
    path = folder / manifests.layer_file_name(layer)
    entries = []
    with LayerWriter(path, geometry, layer, source_sha256, fingerprint) as writer:
        source = (job.checkpoint, job.experts, job.settings, job.devices)
        rows = layer_rows(job.statistics, job.experts, layer)
        for expert in produce_layer(*source, layer, ranks, rows):
            entry, stored = expert.entry, (expert.bundles, expert.shared_scales, expert.modes)
            writer.write_bundles(entry["expert"], *stored)
            report_expert(layer, entry)
            entries.append(entry)
            advance(geometry.weights_per_expert)
    evidence = layer_evidence(writer, job.settings.search, entries)
    paths.write_file(folder / manifests.evidence_file_name(layer), schema.dump(evidence))
    return evidence


def _write_documents(
    job: Job, folder: Path, state: State, evidence: Evidence, show_progress: bool
) -> None:
    """Everything but the layers and the seal."""
    source = job.supply.carried_from(job.readers.carried, _recorder(job, state))
    if job.supply.is_remote:
        scan(source, _decoded_blocks(job), show_progress)
    base_sha256 = write_base(folder, source, job.experts, job.carried_as)
    manifest = build_manifest(
        job.experts.geometry,
        job.experts.true_sizes,
        topk=job.experts.topk,
        activation=job.experts.activation,
        encoder_settings=job.settings.fingerprinted(),
        source_sha256=schema.digest(state.source),
        base_sha256=base_sha256,
        evidence=evidence,
        source_format=source_format(job.checkpoint, job.experts, job.carried_as),
        expert_tensors=job.experts.naming.document(),
    )
    config = package_config(job.checkpoint, manifest, job.loader, job.carried_as)
    paths.write_file(folder / manifests.MANIFEST, schema.dump(manifest))
    paths.write_file(folder / manifests.CONFIG, schema.dump(config))
