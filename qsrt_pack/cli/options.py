"""Arguments and options that several commands take."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


class _Location(click.Path):
    """A path made absolute, so that `.` and `..` have names."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Path:
        return Path(os.path.abspath(super().convert(value, param, ctx)))


class _Source(_Location):
    """A folder that is read: a path made absolute, or a repository's name, which stays text."""

    name = "folder or repository"

    def convert(self, value: Any, param: Any, ctx: Any) -> Path | str:
        from qsrt_pack.hub import is_repository

        return value if is_repository(value) else super().convert(value, param, ctx)


LOCATION, SOURCE = _Location(), _Source()


def json_option(command: Callable) -> Callable:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def overwrite_option(command: Callable) -> Callable:
    return click.option("--overwrite", is_flag=True, help="Replace what OUT holds, whole.")(command)


def one_device(text: str) -> Any:
    """The torch.device that --device names; UsageError where there is none, or several."""
    from qsrt_pack.workers import find_devices

    try:
        found = find_devices(text)
    except ValueError as error:
        raise click.UsageError(f"--device: {error}") from None
    if len(found) > 1:
        raise click.UsageError(f"--device: {text} are several; give one")
    return found[0]


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, sort_keys=True))
