"""The documentation's code blocks run, one test each; a page's share names and a folder, so run pages whole.

Python blocks, hidden ones in comments (`<!--- invisible-code-block: python ... --->`), and the lines of
console blocks that begin with `$ squeezebox`. What cannot run has `<!--- skip: next "reason" --->` before it.
"""

import importlib.util
import shlex
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
EXAMPLES = [
    pytest.param(example, id=f"{Path(document.path).relative_to(ROOT)}:{example.line}")
    for document in DOCUMENTS
    for example in document.examples()
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {document.path: tmp_path_factory.mktemp("page") for document in DOCUMENTS}


@pytest.mark.filterwarnings("ignore:.*does not have many workers")  # Lightning's: the data are there already
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")  # Lightning's own
@pytest.mark.filterwarnings(
    "ignore:'pin_memory' argument is set as true"
)  # transformers': there is no device
@pytest.mark.parametrize("example", EXAMPLES)
def test_block_runs(example, folders, monkeypatch):
    monkeypatch.chdir(folders[example.path])
    monkeypatch.syspath_prepend(folders[example.path])
    monkeypatch.setenv("XDG_CACHE_HOME", str(folders[example.path] / "cache"))
    example.namespace["installed"] = lambda name: importlib.util.find_spec(name) is not None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small networks: threads that wait for each other take longer
    try:
        example.evaluate()
    except SkipTest as reason:  # so that pytest names this test beside it
        pytest.skip(str(reason))
    finally:
        torch.set_num_threads(threads)
