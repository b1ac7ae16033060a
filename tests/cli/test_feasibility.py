"""``squeezebox estimate --devices`` and ``--jobs`` from outside, and models by other packages' names."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.cli.test_commands import models, run  # noqa: F401 - a fixture

DEVICE = """
[[devices]]
name = "{name}"
memory_bytes = "{memory}"
speed = 1
flops_per_second = 1e10
bytes_per_second = 1e10
call_seconds = 1e-6
over_roofline = [0.5, 1, 2]
"""
JOBS = """
[[jobs]]
name = "train"
kind = "training"
model = "my_models:small"
input = "3x16x16"
batch = 4
every_seconds = 1
frames = 5

[[jobs]]
name = "serve"
kind = "serving"
model = "my_models:small"
input = "3x16x16"
batch = 1
every_seconds = 0.1
"""
STEP = ("estimate", "my_models:small", "--input", "3x16x16", "--batch", "8", "--devices", "devices.toml")


@pytest.fixture
def files(models):  # noqa: F811
    Path("devices.toml").write_text(DEVICE.format(name="large", memory="1GiB"))
    Path("none.toml").write_text(DEVICE.format(name="none", memory="10KiB"))
    Path("jobs.toml").write_text(JOBS)
    return models


def test_the_exit_status_says_go_or_no_go(files, capfd):
    code, out, err = run(capfd, *STEP, "--steps", "1000", "--no-plans")
    assert (code, err) == (0, "")
    assert "large" in out and "plain" in out and "hours for 1,000 steps" in out
    code, out, err = run(capfd, *STEP[:-1], "none.toml", "--exact", "--json")
    assert code == 1 and json.loads(out)["devices"][0]["fits"] == ""
    assert "no-go: a step of batch 8 fits none of 1 devices." in err


def test_jobs(files, capfd):
    code, out, err = run(capfd, "estimate", "--jobs", "jobs.toml", "--devices", "devices.toml")
    assert (code, err) == (0, "") and "100 of 100" in out and "score" in out
    code, out, err = run(capfd, "estimate", "--jobs", "jobs.toml", "--devices", "none.toml", "--json")
    assert code == 1 and "holds all 2 jobs" in err
    assert [job["job"] for job in json.loads(out)["devices"][0]["jobs"]] == ["train", "serve"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"serving"', '"playing"', r"jobs\[1\].kind is 'playing', not one of training, evaluation, serving"),
        ("every_seconds = 1\n", "", "every_seconds is missing"),
        ("every_seconds = 1\n", "every_seconds = 0\n", "of which neither may be 0"),
        ('"serve"', '"train"', "two jobs are called 'train'"),
        ("frames = 5", "size = 5", "size is unknown"),
    ],
)
def test_jobs_that_cannot_be_read_are_refused(old, new, message, files, capfd):
    Path("jobs.toml").write_text(JOBS.replace(old, new))
    code, _, err = run(capfd, "estimate", "--jobs", "jobs.toml", "--devices", "devices.toml")
    assert code == 1 and re.search(message, err)


def test_a_model_or_jobs(files, capfd):
    for arguments in ((), ("my_models:small", "--jobs", "jobs.toml")):
        code, _, err = run(capfd, "estimate", *arguments)
        assert code == 2 and "one of the two" in err


def test_a_configuration_of_transformers(files, capfd):
    config = {
        "model_type": "gpt2",
        "n_layer": 1,
        "n_head": 2,
        "n_embd": 16,
        "vocab_size": 50,
        "n_positions": 32,
    }
    Path("own").mkdir()
    Path("own/config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    code, out, _ = run(capfd, "estimate", "hf:own", "--input", "16", "--batch", "2", "--json")
    assert code == 0
    figures = json.loads(out)
    assert figures["parameter_bytes"] > 4 * 50 * 16 and figures["input_bytes"] == 2 * 16 * 8


def test_a_package_that_is_not_installed_is_named(files, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    code, _, err = run(capfd, "estimate", "timm:resnet18")
    assert code == 2 and "needs timm, which is not installed; pip install timm" in err
