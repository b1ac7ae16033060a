"""The documentation's code blocks run, a page in one test: its blocks share names and a folder.

Python blocks, hidden ones in comments (`<!--- invisible-code-block: python ... --->`), and the lines of
console blocks that begin with `$ squeezebox`. What cannot run has `<!--- skip: next "reason" --->` before it.
"""

import importlib.util
import shlex
import sys
from pathlib import Path
from unittest import SkipTest

import pytest
import torch
from sybil import Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

from squeezebox.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def command(example):
    """Run a console block's commands, told apart from their output by `$`."""
    lines = [line for line in example.parsed.replace("\\\n", "").splitlines() if line.startswith("$ ")]
    assert lines, "a console block without a line that begins with $"
    for line in lines:
        program, *arguments = shlex.split(line[2:], comments=True)
        assert program == "squeezebox", f"{program} is not run by this test; say why in a skip comment"
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code in (None, 0)


PARSERS = [PythonCodeBlockParser(), CodeBlockParser("console", command), SkipParser()]
DOCUMENTS = [Sybil(PARSERS, path=str(ROOT)).parse(page) for page in PAGES]


@pytest.mark.filterwarnings("ignore:.*does not have many workers")  # Lightning's: the data are there already
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")  # Lightning's own
@pytest.mark.filterwarnings(
    "ignore:'pin_memory' argument is set as true"
)  # transformers': there is no device
@pytest.mark.parametrize(
    "document",
    [
        pytest.param(document, id=str(Path(document.path).relative_to(ROOT)))
        for document in DOCUMENTS
        if list(document.examples())
    ],
)
def test_blocks_run(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small networks: threads that wait for each other take longer
    try:
        skipped = [reason for example in document.examples() if (reason := why_skipped(example))]
    finally:
        torch.set_num_threads(threads)
        for path in tmp_path.glob("*.py"):  # another page's, or test's, may have the same name
            sys.modules.pop(path.stem, None)
    for reason in skipped:
        print(reason)


def why_skipped(example):
    """Run a block; the reason, with its line, where it was skipped."""
    example.namespace["installed"] = lambda name: importlib.util.find_spec(name) is not None
    try:
        example.evaluate()
    except SkipTest as reason:
        return f"line {example.line}: {reason}"
    return ""
