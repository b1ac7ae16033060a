"""``squeezebox rewrite`` writes a table that a script applies."""

import json
import sys

import pytest
from typer.testing import CliRunner

import squeezebox
from squeezebox.cli._app import app

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional

def net():
    return nn.Sequential(nn.Embedding(3000, 16), nn.Linear(16, 3000))

def batch():
    return torch.randint(3000, (4, 32)), torch.randint(3000, (4, 32))

def loss(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "words_to_rewrite.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "words_to_rewrite"
    sys.modules.pop("words_to_rewrite", None)


def test_the_table_is_written_and_applies(script):
    arguments = ["rewrite", f"{script}:net", "--sample", f"{script}:batch", "--loss", f"{script}:loss"]
    arguments.append("--json")
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert [row["rule"] for row in json.loads(result.stdout)["rows"]] == ["sliced loss"]
    module = sys.modules[script]
    model, (tokens, target) = module.net(), module.batch()
    squeezebox.rewrite(model, rewrites=squeezebox.load_rewrites("rewrites.json"))
    module.loss(model(tokens), target).backward()
