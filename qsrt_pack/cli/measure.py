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


@click.command("report")
@click.argument("package", type=LOCATION)
@click.option("--html", type=LOCATION, help="The page [PACKAGE-report.html].")
@click.option("--png", type=LOCATION, help="A folder for the plots, as PNG files too.")
@click.option("--eval", "evaluation", type=LOCATION, help="Of `eval --json` [the package's own].")
@click.option("--overwrite", is_flag=True, help="Replace the page, and the folder whole.")
@click.pass_obj
def report_command(
    show_progress: bool,
    package: Path,
    html: Path | None,
    png: Path | None,
    evaluation: Path | None,
    overwrite: bool,
) -> None:
    """Show a package on a page of its own.

    Errors, rate modes, calibration tokens, bytes, and the worst experts, as plots and tables in
    one HTML file that needs no network. Prints the page's name.

    \b
    Example:
      qsrt-pack report model-qsrt --eval eval.json --png plots
    """
    from qsrt_pack.report import write_report

    page = html or package.with_name(f"{package.name}-report.html")
    write_report(
        package,
        page,
        png=png,
        evaluation=evaluation,
        overwrite=overwrite,
        show_progress=show_progress,
    )
    click.echo(page)
