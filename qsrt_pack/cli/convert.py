"""The commands that make packages: convert and calibrate."""

import logging
import os
import shlex
from pathlib import Path
from typing import Any

import click

from qsrt_pack.cli.options import (
    LOCATION,
    SOURCE,
    json_option,
    one_device,
    overwrite_option,
    print_json,
)

_log = logging.getLogger("qsrt_pack")


@click.command()
@click.argument("model", type=SOURCE)
@click.argument("out", type=LOCATION, required=False)
@overwrite_option
@click.option(
    "--search",
    type=click.Choice(["exact", "fast"]),
    default="exact",
    show_default=True,
    help="fast: a reduced trellis search, for previews; larger error.",
)
@click.option(
    "--modes",
    type=click.Choice(["R0", "all"]),
    default="R0",
    show_default=True,
    help="all: try every rate mode for each expert; keep the least error, of the weights or, "
    "calibrated, of the outputs on documents held out.",
)
@click.option(
    "--hidden-side",
    type=click.Choice(["layer", "expert"]),
    default="layer",
    show_default=True,
    help="Whose signs and scales the hidden channels have; one rotation serves a whole layer.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Of the random signs of the rotations.",
)
@click.option(
    "--loader",
    type=click.Choice(["qsrt", "kquant"]),
    default="qsrt",
    show_default=True,
    help="kquant: write config.json as the published vLLM branch reads it.",
)
@click.option(
    "--keep-dense-format",
    is_flag=True,
    help="Carry quantized tensors that are no experts' as they are, not as bfloat16; the package "
    "then needs a loader that reads them.",
)
@click.option(
    "--devices",
    default="auto",
    show_default=True,
    help="cpu, or numbers of CUDA devices such as 0,1; auto: the first CUDA device if any.",
)
@click.option(
    "--calibration",
    type=LOCATION,
    help="A UTF-8 text, or the folder that `calibrate` made of one; a text's is OUT.calibration.",
)
@click.option(
    "--drop-source",
    is_flag=True,
    help="Delete each shard of MODEL when all that is read of it is on disk; of a repository, what "
    "was downloaded.",
)
@click.option("--dry-run", is_flag=True, help="Check and plan, write nothing.")
@json_option
@click.pass_obj
def convert(
    show_progress: bool,
    model: Path | str,
    out: Path | None,
    overwrite: bool,
    search: str,
    modes: str,
    hidden_side: str,
    seed: int,
    loader: str,
    keep_dense_format: bool,
    devices: str,
    calibration: Path | None,
    drop_source: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Convert a checkpoint into a package.

    MODEL is a local Hugging Face checkpoint, or OWNER/NAME[@REVISION] on the Hub, of which shards
    are downloaded as layers need them. OUT is the package's folder, by default MODEL-qsrt.
    Stopped by whatever, it leaves the finished layers in OUT.partial; the same command continues.
    Under torchrun, on one machine or on several with a shared file system, all processes encode.

    \b
    Example:
      qsrt-pack convert --calibration text.txt model model-qsrt
    """
    from qsrt_pack import job
    from qsrt_pack.assist import assist
    from qsrt_pack.encode.expert import Settings
    from qsrt_pack.encode.viterbi import device_kind
    from qsrt_pack.memory import give_back_what_is_freed
    from qsrt_pack.plan import describe
    from qsrt_pack.quality import describe_worst
    from qsrt_pack.ranks import joined_ranks, rank_devices
    from qsrt_pack.workers import find_devices

    give_back_what_is_freed()
    try:
        found = find_devices(devices)
    except ValueError as error:
        raise click.UsageError(f"--devices: {error}") from None
    if search == "fast" and found[0].type != "cpu":
        if devices != "auto":
            raise click.UsageError("--search fast runs on the CPU; leave out --devices")
        found = find_devices("cpu")
    whole = _whole_source(calibration, drop_source)
    source, out = _source_and_output(model, out, whole=whole, show_progress=show_progress)
    kinds = {device_kind(device) for device in found}
    if len(kinds) > 1:
        raise click.UsageError(f"--devices: {devices} are of different kinds; take one kind")
    statistics = None
    if calibration is not None:
        options = {"device": found[0], "overwrite": overwrite, "show_progress": show_progress}
        statistics = _statistics(source, out, calibration, dry_run=dry_run, **options)
    digest = statistics and statistics.digest
    settings = Settings(seed, search, modes, hidden_side, *kinds, digest)
    found = rank_devices(found)

    def prepare() -> job.Job:
        prepared = job.prepare(
            source,
            out,
            settings,
            loader=loader,
            keep_dense_format=keep_dense_format,
            overwrite=overwrite,
            devices=found,
            statistics=statistics,
            drop_source=drop_source,
        )
        if as_json:
            print_json(prepared.plan)
        elif dry_run:
            click.echo(describe(prepared.plan))
        else:
            _log.info("%s", describe(prepared.plan))
        return prepared

    if dry_run:
        if os.environ.get("RANK", "0") == "0":
            prepare()
        return
    with joined_ranks() as ranks:
        if not ranks.is_first:
            assist(source, settings, found, ranks, statistics)
            return
        prepared = prepare()
        if prepared.complete:
            _log.info("%s is there already; checking it", out)
        evidence = job.run(prepared, show_progress=show_progress, ranks=ranks)
    _log.info("%s", describe_worst(evidence))
    _log.info("complete; check it with: qsrt-pack validate --deep %s", shlex.quote(str(out)))


def _whole_source(calibration: Path | None, drop_source: bool) -> bool:
    """Whether all shards must be there at once; a usage error where they are to be dropped."""
    from qsrt_pack.statistics import DOCUMENT

    ranks = os.environ.get("WORLD_SIZE", "1") != "1"
    text = calibration is not None and calibration.name != DOCUMENT and not calibration.is_dir()
    if drop_source and ranks:
        raise click.UsageError("--drop-source runs in one process, not under torchrun")
    if drop_source and text:
        raise click.UsageError(
            "--drop-source: calibrating with a text needs the whole checkpoint; run calibrate "
            "first and give its folder to --calibration"
        )
    return ranks or text


def _source_and_output(
    model: Path | str, out: Path | None, *, whole: bool, show_progress: bool
) -> tuple[Any, Path]:
    """The checkpoint's folder, or its repository unless that is needed whole, and the output's."""
    if isinstance(model, str):
        from qsrt_pack.hub import checkpoint_folder
        from qsrt_pack.repository import open_repository

        name = model.partition("@")[0].rpartition("/")[2]
        out = out or Path.cwd() / f"{name}-qsrt"
        if whole:
            return checkpoint_folder(model), out
        return open_repository(model, show_progress=show_progress), out
    if out is None and not model.name:
        raise click.UsageError("give OUT: the root folder has no name to derive it from")
    return model, out or model.with_name(model.name + "-qsrt")


def _statistics(
    model: Path, out: Path, calibration: Path, *, dry_run: bool, overwrite: bool, **options: Any
) -> Any:
    """Opened statistics: of the folder given, or of a text, made beside OUT and left there.

    None where they are of a text and only to be planned.
    """
    from qsrt_pack.statistics import DOCUMENT, open_statistics

    folder = calibration.parent if calibration.name == DOCUMENT else calibration
    if folder.is_dir():
        return open_statistics(folder)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise click.UsageError("--calibration: under torchrun give a folder made by calibrate")
    from qsrt_pack.calibration import calibrate, planned
    from qsrt_pack.output import check_output

    made = out.with_name(out.name + ".calibration")
    if dry_run:
        found = planned(model, calibration, made, overwrite=overwrite, device=options["device"])
        if found is None:
            _log.warning("not planned: the calibration with %s, which comes first", calibration)
        return found
    if not (made / DOCUMENT).exists():
        check_output(out, model, overwrite, resumable=True)
    return calibrate(model, calibration, made, overwrite=overwrite, **options)


@click.command("calibrate")
@click.argument("model", type=LOCATION)
@click.option("--text", type=LOCATION, required=True, help="A UTF-8 text file.")
@click.option("-o", "--out", type=LOCATION, required=True, help="The folder of the statistics.")
@click.option("--window", type=click.IntRange(2), help="Tokens read at once [1024 or less].")
@click.option("--windows", type=click.IntRange(1), help="How many windows [all].")
@click.option(
    "--rows",
    type=click.IntRange(1),
    default=1 << 16,
    show_default=True,
    help="Kept of each expert; more is better and takes more disk.",
)
@click.option(
    "--backward/--no-backward",
    default=True,
    show_default=True,
    help="Also run backwards, for the gradients; needs the residual rows of all layers on disk.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Of the draws of rows and labels.",
)
@click.option("--device", default="auto", show_default=True, help="cpu, or a CUDA device's number.")
@overwrite_option
@click.pass_obj
def calibrate_command(
    show_progress: bool,
    model: Path,
    text: Path,
    out: Path,
    window: int | None,
    windows: int | None,
    rows: int,
    backward: bool,
    seed: int,
    device: str,
    overwrite: bool,
) -> None:
    """Run a model over a text and keep what its experts receive.

    MODEL is a local Hugging Face checkpoint. Each window counts as a document. One layer is in
    memory at a time. Stopped by whatever, it goes on with the same command.

    \b
    Example:
      qsrt-pack calibrate --text text.txt --out model.calibration model
    """
    from qsrt_pack.calibration import calibrate

    found = one_device(device)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise click.UsageError("calibrate runs in one process, not under torchrun")
    made = calibrate(
        model,
        text,
        out,
        window=window,
        windows=windows,
        rows=rows,
        seed=seed,
        backward=backward,
        device=found,
        overwrite=overwrite,
        show_progress=show_progress,
    )
    for layer, found_rows in made.document["layers"].items():
        thin = sum(not count for count in found_rows["tokens"])
        _log.info("layer %s: %d experts without rows", layer, thin)
    _log.info("use it with: qsrt-pack convert --calibration %s", shlex.quote(str(out)))
