"""A report on a package: a page of plots and tables, and the plots as files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qsrt_pack.output import check_output, replacing
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
    _check_page(package, html, overwrite)
    if png is not None:
        check_output(png, package, overwrite)
        if png.resolve() in (html.resolve(), *html.resolve().parents):
            raise FormatError(f"{png} is to hold the plots alone; choose another for the page")
    _check_evaluation(evaluation, html, png)
    content = read_content(package, evaluation, show_progress=show_progress)
    sections = build_sections(content)
    with _placed(html, build_page(content, sections).encode()):
        if png is not None:
            with replacing(png, overwrite=overwrite) as folder:
                for section in sections:
                    if section.figure is not None:
                        file = folder / f"{section.name}.png"
                        paths.write_file(file, figures.png(section.figure, section.title))


@contextmanager
def _placed(html: Path, page: bytes) -> Iterator[None]:
    """Write the page under a name that nothing has, and rename it when the block has ended."""
    partial = html.with_name(f".{html.name}.{os.getpid()}")
    try:
        with paths.naming(partial), partial.open("xb") as file:
            file.write(page)
            file.flush()
            os.fsync(file.fileno())
        yield
        partial.replace(html)
    finally:
        partial.unlink(missing_ok=True)
    paths.sync_folder(html.parent)


def _check_evaluation(evaluation: Path | None, html: Path, png: Path | None) -> None:
    """Refuse to write over what is read."""
    if evaluation is None:
        return
    read = evaluation.resolve()
    if read == html.resolve() or (png is not None and png.resolve() in read.parents):
        raise FormatError(f"{evaluation} would be replaced by what is written; move it")


def _check_page(package: Path, html: Path, overwrite: bool) -> None:
    """Refuse a page that cannot be written, or that would lose something."""
    if not html.parent.is_dir():
        raise FormatError(f"{html.parent} is not a folder; make it, or choose another for the page")
    if package.resolve() in html.resolve().parents:
        raise FormatError(f"{html} lies in the package, which is sealed; choose another place")
    if html.is_dir():
        raise FormatError(f"{html} is a folder; name a file for the page")
    if not os.access(html.parent, os.W_OK | os.X_OK):
        raise FormatError(f"{html.parent} cannot be written; choose another folder for the page")
    if html.exists() and not html.is_file():
        raise FormatError(f"{html} is no regular file; choose another name for the page")
    if (html.exists() or html.is_symlink()) and not overwrite:
        raise FormatError(f"{html} exists; choose another or give --overwrite to replace it")
