"""Errors of Python's functions reach a terminal in the words of the command line."""

import re

import pytest
from typer.main import get_command

from squeezebox.cli import OPTIONS, as_options
from squeezebox.cli._app import app
from tests.cli.test_commands import models, run  # noqa: F401 - a fixture


def options(command):
    own = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    return own.union(*(options(each) for each in getattr(command, "commands", {}).values()))


def test_every_option_that_is_named_exists():
    named = {name for words in OPTIONS.values() for name in re.findall(r"--[\w-]+", words)}
    assert len(named) > 15 and named <= options(get_command(app))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("With states=True a plan fits.", "With --states a plan fits."),
        ("Give offload='/var/tmp', or offload=False.", "Give --offload-folder '/var/tmp', or --no-offload."),
        ("give load='balanced'.", "give --load 'balanced'."),
        ("Give it to attach(model, states=True).", "Give it to attach(model, states=True)."),
        ("rewrite(m, sample=..., loss_fn=...) is", "rewrite(m, sample=..., loss_fn=...) is"),
        ("squeezebox.max_batch(budget=...) plans", "squeezebox max-batch --budget ... plans"),
        ("Give sample=(inputs, target) as", "Give --sample module:callable as"),
        ("sample=(inputs, target) and loss_fn=; give", "--sample module:callable and --loss; give"),
        ("noise=-1.0 is not a number", "--noise -1.0 is not a number"),
        ("none of exact, noise=1e-2 and plan=FILE", "none of exact, noise=1e-2 and plan=FILE"),
        ("loss_fn returned None", "--loss returned None"),
        ("raised ValueError: my loss_fn fails", "raised ValueError: my loss_fn fails"),
        ("memory_bytes 50% is a share", "--memory 50% is a share"),
        ("update_noise -1 is no share", "--update-noise -1 is no share"),
        ("no folder /data/update_noise/x", "no folder /data/update_noise/x"),
        ("--update-noise is for --states", "--update-noise is for --states"),
    ],
)
def test_spellings_become_options_outside_of_calls(message, expected):
    assert as_options(message) == expected


def test_a_refused_plan_names_options(models, capfd):  # noqa: F811
    step = ("my_models:small", "--input", "3x16x16", "--batch", "2", "--no-cache", "--out", "p.json")
    code, _, err = run(capfd, "plan", *step, "--budget", "1KiB")
    assert code == 1 and "--states" in err and "states=True" not in err
    code, _, err = run(capfd, "plan", *step, "--offload-folder", "/no/such")
    assert code == 2 and "--no-offload" in err and "offload=" not in err
