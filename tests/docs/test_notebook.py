"""The notebook runs from top to bottom, and draws what it says it draws."""

import ast
import json
from pathlib import Path

import pytest

NOTEBOOK = json.loads((Path(__file__).parents[2] / "examples" / "first_plan.ipynb").read_text())
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def value_of(source, names):
    """Run a cell as a notebook does: the value of its last line, if that is an expression."""
    *before, last = ast.parse(source).body
    shown = isinstance(last, ast.Expr)
    exec(compile(ast.Module(before if shown else [*before, last], []), "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if shown else None


def test_it_has_no_outputs_that_could_be_stale():
    assert NOTEBOOK["nbformat"] == 4
    assert not any(cell.get("outputs") for cell in NOTEBOOK["cells"])


@pytest.mark.slow
def test_its_cells_run_and_draw(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = {"__name__": "__main__"}
    values = [value_of(source, names) for source in CELLS]
    drawn = [value._repr_html_() for value in values if hasattr(value, "_repr_html_")]
    assert [type(value).__name__ for value in values if hasattr(value, "_repr_html_")] == [
        "StepPlan",
        "Report",
        "Timeline",
    ]
    assert all("<svg" in page or "srcdoc" in page for page in drawn)
    record = names["session"].report().record
    assert record.peak_bytes <= names["plan"].budget_bytes and record.packed_bytes < record.saved_bytes
    assert not list(tmp_path.glob("*.json"))
