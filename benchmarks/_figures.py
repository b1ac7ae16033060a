"""Dated reports as a page shows them: the newest of each, what their tables say, and drawings of that.

Goes in: benchmarks/reports, the scripts' first lines, the pages that quote reports. Comes out: rows and SVG.
May touch: these files, to read them, and `git`.
"""

import ast
import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from benchmarks import _reach

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "benchmarks" / "reports"
PARTIAL = REPORTS / ".partial"  # of benchmarks that have not ended; git ignores it
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")  # Paul Tol's bright scheme

# these write and read reports; the clocks among them have tests of their own
_WRITERS = {ROOT / "benchmarks" / f"{name}.py" for name in ("_figures", "_reach", "_report")}
_NUMBER = r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
_DATED = re.compile(r"(.+)-(\d{4}-\d{2}-\d{2})")
_SPREAD = re.compile(rf"\(({_NUMBER}) ?(?:to|\.\.) ?({_NUMBER})")
_LABELS, _WIDTH, _BAR, _FIGURES = 210, 760, 13, 70  # pixels


class FigureError(ValueError):
    """A report, table or column that is asked for is not there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The newest report of one name."""

    name: str
    path: Path
    header: Mapping[str, object]

    @property
    def script(self) -> Path:
        """What wrote it."""
        return _script(self.header)

    @property
    def measures(self) -> str:
        """What its benchmark says of itself."""
        docstring = ast.get_docstring(ast.parse(self.script.read_text(encoding="utf-8"))) or ""
        return docstring.partition("\n")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A number of a table, and from where to where it was, if the table says so."""

    value: float
    low: float
    high: float


Rows = list[tuple[str, list[Figure | None]]]


def is_current(header: Mapping[str, object]) -> bool:
    """Whether a report, or one of its rows, tells of the files that its script reaches, as they are here."""
    if header.get("dirty", False):
        return False
    commit, script = str(header["commit"]), _script(header)
    reached = _reach.files_of(script) - _WRITERS
    try:
        changed = _named_by("diff", commit) & reached
        if changed:  # it may be by commits that say whose figures they alter
            since = f"{commit}..HEAD"
            others = _named_by("log", "--format=", "--invert-grep", "--grep=^Figures: ", since)
            own = _named_by("log", "--format=", "-E", f"--grep=^Figures: (.* )?{script.stem}( |$)", since)
            changed &= others | own | _named_by("diff", "HEAD")
    except subprocess.CalledProcessError:
        return False  # no such commit here
    return not changed


def _named_by(verb: str, *arguments: str) -> set[Path]:
    """Files that a command of git names."""
    command = ["git", verb, "--name-only", *arguments, "--"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {ROOT / name for name in said.stdout.splitlines() if name}


def _script(header: Mapping[str, object]) -> Path:
    """The benchmark that wrote a report."""
    name = re.findall(r"benchmarks[./](\w+)", str(header["command"]))[0]
    return ROOT / "benchmarks" / f"{name}.py"


def newest(folder: Path = REPORTS) -> dict[str, Report]:
    """The newest report of each name, by name."""
    found = {}
    for path in sorted(folder.glob("*.json")):  # of one name, the newest comes last
        name = path.stem if (dated := _DATED.fullmatch(path.stem)) is None else dated.group(1)
        header = json.loads(path.read_text(encoding="utf-8"))["header"]
        found[name] = Report(name=name, path=path.with_suffix(".md"), header=header)
    return found


def quotations(report: Report, pages: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """The sentences of the pages that link to the report, without their links."""
    for page in pages:
        for paragraph in re.split(r"\n\s*\n", page.read_text(encoding="utf-8")):
            if report.path.name not in paragraph:
                continue
            flat = " ".join(paragraph.split()).removeprefix("- ")
            for sentence in re.split(r"(?<=[.:]) (?=[A-Z`\[*])", flat):
                if report.path.name in sentence:
                    yield page, re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", sentence).rstrip(":")


def table(report: Report, under: str = "") -> list[dict[str, str]]:
    """The rows, by column, of the first table below a line that begins with ``under``.

    Raises:
        FigureError: there is none.
    """
    above, lines = "", iter(report.path.read_text(encoding="utf-8").splitlines())
    for line in lines:
        if not line.startswith("|"):
            above = line.lstrip("# ") or above
        elif above.startswith(under):
            columns, rows = _cells(line), []
            next(lines)
            for row in lines:
                if not row.startswith("|"):
                    break
                rows.append(dict(zip(columns, _cells(row), strict=True)))
            return rows
    raise FigureError(f"{report.path.name} has no table under '{under}'.")


def rows_of(found: Sequence[Mapping[str, str]], labels: Sequence[str], columns: Sequence[str]) -> Rows:
    """Every row's label, of several columns' texts, and its figures.

    Raises:
        FigureError: there are no rows, or a column is missing.
    """
    missing = {*labels, *columns} - set(found[0] if found else ())
    if missing:
        raise FigureError(
            f"the table has no column {sorted(missing)}; it has {list(found[0] if found else ())}."
        )
    return [
        (" ".join(row[label] for label in labels), [figure(row[column]) for column in columns])
        for row in found
    ]


def figure(text: str) -> Figure | None:
    """``1.42 (1.31 to 1.55)`` as numbers; None where a cell is empty or begins with no number."""
    number = re.match(_NUMBER, text)
    if number is None:
        return None
    value, spread = float(number.group()), _SPREAD.search(text)
    low, high = map(float, spread.groups()) if spread else (value, value)
    return Figure(value=value, low=low, high=high)


def bars(title: str, rows: Rows, series: Sequence[str], origin: float = 0.0) -> str:
    """Bars from ``origin``, a group a row, a colour a series, and lines from the lowest to the highest.

    Text has the page's own colour, so that light and dark schemes both do.
    """
    ends = [each for _, figures in rows for one in figures if one for each in (one.low, one.high, one.value)]
    scale = (_WIDTH - _LABELS - _FIGURES) / (max(ends) - origin)
    group = len(series) * _BAR + 8
    height = 26 + len(rows) * group
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
            'style="width: 100%; font: 11px sans-serif" fill="currentColor">',
            f"<title>{escape(title)}</title>",
            *_legend(series),
            *(part for at, row in enumerate(rows) for part in _group(row, 26 + at * group, scale, origin)),
            "</svg>",
        )
    )


def _legend(series: Sequence[str]) -> Iterator[str]:
    at = float(_LABELS)
    for name, colour in zip(series, COLOURS, strict=False):
        yield f'<rect x="{at:.0f}" y="4" width="10" height="10" fill="{colour}"/>'
        yield f'<text x="{at + 14:.0f}" y="13">{escape(name)}</text>'
        at += 34 + 6.2 * len(name)


def _group(row: tuple[str, list[Figure | None]], top: float, scale: float, origin: float) -> Iterator[str]:
    label, figures = row
    middle = top + len(figures) * _BAR / 2 + 4
    yield f'<text x="{_LABELS - 8}" y="{middle:.0f}" text-anchor="end">{escape(label)}</text>'
    for at, one in enumerate(figures):
        if one is None:
            continue
        y, colour = top + at * _BAR, COLOURS[at]
        low, end, high = (_LABELS + scale * (each - origin) for each in (one.low, one.value, one.high))
        left, right = min(_LABELS, end), max(_LABELS, end)
        yield (
            f'<rect x="{left:.1f}" y="{y:.0f}" width="{right - left:.1f}" height="{_BAR - 2}" '
            f'fill="{colour}">'
            f"<title>{escape(label)}: {one.value:g}</title></rect>"
        )
        if one.low != one.high:
            y_line = y + _BAR / 2 - 1
            yield f'<path d="M{low:.1f} {y_line:.1f}H{high:.1f}" stroke="currentColor" stroke-width="1.5"/>'
        yield f'<text x="{max(right, high) + 4:.1f}" y="{y + _BAR - 4:.0f}">{one.value:g}</text>'


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]
