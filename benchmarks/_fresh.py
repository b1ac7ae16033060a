"""Which reports that the pages quote are older than a change of the rooms that they measure.

Goes in: README and docs, the reports, their scripts, and CHANGELOG.md, in which an entry that changes figures
ends with `<!-- measure again: 2026-11-26 planner capture -->`. Comes out: what to run.
May touch: these files, to read them.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from benchmarks import _figures, _reach

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {door.parent.name for door in (ROOT / "src" / "squeezebox").glob("*/__init__.py")}
_MARK = re.compile(r"<!-- measure again: (.*?) -->", re.S)
_DRAWN = re.compile(r"^```\{bars\} (\S+)", re.M)


class MarkError(ValueError):
    """A mark in the changelog names no day or no room."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stale:
    """A quoted report, and the rooms that changed after it."""

    report: _figures.Report
    rooms: Mapping[str, date]


def changed(changelog: str) -> dict[str, date]:
    """The last day on which each room's figures changed, by the marks.

    Raises:
        MarkError: a mark is not a day and rooms that there are.
    """
    found: dict[str, date] = {}
    for mark in _MARK.findall(changelog):
        day, *rooms = mark.split()
        if not rooms or not re.fullmatch(r"\d{4}-\d\d-\d\d", day) or not ROOMS.issuperset(rooms):
            raise MarkError(f"'measure again: {mark}' is not a day and rooms; rooms are {sorted(ROOMS)}.")
        for room in rooms:
            found[room] = max(date.fromisoformat(day), found.get(room, date.min))
    return found


def quoted(pages: Sequence[Path]) -> list[_figures.Report]:
    """Reports that a page links to, or draws."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    drawn, newest = set(_DRAWN.findall(text)), _figures.newest().values()
    return [
        each for each in newest if each.name in drawn or re.search(rf"reports/{each.name}-\d{{4}}-", text)
    ]


def stale(pages: Sequence[Path], changelog: str) -> list[Stale]:
    """Quoted reports with rooms, among those that they measure, that changed on a later day."""
    days, found = changed(changelog), []
    for report in quoted(pages) if days else ():
        measured = date.fromisoformat(str(report.header["date"]))
        rooms = {
            room: days[room] for room in _reach.rooms_of(report.script) & days.keys() if days[room] > measured
        }
        if rooms:
            found.append(Stale(report=report, rooms=rooms))
    return found


def main() -> int:
    """Print what to run; 1 if something is stale."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = stale(pages, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    for each in found:
        rooms = ", ".join(f"{room} ({day})" for room, day in sorted(each.rooms.items()))
        print(f"{each.report.path.name} is older than a change of {rooms}: {each.report.header['command']}")
    if found:
        names = " ".join(each.report.name for each in found)
        print(f'measure again, and let the pages follow: make bench BENCHMARKS="{names}"')
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
