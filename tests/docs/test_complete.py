"""The site names every public function, and the pages' commands have the options that they are given."""

import inspect
import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

import squeezebox
from squeezebox.cli._app import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
API = ROOT / "docs" / "api"
LINE = re.compile(
    r"^(?: {4}|\$ )(?:.*-m |\.venv/bin/)?squeezebox(?:\.cli)? (.+?)(?: {2,}#.*)?$"  # a line of its own,
    r"|`(?:\.venv/bin/)?squeezebox ([^`]+)`"  # or within one
)
NAMES = [name for name in squeezebox.__all__ if not name.startswith("_")]


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_its_place(name):
    if inspect.ismodule(getattr(squeezebox, name)):
        assert f".. automodule:: squeezebox.{name}\n   :members:" in (API / f"{name}.md").read_text()
    else:
        assert f":: squeezebox.{name}\n" in (API / "squeezebox.md").read_text()


def commands():
    for page in PAGES:
        text = re.sub(r"\\\n\s*", "", page.read_text())
        for number, line in enumerate(text.splitlines(), 1):
            for found in LINE.finditer(line):
                written = found.group(1) or found.group(2)
                yield pytest.param(written, id=f"{page.name}:{number}: {written[:40]}")


@pytest.mark.parametrize("written", list(commands()))
def test_a_command_has_the_options_that_it_is_given(written):
    words, command = shlex.split(written), get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    assert not hasattr(command, "commands") or not words or words[0].startswith("-"), f"no command {words[0]}"
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert given <= known | {"--help", "--install-completion"}
