"""The commands that measure packages: eval."""

from pathlib import Path

import click

from qsrt_pack.cli.options import LOCATION, SOURCE, json_option, print_json


@click.command("eval")
@click.argument("package", type=SOURCE)
@click.option("--reference", type=SOURCE, required=True, help="The checkpoint it was made from.")
@click.option("--text", type=LOCATION, required=True, help="A UTF-8 text file.")
@click.option("--window", type=click.IntRange(2), help="Tokens read at once [1024 or less].")
@click.option("--windows", type=click.IntRange(1), help="How many windows [all].")
@json_option
@click.pass_obj
def eval_command(
    show_progress: bool,
    package: Path | str,
    reference: Path | str,
    text: Path,
    window: int | None,
    windows: int | None,
    as_json: bool,
) -> None:
    """Compare a package with its original model.

    Reports KL, agreement and perplexity on a text, in float32; both models are in memory at once.
    Both may be folders or repositories on the Hub, OWNER/NAME[@REVISION].

    \b
    Example:
      qsrt-pack eval --reference model --text text.txt model-qsrt
    """
    from qsrt_pack.evaluate import describe, evaluate
    from qsrt_pack.hub import checkpoint_folder, local_folder

    report = evaluate(
        local_folder(package),
        checkpoint_folder(reference),
        text,
        window=window,
        windows=windows,
        show_progress=show_progress,
    )
    if as_json:
        print_json(report)
    else:
        click.echo(describe(report))
