"""Every command has --json, and ends with the status that docs/cli.md gives it."""

import json
from pathlib import Path

import pytest
import typer

from squeezebox.cli._app import app
from squeezebox.reports import Timeline
from tests.cli.test_commands import models, run  # noqa: F401 - a fixture
from tests.reports.test_page import timeline

BUFFERS = "id,lower,upper,size\na,0,2,100\nb,1,3,50\n"
STEP = ("my_models:small", "--input", "3x16x16", "--batch", "2")


def commands(group=None, path=()):
    """Name -> click's command, of all, however deep."""
    group = group or typer.main.get_command(app)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


COMMANDS = dict(commands())
CHEAP = {
    "codecs": (),
    "estimate": STEP,
    "find-batch": (*STEP, "--memory", "1MiB", "--exact"),
    "max-batch": (*STEP, "--budget", "200%", "--exact"),
    "memory pack": ("buffers.csv",),
    "pipeline simulate": ("gpipe",),
    "plan": (*STEP, "--exact"),
    "report": ("run.json",),
}  # the others train; their own tests read their JSON


@pytest.fixture
def files(models):  # noqa: F811
    Path("buffers.csv").write_text(BUFFERS)
    Timeline(timeline()).save("run.json")
    return models


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_option(name):
    options = [option for parameter in COMMANDS[name].params for option in parameter.opts]
    assert "--json" in options and COMMANDS[name].help


@pytest.mark.parametrize("name", CHEAP)
def test_json_is_all_that_is_printed(name, files, capfd):
    code, out, err = run(capfd, *name.split(), *CHEAP[name], "--json")
    assert (code, err) == (0, "")
    assert isinstance(json.loads(out), list if name == "codecs" else dict)


LOUD = """
print("imported")

def loud():
    class Loud(torch.nn.Conv2d):
        def forward(self, x):
            print("run")
            return super().forward(x)

    print("made")
    return Loud(3, 4, 3)

def step():
    print("run")
    loud()(torch.ones(1, 3, 8, 8)).sum().backward()
"""


@pytest.mark.parametrize("name", ["doctor", *(name for name in CHEAP if STEP[0] in CHEAP[name])])
def test_what_the_model_prints_goes_to_standard_error(name, files, capfd):
    with Path("my_models.py").open("a") as file:
        file.write(LOUD)
    given = ("my_models:loud", *CHEAP[name][1:]) if name in CHEAP else ("my_models:step",)
    code, out, err = run(capfd, name, *given, "--json")
    assert code == 0 and isinstance(json.loads(out), dict)
    assert {"imported", "made", "run"} <= set(err.splitlines())


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("codecs",), 0, ""),
        (("memory", "pack", "buffers.csv", "--capacity", "150"), 0, ""),
        (("memory", "pack", "buffers.csv", "--capacity", "149"), 1, "falls 1 bytes short"),
        (("memory", "pack", "nowhere.csv"), 1, "nowhere.csv"),
        (("memory", "pack", "buffers.csv", "--out", "missing/offsets.csv"), 1, "cannot write"),
        (("plan", *STEP, "--budget", "1KiB"), 1, "bytes"),
        (("find-batch", *STEP, "--memory", "10KiB"), 1, "can be profiled"),
        (("report", "buffers.csv"), 1, "session.timeline(step)"),
        (("plan", *STEP, "--budget", "much"), 2, "no size"),
        (("memory", "pack", "buffers.csv", "--packer", "none"), 2, "there is none of that name"),
        (("pipeline", "simulate", "zigzag"), 2, "zigzag"),
        (("audit", "my_models:nothing"), 2, "has no 'nothing'"),
        (("plan",), 2, "Missing argument"),
        (("report", "run.json", "--pdf"), 2, "No such option"),
        (("squash",), 2, "No such command"),
    ],
)
def test_the_status_says_what_kind_of_failure_it_was(files, capfd, arguments, status, message):
    code, out, err = run(capfd, *arguments)
    assert code == status and message in " ".join(err.replace("│", " ").split())
    assert bool(out) == (status == 0 or "--capacity" in arguments) and "Traceback" not in err
