"""The commands that read packages: validate, inspect, decode."""

import logging
from pathlib import Path

import click

from qsrt_pack.cli.options import LOCATION, json_option, overwrite_option, print_json

_log = logging.getLogger("qsrt_pack")


@click.command()
@click.argument("package", type=LOCATION)
@click.option("--deep", is_flag=True, help="Decode every expert too.")
@json_option
@click.pass_obj
def validate(show_progress: bool, package: Path, deep: bool, as_json: bool) -> None:
    """Check every byte and rule of a package.

    \b
    Example:
      qsrt-pack validate --deep model-qsrt
    """
    from qsrt_pack.validate import validate as run

    report = run(package, deep=deep, show_progress=show_progress)
    if as_json:
        print_json(report)
    else:
        click.echo(
            f"{package} is valid: {report['layers']} layers, {report['experts']} experts, "
            f"{report['files']} files, {report['bytes']:,} bytes, "
            f"{report['bits_per_expert_weight']:.4f} bits a weight"
            + (", every expert decoded" if deep else "")
        )


@click.command("inspect")
@click.argument("path", metavar="PACKAGE|FILE", type=LOCATION)
@json_option
@click.pass_obj
def inspect_command(show_progress: bool, path: Path, as_json: bool) -> None:
    """Show what a package or a layer file holds.

    Geometry, rate modes, bytes by kind, errors and origin, without reading the weights.

    \b
    Example:
      qsrt-pack inspect model-qsrt
    """
    from qsrt_pack.inspect import describe, inspect

    report = inspect(path, show_progress=show_progress)
    if as_json:
        print_json(report)
    else:
        click.echo(describe(report))


@click.command()
@click.argument("package", type=LOCATION)
@click.argument("out", type=LOCATION)
@overwrite_option
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

    \b
    Example:
      qsrt-pack decode --dtype bfloat16 model-qsrt model-decoded
    """
    from qsrt_pack.restore import decode_package

    decode_package(package, out, dtype=dtype, overwrite=overwrite, show_progress=show_progress)
    _log.info("%s is complete", out)
