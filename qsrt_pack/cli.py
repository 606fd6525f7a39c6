"""The command line. Data goes to standard output, everything else to standard error.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted. A command's module is loaded when
the command runs, so that --help is quick.
"""

import _thread
import json
import logging
import os
import shlex
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import qsrt_runtime
from qsrt_runtime.format.errors import FormatError


class _Location(click.Path):
    """A path made absolute, so that `.` and `..` have names."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Path:
        return Path(os.path.abspath(super().convert(value, param, ctx)))


LOCATION = _Location()
_INSTALL = {  # what brings a module
    "numba": "'qsrt[pack]'",
    "rich": "'qsrt[pack]'",
    "transformers": "'qsrt[eval]'",
    "triton": "triton",
}
_log = logging.getLogger("qsrt_pack")


class _Group(click.Group):
    """Turns the errors that a user can cause into one line and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (FormatError, OSError) as error:
            raise click.ClickException(_with_notes(str(error), error)) from error
        except ModuleNotFoundError as error:
            if error.name not in _INSTALL:
                raise
            raise click.ClickException(
                f"{error.name} is not installed; pip install {_INSTALL[error.name]}"
            ) from error
        except (KeyboardInterrupt, click.Abort) as error:
            click.echo(_with_notes("interrupted", error), err=True)
            ctx.exit(130)


def _with_notes(message: str, error: BaseException) -> str:
    return ". ".join([message, *getattr(error, "__notes__", [])])


class _EchoHandler(logging.Handler):
    """Writes to what standard error is at the time, so that a progress bar stays below."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(self.format(record), err=True)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(qsrt_runtime.__version__, prog_name="qsrt-pack")
@click.option("-q", "--quiet", is_flag=True, help="Only warnings and errors; no progress.")
@click.option("-v", "--verbose", is_flag=True, help="A line for every expert.")
@click.pass_context
def main(ctx: click.Context, quiet: bool, verbose: bool) -> None:
    """Pack the experts of a mixture-of-experts model at about 3 bits a weight."""
    level = logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO
    sys.unraisablehook = _keep_interrupts
    logging.basicConfig(handlers=[_EchoHandler()], format="%(message)s")
    for package in ("qsrt_pack", "qsrt_runtime"):
        logging.getLogger(package).setLevel(level)
    ctx.obj = not quiet


def _keep_interrupts(unraisable: Any) -> None:
    """Interrupt again where a Ctrl-C fell into a destructor, which drops what is raised in it."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        threading.Timer(0.01, _thread.interrupt_main).start()  # in here it would be dropped too
    else:
        sys.__unraisablehook__(unraisable)


def _json_option(command: Callable) -> Callable:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def _overwrite_option(command: Callable) -> Callable:
    return click.option("--overwrite", is_flag=True, help="Replace what OUT holds, whole.")(command)


@main.command()
@click.argument("model", type=LOCATION)
@click.argument("out", type=LOCATION, required=False)
@_overwrite_option
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
@click.option("--dry-run", is_flag=True, help="Check and plan, write nothing.")
@_json_option
@click.pass_obj
def convert(
    show_progress: bool,
    model: Path,
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
    dry_run: bool,
    as_json: bool,
) -> None:
    """Convert a checkpoint folder into a package.

    MODEL is a local Hugging Face checkpoint. OUT is the package's folder, by default MODEL-qsrt.
    Stopped by whatever, it leaves the finished layers in OUT.partial; the same command continues.
    Under torchrun, on one machine or on several with a shared file system, all processes encode.
    """
    from qsrt_pack import job
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
    if out is None and not model.name:
        raise click.UsageError("give OUT: the root folder has no name to derive it from")
    if out is None:
        out = model.with_name(model.name + "-qsrt")
    kinds = {device_kind(device) for device in found}
    if len(kinds) > 1:
        raise click.UsageError(f"--devices: {devices} are of different kinds; take one kind")
    statistics = None
    if calibration is not None:
        options = {"device": found[0], "overwrite": overwrite, "show_progress": show_progress}
        statistics = _statistics(model, out, calibration, dry_run=dry_run, **options)
    digest = statistics and statistics.digest
    settings = Settings(seed, search, modes, hidden_side, *kinds, digest)
    found = rank_devices(found)

    def prepare() -> job.Job:
        prepared = job.prepare(
            model,
            out,
            settings,
            loader=loader,
            keep_dense_format=keep_dense_format,
            overwrite=overwrite,
            devices=found,
            statistics=statistics,
        )
        if as_json:
            _print_json(prepared.plan)
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
            job.assist(model, settings, found, ranks, statistics)
            return
        prepared = prepare()
        if prepared.complete:
            _log.info("%s is there already; checking it", out)
        evidence = job.run(prepared, show_progress=show_progress, ranks=ranks)
    _log.info("%s", describe_worst(evidence))
    _log.info("complete; check it with: qsrt-pack validate --deep %s", shlex.quote(str(out)))


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


@main.command("calibrate")
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
@_overwrite_option
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
    """
    from qsrt_pack.calibration import calibrate
    from qsrt_pack.workers import find_devices

    try:
        found = find_devices(device)
    except ValueError as error:
        raise click.UsageError(f"--device: {error}") from None
    if len(found) > 1:
        raise click.UsageError(f"--device: {device} are several; give one")
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
        device=found[0],
        overwrite=overwrite,
        show_progress=show_progress,
    )
    for layer, found_rows in made.document["layers"].items():
        thin = sum(not count for count in found_rows["tokens"])
        _log.info("layer %s: %d experts without rows", layer, thin)
    _log.info("use it with: qsrt-pack convert --calibration %s", shlex.quote(str(out)))


@main.command()
@click.argument("package", type=LOCATION)
@click.option("--deep", is_flag=True, help="Decode every expert too.")
@_json_option
@click.pass_obj
def validate(show_progress: bool, package: Path, deep: bool, as_json: bool) -> None:
    """Check every byte and rule of a package."""
    from qsrt_pack.validate import validate as run

    report = run(package, deep=deep, show_progress=show_progress)
    if as_json:
        _print_json(report)
    else:
        click.echo(
            f"{package} is valid: {report['layers']} layers, {report['experts']} experts, "
            f"{report['files']} files, {report['bytes']:,} bytes, "
            f"{report['bits_per_expert_weight']:.4f} bits a weight"
            + (", every expert decoded" if deep else "")
        )


@main.command("inspect")
@click.argument("path", metavar="PACKAGE|FILE", type=LOCATION)
@_json_option
@click.pass_obj
def inspect_command(show_progress: bool, path: Path, as_json: bool) -> None:
    """Show what a package or a layer file holds.

    Geometry, rate modes, bytes by kind, errors and origin, without reading the weights.
    """
    from qsrt_pack.inspect import describe, inspect

    report = inspect(path, show_progress=show_progress)
    if as_json:
        _print_json(report)
    else:
        click.echo(describe(report))


@main.command()
@click.argument("package", type=LOCATION)
@click.argument("out", type=LOCATION)
@_overwrite_option
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Of the experts, and of config.json; by default what that states.",
)
@click.pass_obj
def decode(
    show_progress: bool, package: Path, out: Path, overwrite: bool, dtype: str | None
) -> None:
    """Decode a package into a dense checkpoint.

    OUT becomes a checkpoint folder that transformers loads.
    """
    from qsrt_pack.restore import decode_package

    decode_package(package, out, dtype=dtype, overwrite=overwrite, show_progress=show_progress)
    _log.info("%s is complete", out)


@main.command("eval")
@click.argument("package", type=LOCATION)
@click.option("--reference", type=LOCATION, required=True, help="The checkpoint it was made from.")
@click.option("--text", type=LOCATION, required=True, help="A UTF-8 text file.")
@click.option("--window", type=click.IntRange(2), help="Tokens read at once [1024 or less].")
@click.option("--windows", type=click.IntRange(1), help="How many windows [all].")
@_json_option
@click.pass_obj
def eval_command(
    show_progress: bool,
    package: Path,
    reference: Path,
    text: Path,
    window: int | None,
    windows: int | None,
    as_json: bool,
) -> None:
    """Compare a package with its original model.

    Reports KL, agreement and perplexity on a text, in float32; both models are in memory at once.
    """
    from qsrt_pack.evaluate import describe, evaluate

    report = evaluate(
        package, reference, text, window=window, windows=windows, show_progress=show_progress
    )
    if as_json:
        _print_json(report)
    else:
        click.echo(describe(report))


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, sort_keys=True))
