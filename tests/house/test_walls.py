"""Walls that scripts/check cannot see: what is loaded at run time, and which room may use which API.

import-linter (layers, private files, torch-free rooms) runs in scripts/check.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "squeezebox"
HEAVY = ("torch", "numba", "blosc2", "rich", "typer")
TORCH_FREE = ("bounds", "planner", "reports", "schedules", "schema")
RESTRICTED = {
    "torch.autograd.graph": {"capture"},
    "torch.distributed": {"gradients", "pipeline"},
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


def test_the_door_shows_every_public_name():
    program = "import squeezebox; assert set(dir(squeezebox)) == set(squeezebox.__all__)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("room", [room for room in TORCH_FREE if (SOURCE / room).is_dir()])
def test_rooms_of_plain_data_load_no_torch(room):
    assert "torch" not in loaded_by(f"import squeezebox.{room}")


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_restricted_apis_stay_in_their_rooms(path):
    room = path.relative_to(SOURCE).parts[0]
    strangers = {api for api in restricted_names(path) if room not in RESTRICTED[api]}
    assert not strangers
