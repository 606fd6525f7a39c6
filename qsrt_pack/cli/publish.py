"""The commands that bring packages to the Hub and back: push and pull."""

import logging
import re
from pathlib import Path

import click

from qsrt_pack.cli.options import LOCATION, overwrite_option

_log = logging.getLogger("qsrt_pack")


@click.command("push")
@click.argument("package", type=LOCATION)
@click.argument("repository", metavar="OWNER/NAME")
@click.option("--private", is_flag=True, help="The repository is, or becomes, private.")
@click.option("--revision", help="The branch, made if it is not there [main].")
@click.option("--license", "license_id", help="As apache-2.0 [the package's card's].")
@click.option("--base-model", help="OWNER/NAME of the original [the package's card's].")
@click.option("--report", type=LOCATION, help="A file of `eval --json`, for the card.")
@click.option("--bench", type=LOCATION, help="A file of `bench --json`, for the card.")
@click.pass_obj
def push_command(
    show_progress: bool,
    package: Path,
    repository: str,
    private: bool,
    revision: str | None,
    license_id: str | None,
    base_model: str | None,
    report: Path | None,
    bench: Path | None,
) -> None:
    """Publish a package on the Hub.

    Checks it, writes its model card, seals it again, and uploads it; the seal goes last. Prints
    the digest of the seal. Stopped by whatever, the same command continues. Log in before, by
    `hf auth login` or HF_TOKEN.

    \b
    Example:
      qsrt-pack push --license apache-2.0 --base-model owner/model model-qsrt me/model-qsrt
    """
    from qsrt_pack.hub import push

    digest = push(
        package,
        repository,
        private=private,
        revision=revision,
        license_id=license_id,
        base_model=base_model,
        report=report,
        bench=bench,
        show_progress=show_progress,
    )
    _log.info("%s is complete; pin it with --expect and this digest:", repository)
    click.echo(digest)


@click.command("pull")
@click.argument("repository", metavar="OWNER/NAME")
@click.argument("out", type=LOCATION)
@click.option("--revision", help="A branch, tag or commit [main].")
@click.option("--expect", metavar="SHA256", help="What the digest of the seal must be.")
@overwrite_option
@click.pass_obj
def pull_command(
    show_progress: bool,
    repository: str,
    out: Path,
    revision: str | None,
    expect: str | None,
    overwrite: bool,
) -> None:
    """Download a package from the Hub and check it whole.

    Prints the digest of its seal, which binds every byte. Stopped by whatever, the same command
    continues.

    \b
    Example:
      qsrt-pack pull me/model-qsrt model-qsrt
    """
    from qsrt_pack.hub import pull

    if expect is not None and not re.fullmatch("[0-9a-f]{64}", expect):
        raise click.UsageError(f"--expect: {expect!r} is no SHA-256, 64 lower-case hex digits")
    digest = pull(
        repository,
        out,
        revision=revision,
        expect=expect,
        overwrite=overwrite,
        show_progress=show_progress,
    )
    _log.info("%s is complete and valid; its seal:", out)
    click.echo(digest)
