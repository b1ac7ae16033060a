"""Which reports that the pages quote are older than a change of the rooms that they measure.

Goes in: README and docs, the reports, their scripts, and CHANGELOG.md, in which an entry that changes figures
ends with `<!-- measure again: 2026-11-26 planner capture -->`. Comes out: what to run.
May touch: these files, to read them.
"""

import ast
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path

from benchmarks import _figures

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {"squeezebox": ROOT / "src", "benchmarks": ROOT, "tests": ROOT}
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
        rooms = {room: days[room] for room in rooms_of(report.script) & days.keys() if days[room] > measured}
        if rooms:
            found.append(Stale(report=report, rooms=rooms))
    return found


def rooms_of(script: Path) -> set[str]:
    """Rooms whose files a script reaches by imports, name by name, its own and those of what it imports."""
    seen, waiting = {script}, [script]
    while waiting:
        for module, name in _imports(waiting.pop()):
            new = set(_files(module, name)) - seen
            seen |= new
            waiting += new
    house = SOURCES["squeezebox"] / "squeezebox"
    inside = (path.relative_to(house).parts for path in seen if path.is_relative_to(house))
    return {parts[0] for parts in inside if len(parts) > 1}


@cache
def _imports(path: Path) -> list[tuple[str, str]]:
    """Modules and the names taken of them; of a benchmark also by programs that are in it as text."""
    found = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names if "." in alias.name]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.append((node.value.id, node.attr))  # squeezebox.attach
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and path.parent.name == "benchmarks"
        ):
            found += [("squeezebox", name) for name in re.findall(r"\bsqueezebox\.(\w+)", node.value)]
            imported = re.findall(r"from (squeezebox[.\w]*) import (\w+(?:, \w+)*)", node.value)
            found += [(module, name) for module, names in imported for name in names.split(", ")]
    return found


@cache
def _tree(path: Path) -> ast.AST:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _files(module: str, name: str) -> frozenset[Path]:
    """Where a name of ours is defined: behind a room's door, or all that the door opens on."""
    top, *rest = module.split(".")
    place = SOURCES.get(top, Path()).joinpath(top, *rest)
    within, door = place / name, place / "__init__.py"
    if top not in SOURCES:
        return frozenset()
    if not door.is_file():
        path = (within if place.is_dir() else place).with_suffix(".py")
        return frozenset([path] if path.is_file() else [])
    if name and (within.with_suffix(".py").is_file() or (within / "__init__.py").is_file()):
        return _files(f"{module}.{name}", "")
    froms = [node for node in ast.walk(_tree(door)) if isinstance(node, ast.ImportFrom) and node.module]
    names = [(str(node.module), alias) for node in froms for alias in node.names]
    behind = [(origin, each.name) for origin, each in names if name in ("", each.asname or each.name)]
    return frozenset().union(*(_files(origin, each) for origin, each in behind))


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
