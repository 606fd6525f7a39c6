"""The command itself: what goes to the log, what an error looks like."""

import _thread
import logging
import sys
import threading
from typing import Any

import click

import qsrt_runtime
from qsrt_runtime.format.errors import FormatError

_INSTALL = {  # what brings a module
    "jinja2": "'qsrt[report]'",
    "matplotlib": "'qsrt[report]'",
    "numba": "'qsrt[pack]'",
    "numpy": "'qsrt[report]'",
    "rich": "'qsrt[pack]'",
    "transformers": "'qsrt[eval]'",
    "triton": "triton",
}


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
        except click.exceptions.Exit:  # of --help, a RuntimeError too
            raise
        except (RuntimeError, MemoryError) as error:
            from qsrt_pack.workers import device_failure  # brings torch, which raised it

            reason = device_failure(error)
            if reason is None:
                raise
            raise click.ClickException(_with_notes(reason, error)) from error


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
