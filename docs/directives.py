"""What the page of benchmarks is made of: ``{reports}``, and ``{bars}`` of a table's columns."""

from pathlib import Path
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from benchmarks import _figures

ROOT = Path(__file__).parents[1]


class Reports(SphinxDirective):
    """The newest report of each benchmark: what it measures, where, and what the pages quote from it."""

    def run(self) -> list[nodes.Node]:
        """One entry a report."""
        pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
        lines = []
        for report in _figures.newest().values():
            facts = report.header
            lines += [
                f"[{report.name}](/benchmarks/reports/{report.path.name})",
                f": {report.measures} *{facts['date']}, {facts['cores']} cores, {facts['cpu']}, torch "
                f"{facts['torch']}, commit {str(facts['commit'])[:8]}.*",
                "",
            ]
            for page, sentence in _figures.quotations(report, pages):
                lines += [f"    - {sentence} ([{page.stem}](/{page.relative_to(ROOT)}))"]
            lines += [""]
        return parsed(self, lines)


class Bars(SphinxDirective):
    """Columns of a report's table as bars. The argument names the report; the content is the caption.

    ``under`` is how the line above the table begins, ``labels`` and ``columns`` are separated by semicolons,
    ``where`` (``column = text``) leaves rows out, ``origin`` is where bars begin.
    """

    required_arguments = 1
    has_content = True
    option_spec: ClassVar = {
        "under": directives.unchanged,
        "labels": directives.unchanged_required,
        "columns": directives.unchanged_required,
        "where": directives.unchanged,
        "origin": float,
    }

    def run(self) -> list[nodes.Node]:
        """The drawing, and the caption with a link to the report."""
        labels, columns = (_parts(self.options[name]) for name in ("labels", "columns"))
        wanted = [
            [side.strip() for side in part.split("=")] for part in _parts(self.options.get("where", ""))
        ]
        try:
            report = _figures.newest()[self.arguments[0]]
            found = _figures.table(report, self.options.get("under", ""))
            kept = [row for row in found if all(row[column] == text for column, text in wanted)]
            rows = _figures.rows_of(kept, labels, columns)
        except (KeyError, _figures.FigureError) as missing:
            raise self.error(f"nothing to draw from report '{self.arguments[0]}': {missing}") from missing
        caption = " ".join(self.content)
        drawing = _figures.bars(caption, rows, columns, self.options.get("origin", 0.0))
        link = f"[{report.path.stem}](/benchmarks/reports/{report.path.name})"
        figure = nodes.raw("", drawing, format="html")
        return [figure, *parsed(self, [f"{caption} Figures: {link}."])]


def parsed(directive: SphinxDirective, lines: list[str]) -> list[nodes.Node]:
    """Markdown as the page's own."""
    holder = nodes.container()
    directive.state.nested_parse(StringList(lines, source=directive.env.docname), 0, holder)
    return holder.children


def setup(app: Sphinx) -> dict[str, bool]:
    """Make both known."""
    app.add_directive("reports", Reports)
    app.add_directive("bars", Bars)
    return {"parallel_read_safe": True}


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(";") if part.strip()]
