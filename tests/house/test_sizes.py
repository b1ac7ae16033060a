"""Rooms say what they are, functions stay short, public functions say what they do."""

import ast
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "squeezebox"
FILES = sorted(SOURCE.rglob("*.py"))
ROOMS = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def length(function: Function) -> int:
    """Lines from ``def`` to the end, less the docstring: explaining costs nothing."""
    docstring = function.body[0] if ast.get_docstring(function, clean=False) is not None else None
    explained = docstring.end_lineno - docstring.lineno + 1 if docstring else 0
    return function.end_lineno - function.lineno + 1 - explained


def public_functions(tree: ast.Module) -> Iterator[Function]:
    """Module-level functions, and methods of classes without bases: others inherit their contract's words."""
    for node in tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) and not node.bases else [node]
        if not getattr(node, "name", "_").startswith("_"):
            yield from (
                each for each in inner if isinstance(each, Function) and not each.name.startswith("_")
            )


def is_overload(function: Function) -> bool:
    return any(ast.unparse(decorator).endswith("overload") for decorator in function.decorator_list)


def test_nine_functions_in_ten_have_fewer_than_35_lines():
    sizes = {
        f"{path.relative_to(SOURCE)}:{function.lineno} {function.name}": length(function)
        for path in FILES
        for function in functions(ast.parse(path.read_text()))
    }
    long = {name: size for name, size in sizes.items() if size >= 35}
    assert len(long) <= len(sizes) / 10, f"{len(long)} of {len(sizes)} functions are long: {long}"


def test_no_file_has_more_than_500_lines():
    sizes = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in FILES}
    long = {name: size for name, size in sizes.items() if size > 500}
    assert not long, "a file past 500 lines is two ideas; split it"


def test_no_class_has_more_than_20_methods():
    house = runpy.run_path(str(SOURCE.parents[1] / "scripts" / "house"))
    sizes = {
        f"{path.relative_to(SOURCE)} {node.name}": house["methods"](node)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    assert not {name: size for name, size in sizes.items() if size > house["MANY_METHODS"]}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_it_is_in_three_lines(room):
    docstring = ast.get_docstring(ast.parse((SOURCE / room / "__init__.py").read_text())) or ""
    lines = [line for line in docstring.splitlines() if line.strip()]
    assert len(lines) >= 3, "say what the room does, what goes in and comes out, what it may touch"


def test_public_functions_have_docstrings():
    silent = [
        f"{path.relative_to(SOURCE)}:{function.lineno} {function.name}"
        for path in FILES
        for function in public_functions(ast.parse(path.read_text()))
        if ast.get_docstring(function) is None and not is_overload(function)
    ]
    assert not silent


def test_no_report_names_a_path_of_a_machine():
    reports = SOURCE.parents[1] / "benchmarks" / "reports"
    heads = [line for path in reports.glob("*.md") for line in path.read_text().splitlines()[:6]]
    commands = [line for line in heads if line.startswith("- command: ")]
    assert not [line for line in commands if ": /" in line or "sys_path" in line]
