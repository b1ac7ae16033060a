"""Walls that scripts/check cannot see: what is loaded at run time, and which room may use which API.

import-linter (layers, private files, torch-free rooms) runs in scripts/check.
"""

import ast
import graphlib
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "squeezebox"
HEAVY = ("torch", "numba", "blosc2", "rich", "typer")
TORCH_FREE = ("bounds", "planner", "reports", "schedules", "schema")
RESTRICTED = {
    "torch.autograd.graph": {"capture"},
    "torch.distributed": {"gradients", "layers", "memory", "pipeline", "streaming"},  # single files: see ruff
}


def loaded_by(statement: str) -> set[str]:
    """Names of the modules in a fresh interpreter after ``statement``."""
    program = f"import sys; {statement}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def restricted_names(path: Path) -> set[str]:
    """The restricted APIs that a file imports or reaches through attributes."""
    named = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            named |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            named.add(ast.unparse(node))
    return {api for api in RESTRICTED for name in named if f"{name}.".startswith(f"{api}.")}


def test_the_door_loads_nothing_heavy():
    assert loaded_by("import squeezebox").isdisjoint(HEAVY)


def test_attaching_loads_no_compiler_and_no_other_product():
    attach = "import torch, squeezebox; squeezebox.attach(torch.nn.Linear(2, 2)).detach()"
    others = {"squeezebox.pipeline", "squeezebox.streaming", "squeezebox.cli", "squeezebox.auditing._audit"}
    assert loaded_by(attach).isdisjoint({"torch._dynamo", "numba", *others})


def test_the_door_shows_every_public_name():
    program = "import squeezebox; assert set(dir(squeezebox)) == set(squeezebox.__all__)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("room", [room for room in TORCH_FREE if (SOURCE / room).is_dir()])
def test_rooms_of_plain_data_load_no_torch(room):
    assert "torch" not in loaded_by(f"import squeezebox.{room}")


def test_restricted_apis_stay_in_their_rooms():
    strangers = {
        f"{path.relative_to(SOURCE)}: {api}"
        for path in sorted(SOURCE.rglob("*.py"))
        for api in restricted_names(path)
        if path.relative_to(SOURCE).parts[0] not in RESTRICTED[api]
    }
    assert not strangers


def test_nobody_reaches_into_another_objects_private_names():
    house = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "house"))
    assert not house["private_accesses"]()


def files_imported_by(path: Path) -> set[str]:
    """Private files of the package that this one imports as it is loaded, types apart."""
    found = set[str]()
    waiting: list[ast.stmt] = ast.parse(path.read_text()).body
    for node in waiting:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING":
            waiting += node.body + node.orelse
    return found


def test_no_file_imports_itself_through_others():
    files = {
        ".".join(("squeezebox", *path.relative_to(SOURCE).with_suffix("").parts)): path
        for path in SOURCE.rglob("_*.py")
        if path.stem != "__init__"
    }
    graph = {name: files_imported_by(path) & files.keys() - {name} for name, path in files.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError
