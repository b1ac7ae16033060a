"""``squeezebox doctor`` from outside: a step's findings, the environment's faults, and exit statuses."""

import json
import sys

import pytest

from squeezebox.cli import main
from tests.doctor.test_environment import planted

__all__ = ["planted"]

STEPS = """
import torch

weight = torch.ones(64, 64, requires_grad=True)

def batch():
    return torch.randn(8, 64)

def step(x):
    (x @ weight).relu().sum().backward()
    x.exp()

def fixed():
    step(torch.ones(8, 64))

def wrong():
    return missing
"""


@pytest.fixture
def steps(tmp_path, monkeypatch):
    (tmp_path / "my_steps.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("my_steps", None)


def run(capfd, *arguments):
    """(exit status, standard output, standard error)."""
    with pytest.raises(SystemExit) as ended:
        main(("doctor", *arguments))
    captured = capfd.readouterr()
    return ended.value.code, captured.out, captured.err


def test_a_step_as_text_and_as_json(steps, capfd):
    code, out, err = run(capfd, "my_steps:step", "--batch", "my_steps:batch")
    assert (code, err) == (0, "") and "aten.exp  my_steps.py:11" in out
    code, out, _ = run(capfd, "my_steps:fixed", "--json")
    dead = [each for each in json.loads(out)["findings"] if each["waste"] == "dead store"]
    assert code == 0 and [(each["operator"], each["line"]) for each in dead] == [("aten.exp", 11)]


def test_the_ranges_of_a_step(steps, capfd):
    code, out, err = run(capfd, "my_steps:step", "--batch", "my_steps:batch", "--ranges")
    assert (code, err) == (0, "") and "operators have proven ranges" in out
    code, out, _ = run(capfd, "my_steps:fixed", "--ranges", "--json")
    assert code == 0 and json.loads(out)["operators"] > 0
    code, _, err = run(capfd, "--ranges")
    assert code == 2 and "--ranges is of a step; name one" in err
    code, _, err = run(capfd, "my_steps:fixed", "--ranges", "--as-device")
    assert code == 2 and "--as-device is of a check without --ranges" in err


def test_a_tampered_package_is_named_beside_a_step_with_status_1(steps, planted, capfd):
    (planted / "planted/layers.py").write_text("import os\n")
    code, out, err = run(capfd, "my_steps:fixed", "--packages", "planted", "--json")
    found = json.loads(out)
    assert code == 1 and set(found) == {"step", "environment"} and not found["environment"]["healthy"]
    assert len(found["environment"]["faults"]) == 1, found["environment"]["faults"]
    (fault,) = found["environment"]["faults"]
    assert fault["fault"] == "changed since it was installed" and fault["subject"].endswith("layers.py")
    assert "1 thing wrong with planted" in err and "Traceback" not in err


def test_a_step_that_raises_is_said_with_its_line(steps, capfd):
    code, out, err = run(capfd, "my_steps:wrong")
    assert code == 1 and not out and "Traceback" not in err
    assert "'my_steps:wrong' raised NameError: name 'missing' is not defined" in err and "line 17" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("my_steps:step",), "needs arguments (x)"),
        (("my_steps:none",), "none"),
        (("my_steps:fixed", "--batch", "my_steps:none"), "none"),
        (("--packages", "no-such-package"), "no package 'no-such-package' is installed"),
    ],
)
def test_errors_have_no_traceback(steps, capfd, arguments, words):
    code, out, err = run(capfd, *arguments)
    assert (code, out) == (2, "") and words in err and "Traceback" not in err
