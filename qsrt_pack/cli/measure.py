"""The commands that say how good a package is, and how fast: eval, report and bench."""

import os
import re
from contextlib import ExitStack
from pathlib import Path

import click

from qsrt_pack.cli.options import LOCATION, SOURCE, json_option, one_device, print_json

_TOKENS = ",".join(str(1 << power) for power in range(13))
_MOST_TOKENS, _MOST_COUNTS = 65_536, 64


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


def _token_counts(_context: click.Context, _parameter: click.Parameter, text: str) -> list[int]:
    parts = text.split(",")
    counts = [int(part) for part in parts if re.fullmatch("[0-9]{1,5}", part)]
    if len(counts) < len(parts) or not all(1 <= count <= _MOST_TOKENS for count in counts):
        raise click.BadParameter(
            f"{text!r} is no list of numbers from 1 to {_MOST_TOKENS}, as 1,16,256"
        )
    if len(set(counts)) > _MOST_COUNTS:
        raise click.BadParameter(f"{len(set(counts))} numbers, expected at most {_MOST_COUNTS}")
    return sorted(set(counts))


@click.command("bench")
@click.argument("what", metavar="PACKAGE|GEOMETRY")
@click.option(
    "-m",
    "--tokens",
    default=_TOKENS,
    show_default=True,
    callback=_token_counts,
    help="How many tokens a layer is given at once, several separated by commas.",
)
@click.option("--device", default="auto", show_default=True, help="A CUDA device's number.")
@click.option(
    "--with",
    "also",
    type=click.Choice(["a8", "expanded"]),
    multiple=True,
    help="Also the packed layer with rows in MXFP8 (W4A8), or expanded to E4M3, which takes memory "
    "of its own; may be repeated.",
)
@click.option("--json", "json_file", type=LOCATION, help="A file for the report, as JSON.")
@click.option("--png", type=LOCATION, help="A file for a plot of it.")
@click.option("--overwrite", is_flag=True, help="Replace these files.")
def bench_command(
    what: str,
    tokens: list[int],
    device: str,
    also: tuple[str, ...],
    json_file: Path | None,
    png: Path | None,
    overwrite: bool,
) -> None:
    """Time a layer's experts on this GPU, packed and in bfloat16.

    PACKAGE is a folder or a repository on the Hub, OWNER/NAME[@REVISION]: its layers are loaded,
    which is timed too. GEOMETRY are sizes without a package, hidden size, intermediate size,
    experts and experts of a token, as H=2048,I=768,E=128,k=8, or a name for such: fruit, qwen30b,
    glm, mixtral (a folder of that name is ./glm).

    The packed layer runs by the kernels that moe_forward takes; the same layer decoded to bfloat16
    by torch's grouped product and by Triton kernels, tuned for each number of tokens; --with adds
    other ways of ours. What cannot run here is left out, with the reason. Every output is first
    compared with the reference. Times are medians of graph replays over more inputs than the L2
    cache holds, routing included.

    \b
    Example:
      qsrt-pack bench model-qsrt -m 1,16,256 --json bench.json --png bench.png
    """
    from qsrt_pack.bench.shapes import parse_shape
    from qsrt_pack.hub import local_folder
    from qsrt_pack.output import check_file, placed
    from qsrt_runtime.format import schema

    try:
        shape = parse_shape(what)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    found = one_device(device)
    if found.type != "cuda":
        raise click.ClickException("bench times kernels on a CUDA GPU, and there is none to use")
    from qsrt_pack.bench.machine import machine_of
    from qsrt_pack.bench.run import bench
    from qsrt_pack.bench.table import describe

    if png is not None:
        os.environ.pop("MPLBACKEND", None)  # as report does
        from qsrt_pack.bench.figure import plot  # brings matplotlib, which may be missing
    subject = shape or local_folder(SOURCE.convert(what, None, None))
    files = [file for file in (json_file, png) if file is not None]
    for file in files:
        check_file(file, overwrite)
    if len({file.resolve() for file in files}) < len(files):
        raise click.UsageError("--json and --png name the same file")
    report = bench(subject, tokens, machine_of(found), also=also)
    click.echo(describe(report))
    with ExitStack() as stack:
        if json_file is not None:
            stack.enter_context(placed(json_file, schema.dump(report)))
        if png is not None:
            stack.enter_context(placed(png, plot(report)))
