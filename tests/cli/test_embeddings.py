"""``squeezebox embeddings``: a plan on one process or several, and what is refused before they start."""

import json
import sys
from pathlib import Path

import pytest

import squeezebox
from tests.cli.test_commands import run

MODULE = """
import torch

TABLES = [(3000, 8), (200, 4)]

def sample():
    torch.manual_seed(0)
    return TABLES, [([torch.randint(rows, (16, 3)) for rows, _ in TABLES], None) for _ in range(8)]

def alone():
    return TABLES
"""


@pytest.fixture
def bags(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_bags.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("my_bags", None)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_it_writes_a_plan(bags, capfd, ranks):
    options = "--memory", "60KiB", "--ranks", str(ranks), "--optimizer", "adam", "--json"
    code, out, err = run(capfd, "embeddings", "my_bags:sample", *options)
    assert code == 0, err
    plan = squeezebox.load_embedding_plan("plan.json")
    assert plan.to_dict() == json.loads(out)
    assert plan.ranks == ranks and plan.tables == ((3000, 8), (200, 4)) and plan.seconds > 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("my_bags:sample", "--memory", "1MiB", "--ranks", "0"), "--ranks 0: give 1 or more."),
        (("my_bags:sample", "--memory", "1MiB", "--optimizer", "lion"), "there are sgd, adagrad, adam"),
        (("my_bags:alone", "--memory", "1MiB"), "gave a list; return (tables, batches)"),
        (("my_bags:none", "--memory", "1MiB"), "has no 'none'"),
        (("my_bags:sample", "--memory", "much"), "--memory"),
        (("my_bags:sample", "--memory", "1MiB", "--out", "gone/plan.json"), "cannot write gone/plan.json"),
    ],
)
def test_what_is_wrong_is_said_before_processes_start(bags, capfd, arguments, problem):
    code, _, err = run(capfd, "embeddings", *arguments)
    assert code != 0 and problem in err
