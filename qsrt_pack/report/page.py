"""The page: one HTML file that asks for nothing from outside."""

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from qsrt_pack.inspect import MAKERS, content_lines, not_hashed, origin_lines
from qsrt_pack.report import figures
from qsrt_pack.report.content import Content
from qsrt_pack.report.sections import Section

_ENVIRONMENT = Environment(
    loader=PackageLoader("qsrt_pack.report", ""),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def build_page(content: Content, sections: list[Section]) -> str:
    """The page's text. Every string of the package is escaped; the plots bring none."""
    return _ENVIRONMENT.get_template("page.html").render(
        content=content,
        maker=MAKERS[content.summary["is_ours"]],
        facts=[*content_lines(content.summary), not_hashed(is_package=True)],
        origin=origin_lines(content.summary),
        sections=sections,
        svg=lambda figure, name: Markup(figures.svg(figure, name)),
    )
