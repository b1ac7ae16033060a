"""The command line from outside: results on standard output, errors without tracebacks, exit codes."""

import json
import os
import subprocess
import sys
import webbrowser
from pathlib import Path

import pytest

import squeezebox
from squeezebox.cli import main
from squeezebox.reports import Timeline
from tests.reports.test_page import timeline

MODELS = """
import torch.nn

number = 3

def small():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 3))

def sized(width):
    return torch.nn.Linear(width, width)

def text():
    return "no model"

class Heads(torch.nn.Module):
    def __init__(self, as_dict=False):
        super().__init__()
        self.layer, self.as_dict = torch.nn.Linear(8, 4), as_dict

    def forward(self, x):
        y = self.layer(x)
        one, other = y.exp(), y.sigmoid()
        return {"one": one, "nested": [other], "width": 4} if self.as_dict else (one, other, None)

def keyed():
    return Heads(as_dict=True)

class Both(torch.nn.Module):
    def forward(self, x):
        return x.exp(), x.sigmoid()

def headed():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4), Both())
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A directory with my_models.py in it, which is the current one."""
    (tmp_path / "my_models.py").write_text(MODELS)
    (tmp_path / "lacking.py").write_text("import no_such_package_at_all")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path
    for name in ("my_models", "lacking"):
        sys.modules.pop(name, None)


def run(capfd, *arguments):
    """(exit status, standard output, standard error)."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    captured = capfd.readouterr()
    return ended.value.code, captured.out, captured.err


def test_version(capfd):
    assert run(capfd, "--version") == (0, f"{squeezebox.__version__}\n", "")


def test_help_names_every_command_and_is_quick():
    program = (
        "import sys, squeezebox.cli as cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('numpy', 'torch') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert all(name in result.stdout for name in ("estimate", "demo", "codecs"))
    assert result.stdout.endswith("[]\n")


def test_codecs(capfd):
    code, out, _ = run(capfd, "codecs", "--json")
    assert code == 0
    assert [row["name"] for row in json.loads(out)] == list(squeezebox.codecs.available())
    code, out, _ = run(capfd, "codecs")
    assert code == 0
    assert "entropy-sign" in out


def test_plan(models, capfd):
    arguments = ("plan", "my_models:small", "--input", "3x32x32", "--batch", "8", "--noise", "1e-2")
    code, out, err = run(capfd, *arguments, "--json")
    assert (code, err) == (0, "")
    figures = json.loads(out)
    assert figures == json.loads((models / "plan.json").read_text())
    assert figures["predicted_peak_bytes"] <= figures["plain_peak_bytes"]
    code, out, err = run(capfd, *arguments, "--budget", "100%", "--out", "other.json")
    assert (code, err) == (0, "")
    assert "1:Relu.result" in out and "keep" in out
    assert squeezebox.load_plan("other.json").predicted_noise == 0.0


@pytest.mark.parametrize(
    "wrong",
    (
        ("--budget", "1KiB"),
        ("--budget", "much"),
        ("--batch", "0"),
        ("--optimizer", "sdg"),
        ("--loss", "my_models:small"),
        ("--sample", "my_models:nothing"),
        ("--out", "missing/plan.json"),
        ("--noise", "1e-2", "--exact"),
        ("--time-limit", "0.5"),
        ("--offload-folder", "missing"),
        ("--offload-folder", ".", "--no-offload"),
        ("--diff", "missing.json"),
        ("--compiled", "--accumulate", "2"),
        ("--time-limit", "1.3", "--budget", "50%"),
    ),
)
def test_plan_refuses(models, capfd, wrong):
    code, out, err = run(capfd, "plan", "my_models:small", "--input", "3x32x32", "--batch", "8", *wrong)
    assert code != 0 and out == "" and "Traceback" not in err and len(err) > 40
    assert not (models / "plan.json").exists()


def test_plans_profiles_are_cached_unless_told_not_to(models, capfd):
    arguments = ("plan", "my_models:small", "--input", "3x32x32", "--batch", "8", "--exact")
    folder = models / "cache" / "squeezebox" / "profiles"
    assert run(capfd, *arguments, "--no-cache")[0] == 0
    assert not folder.exists()
    assert run(capfd, *arguments)[0] == 0
    assert len(list(folder.iterdir())) == 1


def test_plan_against_an_earlier_one(models, capfd):
    arguments = (
        "plan",
        "my_models:small",
        "--input",
        "3x32x32",
        "--batch",
        "8",
        "--exact",
        "--budget",
        "100%",
    )
    assert run(capfd, *arguments)[0] == 0
    values = json.loads((models / "plan.json").read_text())
    values["tensors"][0] |= {"action": "offload", "codec": "file"}
    (models / "earlier.json").write_text(json.dumps(values))
    code, out, _ = run(capfd, *arguments, "--diff", "earlier.json", "--out", "again.json")
    assert code == 0
    assert (
        out.startswith(f"{values['tensors'][0]['key']}  offload file") and "\n1 of 2 tensors differ\n" in out
    )
    code, as_json, _ = run(capfd, *arguments, "--diff", "earlier.json", "--out", "again.json", "--json")
    assert code == 0
    lines = json.loads(as_json)["diff"].splitlines()
    assert lines[0] == out.splitlines()[0] and "1 of 2 tensors differ" in lines
    (models / "plan.json").unlink()
    assert run(capfd, *arguments, "--diff", "earlier.json")[0] == 0
    assert not (models / "plan.json").exists()


def test_find_batch(models, capfd):
    arguments = ("find-batch", "my_models:small", "--input", "3x32x32", "--batch", "4", "--exact")
    more = ("--memory", "1MiB", "--effective", "64", "--out", "found.json", "--json")
    code, out, err = run(capfd, *arguments, *more)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["plan"] == json.loads((models / "found.json").read_text())
    assert found["measured_peak_bytes"] <= found["memory_bytes"] - found["reserve_bytes"] == 943_719
    assert sum(found["microbatches"]) == 64 and len(found["probes"]) <= 3
    code, out, _ = run(capfd, *arguments, "--memory", "1MiB", "--reserve", "much")
    assert (code, out) == (2, "")


def test_max_batch(models, capfd):
    arguments = ("max-batch", "my_models:small", "--input", "3x32x32", "--batch", "4", "--exact")
    code, out, err = run(capfd, *arguments, "--budget", "200%", "--json")
    assert (code, err) == (0, "")
    figures = json.loads(out)
    assert figures["batch"] >= figures["plain_batch"] >= 7
    assert figures["predicted_peak_bytes"] <= figures["plan"]["budget_bytes"]
    code, out, err = run(capfd, *arguments, "--budget", "1KiB")
    assert (code, out) == (1, "") and "bytes" in err and "Traceback" not in err
    code, out, err = run(capfd, *arguments)
    assert (code, out) == (2, "") and "--budget" in err


@pytest.mark.parametrize("factory", ["Heads", "keyed"])
@pytest.mark.parametrize("command", [("plan",), ("find-batch", "--memory", "1MiB")])
def test_a_model_of_several_outputs_needs_no_loss(models, capfd, factory, command):
    name, *more = command
    code, out, err = run(
        capfd, name, f"my_models:{factory}", "--input", "8", "--batch", "512", "--exact", "--json", *more
    )
    assert (code, err) == (0, "")
    found = json.loads(out)
    keys = {tensor["key"] for tensor in found.get("plan", found)["tensors"]}
    assert all(any(operator in key for key in keys) for operator in ("Exp", "Sigmoid"))


def test_a_pipeline_of_several_outputs_needs_no_loss(models, capfd):
    given = (
        "--input",
        "8",
        "--batch",
        "8",
        "--ranks",
        "1",
        "--memory",
        "1GiB",
        "--bandwidth",
        "1GiB",
        "--json",
    )
    code, out, _ = run(capfd, "pipeline", "plan", "my_models:headed", *given, "--out", os.devnull)
    assert code == 0 and json.loads(out)["ranks"] == 1


@pytest.mark.parametrize("command", [("plan",), ("find-batch",), ("max-batch", "--budget", "1MiB")])
@pytest.mark.parametrize("more", [("--batch", "3"), ("--input", "3x16x16")])
def test_a_sample_says_shape_and_batch_already(models, capfd, command, more):
    name, *needed = command
    given = ("my_models:small", "--sample", "my_models:text", *needed, *more)
    code, out, err = run(capfd, name, *given)
    assert (code, out) == (2, "") and "--sample says --input and --batch already" in err


def test_estimate(models, capfd):
    arguments = ("estimate", "my_models:small", "--input", "3x16x16", "--batch", "2", "--optimizer", "adamw")
    code, out, err = run(capfd, *arguments, "--json")
    assert (code, err) == (0, "")
    figures = json.loads(out)
    assert figures["parameter_bytes"] == 4 * (3 * 4 * 9 + 4 + 4 * 4 * 9 + 4)
    assert figures["saved_bytes"] == sum(figures["saved"].values())
    code, out, err = run(capfd, *arguments)
    assert (code, err) == (0, "")
    assert "peak of the step" in out and "The peak is in " in out


def test_estimate_of_a_sample_and_a_loss(models, capfd):
    with (models / "my_models.py").open("a") as file:
        file.write(
            "\ndef batch(): return torch.zeros(4, 3, 16, 16), torch.zeros(())\n"
            "def loss(output, target): return (output - target).square().mean()\n"
        )
    given = ("--sample", "my_models:batch", "--loss", "my_models:loss")
    code, out, err = run(capfd, "estimate", "my_models:small", *given, "--json")
    assert (code, err) == (0, "")
    figures = json.loads(out)
    assert (figures["batch"], figures["input_bytes"]) == (4, 4 * (4 * 3 * 16 * 16 + 1))
    assert sum(figures["peak"]["by_kind"].values()) == figures["peak_bytes"]
    code, out, err = run(capfd, "estimate", "my_models:small", *given, "--batch", "3")
    assert (code, out) == (2, "") and "sample says input_shape, batch" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["my_models"], "write module:callable"),
        ([":small"], "write module:callable"),
        ([".my_models:small"], "'.my_models' begins with a dot"),
        (["no_such_models:small"], "no module 'no_such_models' in"),
        (["lacking:small"], "imports 'no_such_package_at_all', which is missing"),
        (["my_models:large"], "has no 'large'"),
        (["my_models:number"], "is a int, which cannot be called"),
        (["my_models:text"], "returned a str, not a torch.nn.Module"),
        (["my_models:sized"], "needs arguments (width)"),
        (["my_models:small", "--input", "3x22y4"], "--input 3x22y4 is not a shape"),
        (["my_models:small", "--input", "3x0x4"], "is not a shape"),
        (["my_models:small", "--input", ""], "is not a shape"),
        (["my_models:small", "--batch", "0"], "batch 0 is below 1"),
        (["my_models:small", "--batch", "many"], "Invalid value for '--batch'"),
        (["my_models:small", "--optimizer", "lion"], "no optimizer 'lion'"),
        (["my_models:small", "--dtype", "wide"], "'wide' is no dtype"),
        (["my_models:small", "--input", "4x16x16"], "forward fails on an input of shape (32, 4, 16, 16)"),
        (["my_models:small", "--inptu", "3x16x16"], "No such option"),
    ],
)
def test_wrong_arguments_of_estimate(models, capfd, arguments, message):
    code, out, err = run(capfd, "estimate", *arguments)
    assert (code, out) == (2, "")
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--noise", "-1"], 2, "-1.0 is not a positive finite number"),
        (["--noise", "nan"], 2, "nan is not a positive finite number"),
        (["--batch", "1"], 2, "--batch 1 is below 2"),
        (["--batch", "100000"], 2, "more than the"),
        (["--epochs", "0"], 2, "--epochs 0.0 is not a positive number"),
        (["--seed", str(2**64)], 2, "is not from 0 to 2**64 - 1"),
        (["--data", "nowhere"], 1, "The full Fashion-MNIST was not found"),
        (["--out", "missing/demo.json"], 1, "cannot write missing/demo.json"),
    ],
)
def test_the_demo_refuses_before_it_trains(models, capfd, arguments, code, message):
    before = sorted(models.iterdir())
    status, out, err = run(capfd, "demo", *arguments)
    assert (status, out) == (code, "")
    assert message in err
    assert "Traceback" not in err
    assert sorted(models.iterdir()) == before


def test_the_demo_end_to_end(models, capfd, monkeypatch):
    monkeypatch.setattr("squeezebox.cli._demo._CHANNELS", (4, 4, 8))
    monkeypatch.setattr("squeezebox.cli._demo.DEFAULT_STEPS", 3)
    monkeypatch.setattr("squeezebox.cli._demo.fashion_mnist", tiny)
    monkeypatch.setattr("squeezebox.cli._show._SILENT", 0.0)
    code, out, err = run(capfd, "demo", "--batch", "8", "--json")
    assert code == 0, err
    figures = json.loads(out)
    assert figures == json.loads((models / "demo.json").read_text())
    assert figures["squeezed"]["saved_bytes"] < figures["plain"]["saved_bytes"]
    assert figures["story"]["peak_bytes"] <= figures["story"]["limit_bytes"] == figures["plain"]["peak_bytes"]
    assert figures["story"]["squeezed_batch"] % 4 == 0
    assert "training, plain and squeezed: 3/3" in err
    code, out, err = run(capfd, "demo", "--batch", "8", "--out", "again.json")
    assert code == 0, err
    for row in ("saved for backward", "peak of the step", "step time", "test accuracy", "gradient noise"):
        assert row in out
    assert "where plain training holds batch 8" in out


def tiny(root=None):
    from squeezebox.cli._data import Dataset, fashion_mnist

    data = fashion_mnist(subset=True)
    return Dataset(
        train_images=data.train_images[:200],
        train_labels=data.train_labels[:200],
        test_images=data.test_images[:50],
        test_labels=data.test_labels[:50],
        source="two hundred images",
    )


def test_report_shows_a_profiled_step(capfd, tmp_path):
    (tmp_path / "none.json").write_text("{}")
    status, out, err = run(capfd, "report", str(tmp_path / "none.json"))
    assert (status, out) == (1, "") and "session.timeline(step).save(path)" in err
    Timeline(timeline()).save(tmp_path / "run.json")
    page, trace = tmp_path / "run.html", tmp_path / "trace.json"
    status, out, _ = run(
        capfd, "report", str(tmp_path / "run.json"), "--html", str(page), "--trace", str(trace)
    )
    assert status == 0 and "peak" in out
    assert page.read_text().startswith("<!doctype html>")
    assert json.loads(trace.read_text())["traceEvents"]


def test_report_opens_the_page(capfd, tmp_path, monkeypatch):
    Timeline(timeline()).save(tmp_path / "run.json")
    for found, expected in ((True, 0), (False, 1)):
        monkeypatch.setattr(webbrowser, "open", lambda url, found=found: found and url.endswith("run.html"))
        status, _, err = run(capfd, "report", str(tmp_path / "run.json"), "--open")
        assert status == expected and (found or "no browser" in err)
        assert (tmp_path / "run.html").exists()


USERS = """
import torch

def tokens():
    return torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50))

def broken():
    print("called")
    raise RuntimeError("no weights in this folder")

def flat():
    return torch.nn.Linear(8, 4)

def loss(output, target):
    return torch.nn.functional.cross_entropy(output, target)
"""


@pytest.fixture
def users(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(USERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("my_models", None)


def refused(code, out, error):
    """What the command says on standard error, and how often it called the factory."""
    assert code in (1, 2) and "Traceback" not in error, error
    (said,) = [line for line in error.splitlines() if line.startswith("squeezebox: ")]
    return said, (out + error).count("called\n")


def assert_said_once(said, calls):
    assert "'my_models:broken' raised RuntimeError: no weights in this folder (" in said
    assert "my_models.py, line 9)" in said and calls == 1


@pytest.mark.parametrize("command", (("estimate",), ("plan", "--no-cache")))
def test_what_a_factory_raises_is_said_once(users, capfd, command):
    assert_said_once(*refused(*run(capfd, *command, "my_models:broken", "--input", "8")))


def test_a_process_of_its_own_says_so_too(users):
    done = subprocess.run(
        [sys.executable, "-m", "squeezebox.cli", "estimate", "my_models:broken", "--input", "8"],
        capture_output=True,
        text=True,
        cwd=users,
        env={**os.environ, "PYTHONPATH": str(Path(squeezebox.__file__).parents[1])},
    )
    assert_said_once(*refused(done.returncode, done.stdout, done.stderr))


@pytest.mark.parametrize(
    "arguments, message",
    (
        (("plan", "my_models.py:flat"), "write its module, as in my_models:flat"),
        (("plan", "my_models:flat", "--batch", "-1"), "--batch -1 is below 1"),
        (("estimate", "my_models:broken", "--batch", "-1"), "--batch -1 is below 1"),
        (
            ("max-batch", "my_models:broken", "--budget", "1GiB", "--input", "3x-3x32"),
            "--input 3x-3x32 is not",
        ),
        (
            ("pipeline", "plan", "my_models:broken", "--ranks", "2", "--memory", "1GiB", "--batch", "-1"),
            "--batch -1",
        ),
        (
            (
                "pipeline",
                "plan",
                "my_models:flat",
                "--ranks",
                "2",
                "--memory",
                "1GiB",
                "--loss",
                "my_models:loss",
            ),
            "also give --sample",
        ),
        (
            ("plan", "my_models:flat", "--input", "8", "--loss", "my_models:loss"),
            "Give --sample module:callable",
        ),
        (("plan", "my_models:flat", "--input", "9", "--no-cache"), "Give --sample module:callable"),
    ),
)
def test_refusals_name_the_commands_own_options(users, capfd, arguments, message):
    said, calls = refused(*run(capfd, *arguments))
    assert message in said and "=(" not in said and "loss_fn" not in said and calls == 0


@pytest.mark.parametrize(
    ("command", "dtype"),
    [
        (("plan", "--no-cache"), ()),
        (("plan", "--no-cache"), ("--input-dtype", "int64")),
        pytest.param(("max-batch", "--budget", "1GiB"), ("--input-dtype", "int64"), marks=pytest.mark.slow),
    ],
)
def test_token_inputs(users, capfd, command, dtype):
    code, out, error = run(
        capfd, *command, "my_models:tokens", "--input", "12", "--batch", "2", "--exact", "--json", *dtype
    )
    assert code == 0, error
    assert json.loads(out)


def test_python_runs_the_package_as_the_command():
    result = subprocess.run(
        [sys.executable, "-m", "squeezebox", "--version"], capture_output=True, text=True, check=True
    )
    assert result.stdout == f"{squeezebox.__version__}\n"
