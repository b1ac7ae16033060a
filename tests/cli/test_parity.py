"""``squeezebox parity`` from outside: what is printed, and the exit status."""

import json
import sys

import pytest

from squeezebox.cli import main

MODELS = """
import torch
from torch import nn

def right():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    return [("half", lambda x: x / 2), ("net", net)]

def wrong():
    stages = right()
    stages[1][1][1].eps = 1e-3
    return stages

def batches():
    for _ in range(2):
        yield torch.ones(2, 4) + torch.arange(4)

def broken():
    yield missing
"""


@pytest.fixture
def compared(tmp_path, monkeypatch, capfd):
    (tmp_path / "my_pair.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(("parity", *arguments))
        captured = capfd.readouterr()
        assert "Traceback" not in captured.err
        return ended.value.code, captured.out, captured.err

    yield run
    sys.modules.pop("my_pair", None)


def test_the_status_says_whether_they_agree(compared):
    code, out, err = compared("my_pair:right", "my_pair:right", "--data", "my_pair:batches")
    assert (code, err) == (0, "") and "they agree to the bit" in out and "2 batches, 4 samples" in out
    code, out, err = compared("my_pair:right", "my_pair:wrong", "--data", "my_pair:batches", "--json")
    places = json.loads(out)["places"]
    assert code == 1 and "my_pair:wrong differs from my_pair:right, first at net.1 (output)" in err
    assert {each["layer"] for each in places if each["own"] > each["allowed"]} == {"net.1"}
    code, out, _ = compared(
        "my_pair:right", "my_pair:wrong", "--data", "my_pair:batches", "--tolerance", "0.1", "--forward"
    )
    assert code == 0 and "compared forward, tolerance 0.1" in out


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("my_pair:right", "my_pair:none", "--data", "my_pair:batches"), 2, "has no 'none'"),
        (
            ("my_pair:right", "my_pair:right", "--data", "my_pair:broken"),
            1,
            "'my_pair:broken' raised NameError",
        ),
        (("my_pair:right", "my_pair:batches", "--data", "my_pair:batches"), 2, "is a generator"),
        (("my_pair:right", "my_pair:right"), 2, "Missing option"),
    ],
)
def test_errors_have_no_traceback(compared, arguments, status, words):
    code, out, err = compared(*arguments)
    assert (code, out) == (status, "") and words in " ".join(err.replace("│", " ").split())
