"""Which files of ours, and so which rooms, a benchmark reaches by imports.

Goes in: a script. Comes out: paths of files, names of rooms. May touch: these files, to read them.
"""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {"squeezebox": ROOT / "src", "squeezebox_demo": ROOT / "src", "benchmarks": ROOT, "tests": ROOT}


@cache
def files_of(script: Path) -> frozenset[Path]:
    """The script, and what it imports, name by name, itself and by what it imports."""
    seen, waiting = {script}, [script]
    while waiting:
        for module, name in _imports(waiting.pop()):
            new = set(_files(module, name)) - seen
            seen |= new
            waiting += new
    return frozenset(seen)


def rooms_of(script: Path) -> set[str]:
    """Rooms with files that the script reaches."""
    house = SOURCES["squeezebox"] / "squeezebox"
    inside = (path.relative_to(house).parts for path in files_of(script) if path.is_relative_to(house))
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
