"""The commands that say how good a package is: eval and report."""

import os
from pathlib import Path

import click

from qsrt_pack.cli.options import LOCATION, SOURCE, json_option, one_device, print_json


@click.command("eval")
@click.argument("package", type=SOURCE)
@click.option("--reference", type=SOURCE, required=True, help="The checkpoint it was made from.")
@click.option(
    "--text",
    type=LOCATION,
    required=True,
    help="A UTF-8 text, or a .safetensors file of integers `tokens`, [n] or [documents, n].",
)
@click.option("--window", type=click.IntRange(2), help="Tokens read at once [1024 or less].")
@click.option("--windows", type=click.IntRange(1), help="How many windows [all].")
@click.option("--device", default="auto", show_default=True, help="cpu, or a CUDA device's number.")
@click.option(
    "--cache",
    type=LOCATION,
    help="A file for the reference's logits, used again where it is there and of the same.",
)
@click.option(
    "--against",
    type=LOCATION,
    multiple=True,
    help="Another package or checkpoint, in one table with PACKAGE; may be repeated.",
)
@click.option("--noise-floor", is_flag=True, help="Also the reference in bfloat16.")
@click.option(
    "--max-kl", type=click.FloatRange(0), help="Exit with 1 where PACKAGE's mean KL is above it."
)
@json_option
@click.pass_obj
def eval_command(
    show_progress: bool,
    package: Path | str,
    reference: Path | str,
    text: Path,
    window: int | None,
    windows: int | None,
    device: str,
    cache: Path | None,
    against: tuple[Path, ...],
    noise_floor: bool,
    max_kl: float | None,
    as_json: bool,
) -> None:
    """Compare a package with its original model.

    Reports KL, agreement and perplexity on a text, in float32. The models run one after another;
    the reference's logits wait in a file, 4 bytes a position and word of the vocabulary, by
    default a temporary one (TMPDIR). The interval of the mean KL is over documents: the rows of a
    two-dimensional file of tokens, or else windows. PACKAGE and the reference may be folders or
    repositories on the Hub, OWNER/NAME[@REVISION].

    \b
    Example:
      qsrt-pack eval --reference model --text text.txt --max-kl 0.1 model-qsrt
    """
    from qsrt_pack.evaluate import describe, evaluate
    from qsrt_pack.hub import checkpoint_folder, local_folder

    found = one_device(device)
    report = evaluate(
        local_folder(package),
        checkpoint_folder(reference),
        text,
        window=window,
        windows=windows,
        device=found,
        cache=cache,
        against=against,
        noise_floor=noise_floor,
        show_progress=show_progress,
    )
    if as_json:
        print_json(report)
    else:
        click.echo(describe(report))
    if max_kl is not None and report["kl_mean"] > max_kl:
        raise click.ClickException(f"mean KL {report['kl_mean']:.5f} is above --max-kl {max_kl:g}")


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
    os.environ.pop("MPLBACKEND", None)  # of windows; with a wrong one matplotlib does not load
    from qsrt_pack.report import write_report

    if html is None and not package.name:
        raise click.UsageError("give --html: the root folder has no name to derive it from")
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
