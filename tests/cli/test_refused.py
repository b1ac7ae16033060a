"""What goes wrong is one sentence and an exit status; options that would do nothing are refused."""

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

import squeezebox
from squeezebox.cli._estimate import call_factory
from tests.cli.test_commands import models, run  # noqa: F401 - a fixture

STEP = ("my_models:small", "--input", "3x16x16", "--batch", "2")
PIPELINE = ("pipeline", "plan", "my_models:small", "--ranks", "2", "--memory", "1GiB")
MODULES = {
    "valued": "x = 1\nraise ValueError('bad config')",
    "filed": "open('no_such_file.csv')",
    "named": "from json import no_such_name",
    "leaving": "import sys\nsys.exit()",
    "refusing": "import squeezebox\nraise squeezebox.OptionError('give less.')",
}
FAILING = """

def data():
    raise FileNotFoundError("no file data/metadata.csv")

def text():
    raise RuntimeError("the meta file is empty")

def leave():
    raise SystemExit(0)

def values():
    return torch.nn.Linear(8, int(torch.ones(()).sum()))
"""


def refused(capfd, *arguments):
    """Exit status, and what is said."""
    code, out, err = run(capfd, *arguments)
    assert out == "" and "Traceback" not in err, err
    return code, err


@pytest.mark.parametrize(
    ("module", "code", "words"),
    [
        ("valued", 1, "'valued', as it was imported, raised ValueError: bad config ("),
        ("filed", 1, "as it was imported, raised FileNotFoundError: [Errno 2]"),
        ("named", 1, "as it was imported, raised ImportError: cannot import name 'no_such_name'"),
        ("leaving", 1, "'leaving', as it was imported, raised SystemExit ("),
        ("refusing", 2, "squeezebox: give less."),
    ],
)
def test_a_module_that_fails_as_it_is_imported(models, capfd, module, code, words):  # noqa: F811
    Path(f"{module}.py").write_text(MODULES[module])
    found, err = refused(capfd, "estimate", f"{module}:net")
    assert found == code and words in err
    assert code == 2 or f"{module}.py, line {1 + MODULES[module].count(chr(10))})" in err


@pytest.mark.parametrize("command", ["estimate", "plan"])
@pytest.mark.parametrize("name", ["data", "text", "leave"])
def test_a_users_own_error_is_told(models, capfd, command, name):  # noqa: F811
    with (models / "my_models.py").open("a") as file:
        file.write(FAILING)
    code, err = refused(capfd, command, f"my_models:{name}")
    assert code == 1 and f"'my_models:{name}' raised " in err and "my_models.py, line " in err


@pytest.mark.parametrize("command", ["estimate", "plan"])
@pytest.mark.parametrize(
    ("name", "options"),
    [("leave", ("--sample",)), ("leave_loss", (*STEP[1:], "--loss"))],
    ids=["sample", "loss"],
)
def test_a_sample_or_a_loss_that_exits_is_told(models, capfd, command, name, options):  # noqa: F811
    with (models / "my_models.py").open("a") as file:
        file.write(f"{FAILING}\ndef leave_loss(output, target):\n    raise SystemExit(0)\n")
    code, err = refused(capfd, command, STEP[0], *options, f"my_models:{name}")
    assert code == 1 and f"'my_models:{name}' raised SystemExit: 0 (" in err and "my_models.py, line " in err


def test_a_model_that_reads_values_while_it_is_built_is_estimated(models, capfd):  # noqa: F811
    with (models / "my_models.py").open("a") as file:
        file.write(FAILING)
    assert run(capfd, "estimate", "my_models:values", "--input", "8", "--batch", "2")[0] == 0


@pytest.mark.parametrize("packages", ["", ",", " , "])
def test_no_package_is_refused(capfd, packages):
    code, err = refused(capfd, "doctor", "--packages", packages)
    assert code == 2 and f"--packages {packages!r} names no package" in err


def test_a_comma_at_the_end_names_no_package(capfd):
    code, out, _ = run(capfd, "doctor", "--packages", "typer,")
    assert code in (0, 1) and "typer" in out


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_commands_run_with_a_closed_stream(models, capfd, monkeypatch, closed):  # noqa: F811
    monkeypatch.setattr(sys, closed, None)
    code, out, err = run(capfd, "estimate", *STEP)
    assert code == 0 and err == "" and ("peak of the step" in out) == (closed == "stderr")
    code, out, err = run(capfd, "estimate", "my_models:large")
    assert code == 2 and out == "" and ("has no 'large'" in err) == (closed == "stdout")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_under_standard_output_is_one_sentence(unbuffered):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "squeezebox", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": str(Path(squeezebox.__file__).parents[1]),
                "PYTHONUNBUFFERED": unbuffered,
            },
        )
    assert done.returncode == 1
    (said,) = done.stderr.splitlines()
    assert said.startswith("squeezebox: cannot write: [Errno 28]")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("doctor", "--batch", "no_such:thing"), "--batch is of a step; name one"),
        (("doctor", "--as-device"), "--as-device is of a step; name one"),
        (("doctor", "--ranges"), "--ranges is of a step; name one"),
        (("estimate", *STEP, "--steps", "100"), "--steps is of --devices; give that too"),
        (("estimate", *STEP, "--noise", "-7"), "--noise is of --devices"),
        (("estimate", *STEP, "--exact"), "--exact is of --devices"),
        (("estimate", *STEP, "--no-plans"), "--no-plans is of --devices"),
        (("estimate", *STEP, "--reserve", "banana"), "--reserve is of --devices"),
        (("estimate", *STEP, "--devices", "all", "--dtype", "bfloat16"), "--dtype is of an estimate without"),
        (("estimate", *STEP, "--devices", "all", "--load", "worst"), "--load is of an estimate without"),
        (("gradients", "measure", *STEP, "--latency", "0.1"), "--latency 0.1 goes with --bandwidth"),
        (
            ("pipeline", "plan", *STEP, "--ranks", "2", "--memory", "1GiB", "--latency", "0.1"),
            "--latency 0.1 goes with --bandwidth",
        ),
        (
            ("pipeline", "plan", *STEP, "--devices", "devices.toml", "--latency", "0.1"),
            "--devices has the links: leave out --bandwidth and --latency",
        ),
        (("devices", "measure", "--memory", "0"), "--memory 0: give more than 0"),
        (("estimate", "--jobs", "jobs.toml", "--optimizer", "adam"), "--optimizer is of a model"),
        *(
            (("demo", "--gigapixel", option, value), f"{option} is of a demonstration without --gigapixel")
            for option, value in (
                ("--data", "."),
                ("--epochs", "1"),
                ("--batch", "64"),
                ("--noise", "1e-2"),
                ("--timeline", "run.json"),
            )
        ),
        *(
            (("demo", option, value), f"{option} is of --gigapixel; give that too")
            for option, value in (("--size", "64x64"), ("--memory", "1GiB"), ("--steps", "1"))
        ),
        *(
            (
                (*PIPELINE, "--sample", "my_models:text", option, value),
                "--sample says --input and --batch already",
            )
            for option, value in (("--input", "3x16x16"), ("--batch", "2"), ("--input-dtype", "int64"))
        ),
        ((*PIPELINE, "--threads", "0"), "--threads 0 is below 1"),
    ],
)
def test_options_that_would_do_nothing_are_refused(models, capfd, arguments, words):  # noqa: F811
    code, err = refused(capfd, *arguments)
    assert code == 2 and words in err


KEPT = ("--threads", "1", "--out", "kept")
SLIDES = ("stream", "train", "my_models:small", "--memory", "1MiB", "--data")


@pytest.mark.parametrize("error", ["SystemExit(0)", "EOFError('no line')", "ValueError('no line')"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("audit", "my_models:fail", "--seeds", "3", *KEPT),
        ("calibrate", "my_models:fail", *KEPT),
        ("embeddings", "my_models:fail", "--memory", "1MiB"),
        (*SLIDES, "my_models:fail"),
        (*SLIDES, "my_models:late"),
    ],
    ids=["audit", "calibrate", "embeddings", "stream", "stream later"],
)
def test_what_a_users_own_function_raises_is_one_sentence(models, capfd, arguments, error):  # noqa: F811
    with (models / "my_models.py").open("a") as file:
        file.write(f"\ndef fail(run=None):\n    raise {error}\n\ndef late():\n    yield from fail()\n")
    code, err = refused(capfd, *arguments)
    (said,) = err.splitlines()
    name = next(each for each in arguments if each in ("my_models:fail", "my_models:late"))
    assert code == 1 and said.startswith(f"squeezebox: '{name}' raised {error.partition('(')[0]}")
    assert "my_models.py, line " in said


def test_an_error_of_another_process_is_told_with_its_own_line():
    def train():
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            pool.submit(os.listdir, "no such folder").result()

    with pytest.raises(squeezebox.SqueezeboxError, match=r"concurrent/futures/process\.py, line \d+\)"):
        call_factory("my_models:train", train)


FILES = [
    (("plan", *STEP, "--diff", "plan.json", "--out", "./plan.json"), "--out plan.json", "--diff"),
    (("report", "run.json", "--trace", "run.json"), "--trace run.json", "RUN.JSON"),
    (("report", "run.json", "--html", "a", "--snapshot", "a"), "--snapshot a", "--html"),
    (("report", "run.html", "--open"), "--html run.html", "RUN.JSON"),
    (("demo", "--out", "x.json", "--timeline", "x.json"), "--timeline x.json", "--out"),
    (("pipeline", "simulate", "gpipe", "--out", "x", "--trace", "x"), "--trace x", "--out"),
    (("pipeline", "simulate", "gpipe", "--trace", "x", "--csv", "link"), "--csv link", "--trace"),
    ((*PIPELINE[:3], "--devices", "d.toml", "--out", "d.toml"), "--out d.toml", "--devices"),
    (("memory", "pack", "in.csv", "--out", "in.csv"), "--out in.csv", "FILE.csv"),
]


@pytest.mark.parametrize(("arguments", "file", "other"), FILES)
def test_no_file_that_is_written_replaces_another(models, capfd, arguments, file, other):  # noqa: F811
    Path("link").symlink_to("x")
    before = sorted(models.iterdir())
    code, err = refused(capfd, *arguments)
    assert code == 2 and f"{file} would replace the file of {other}; name another." in err
    assert sorted(models.iterdir()) == before


def test_what_keeps_nothing_may_be_named_twice(models, capfd):  # noqa: F811
    code, out, err = run(capfd, "pipeline", "simulate", "gpipe", "--out", os.devnull, "--trace", os.devnull)
    assert (code, err) == (0, "") and out
