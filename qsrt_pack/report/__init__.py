"""A report on a package: a page of plots and tables, and the plots as files."""

from pathlib import Path

from qsrt_pack.output import check_file, check_output, placed, replacing
from qsrt_pack.report import figures
from qsrt_pack.report.content import read_content
from qsrt_pack.report.page import build_page
from qsrt_pack.report.sections import build_sections
from qsrt_runtime.format import paths
from qsrt_runtime.format.errors import FormatError


def write_report(
    package: Path,
    html: Path,
    *,
    png: Path | None = None,
    evaluation: Path | None = None,
    overwrite: bool = False,
    show_progress: bool = True,
) -> None:
    """Write the page on a package, and with png a folder of its plots.

    evaluation: a file of `eval --json`; without it the report that the package holds, if any.
    The same package and library versions give the same bytes. Raises FormatError naming what is
    wrong; then nothing was written.
    """
    check_file(html, overwrite)
    if png is not None:
        check_output(png, package, overwrite)
        if png.resolve() in (html.resolve(), *html.resolve().parents):
            raise FormatError(f"{png} is to hold the plots alone; choose another for the page")
    _check_evaluation(evaluation, html, png)
    content = read_content(package, evaluation, show_progress=show_progress)
    sections = build_sections(content)
    with placed(html, build_page(content, sections).encode()):
        if png is not None:
            with replacing(png, overwrite=overwrite) as folder:
                for section in sections:
                    if section.figure is not None:
                        file = folder / f"{section.name}.png"
                        paths.write_file(file, figures.png(section.figure, section.title))


def _check_evaluation(evaluation: Path | None, html: Path, png: Path | None) -> None:
    """Refuse to write over what is read."""
    if evaluation is None:
        return
    read = evaluation.resolve()
    if read == html.resolve() or (png is not None and png.resolve() in read.parents):
        raise FormatError(f"{evaluation} would be replaced by what is written; move it")
