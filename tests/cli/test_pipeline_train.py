"""``squeezebox pipeline plan`` and ``train``, here and from outside, with torchrun."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from squeezebox.cli import _train, main
from squeezebox.schema import Devices

MODULE = """
import os
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(self.norm(x)).relu()

class Net(nn.Module):
    def __init__(self, words=32, width=32, depth=4):
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def net():
    print("made")
    torch.manual_seed(0)
    return Net()

def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

def batches():
    generator = torch.Generator().manual_seed(0)
    while True:
        tokens = torch.randint(0, 32, (8, 9), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:].contiguous()

def dying():
    for number, batch in enumerate(batches()):
        if number == 2 and not Path("died").exists():
            Path("died").touch()
            os._exit(3)
        yield batch

def few():
    return [batch for batch, _ in zip(batches(), range(2))]
"""


def squeezebox(folder, *arguments, ranks=None):
    """The command here, or by torchrun on so many ranks."""
    return _started(folder, arguments, ranks) if ranks else _called(folder, arguments)


def _called(folder, arguments):
    out, error = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            main(arguments)
    sys.modules.pop("mine", None)
    return subprocess.CompletedProcess(arguments, ended.value.code, out.getvalue(), error.getvalue())


def _started(folder, arguments, ranks, *options):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        *options,
    ]
    source = str(Path(__file__).parents[2] / "src")
    return subprocess.run(
        [*command, "-m", "squeezebox.cli", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a module of the user's, and a plan."""
    path = tmp_path_factory.mktemp("user")
    (path / "mine.py").write_text(MODULE)
    planned = squeezebox(
        path, "pipeline", "plan", "mine:net", "--ranks", "2", "--depth", "2",
        "--memory", "64MiB", "--loss", "mine:loss", "--microbatches", "2", "--schedules", "1f1b,2bw",
        "--bandwidth", "1GiB", "--sample", "mine:sample",
    )  # fmt: skip
    assert planned.returncode == 2 and "'sample'" in planned.stderr  # there is none in the module
    planned = squeezebox(
        path, "pipeline", "plan", "mine:net", "--input", "8", "--batch", "8", "--ranks", "2", "--depth", "2",
        "--memory", "64MiB", "--microbatches", "2", "--schedules", "1f1b,2bw", "--bandwidth", "1GiB",
    )  # fmt: skip
    assert planned.returncode == 0, planned.stderr
    assert "Runners-up" in planned.stdout
    return path


@pytest.mark.slow
def test_training_by_a_plan_and_going_on(folder):
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["model"] == "mine:net" and plan["ranks"] == 2
    arguments = (
        "pipeline",
        "train",
        "plan.json",
        "--data",
        "mine:batches",
        "--loss",
        "mine:loss",
        "--log-every",
        "1",
    )
    checkpoint = "--checkpoint", "saved", "--save-every", "3"
    whole = squeezebox(folder, *arguments, "--steps", "6", *checkpoint, ranks=2)
    assert whole.returncode == 0, whole.stderr
    assert "planned" in whole.stdout and "batch 5: loss" in whole.stdout
    assert "weights: saved/batch-6;" in whole.stdout and "rank-*" not in whole.stdout
    assert sorted(path.name for path in (folder / "saved").iterdir()) == ["batch-3", "batch-6"]
    (folder / "saved" / "batch-6").rename(folder / "apart")
    again = squeezebox(
        folder, *arguments, "--steps", "6", "--checkpoint", "saved", "--resume", "--json", ranks=2
    )
    assert again.returncode == 0, again.stderr
    assert len(json.loads(again.stdout)["peak_bytes"]) == 2 and again.stderr.count("made") == 2
    losses = [line for line in whole.stdout.splitlines() if line.startswith("batch")]
    assert [line for line in again.stderr.splitlines() if line.startswith("batch")] == losses[3:]
    assert json.loads(again.stdout)["seconds"] is None  # in fewer than four batches
    few = [each if each != "mine:batches" else "mine:few" for each in arguments]
    short = squeezebox(folder, *few, "--steps", "6", ranks=2)
    assert short.returncode == 0, short.stderr
    assert short.stdout.count("the data ended after 2 batches, of 6") == 1
    assert "seconds a batch: not measured in fewer than 4 batches" in short.stdout


@pytest.mark.slow
def test_torchrun_restarts_it_with_the_same_command(folder):
    arguments = (
        "pipeline", "train", "plan.json", "--data", "mine:dying", "--loss", "mine:loss", "--log-every", "1",
        "--steps", "4", "--checkpoint", "restarted", "--save-every", "1", "--resume", "--patience", "20",
    )  # fmt: skip
    found = _started(folder, arguments, 2, "--max-restarts", "1")
    assert found.returncode == 0, found.stderr
    assert "begins at the first batch" in found.stdout and "resumed from restarted/batch-" in found.stdout
    assert (folder / "restarted" / "batch-4").exists()


@pytest.mark.parametrize(
    ("arguments", "ranks", "message"),
    [
        (("--data", "mine:batches", "--loss", "mine:loss"), None, "was not started by torchrun"),
        (("--data", "mine:batches"), None, "names no loss; give --loss"),
        pytest.param(
            ("--data", "mine:none", "--loss", "mine:loss"), 2, "has no 'none'", marks=pytest.mark.slow
        ),
    ],
)
def test_bad_arguments(folder, arguments, ranks, message):
    result = squeezebox(folder, "pipeline", "train", "plan.json", *arguments, ranks=ranks)
    assert result.returncode
    assert message in result.stderr
    assert "Traceback" not in result.stderr.split("torch/distributed")[0]


def test_a_plan_over_unequal_devices(folder):
    (folder / "devices.toml").write_text(
        "".join(f'[[devices]]\nname = "{name}"\nmemory_bytes = "64MiB"\nspeed = {speed}\n' for name, speed in
                (("slow", 1), ("fast", 3)))
        + '[[links]]\nbetween = ["slow", "fast"]\nbytes_per_second = "1GB"\nlatency_seconds = 0\n'
    )  # fmt: skip
    arguments = (
        "pipeline", "plan", "mine:net", "--input", "8", "--batch", "8", "--microbatches", "2",
        "--schedules", "1f1b", "--depth", "2", "--out", "unequal.json",
    )  # fmt: skip
    found = squeezebox(folder, *arguments, "--devices", "devices.toml")
    assert found.returncode == 0, found.stderr
    assert "on slow (process 0)" in found.stdout and "on fast (process 1)" in found.stdout
    for options in ((), ("--devices", "devices.toml", "--ranks", "2")):
        refused = squeezebox(folder, *arguments, *options)
        assert refused.returncode == 2 and "--devices for devices that are not alike" in refused.stderr
    missing = squeezebox(folder, *arguments, "--devices", "none.toml")
    assert missing.returncode == 1 and "'squeezebox devices measure'" in missing.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [None, 2])
def test_devices_are_measured(folder, ranks):
    found = squeezebox(folder, "devices", "measure", "--memory", "64MiB", "--json", ranks=ranks)
    assert found.returncode == 0, found.stderr
    values = json.loads(found.stdout)
    devices = Devices.load(folder / "devices.toml")
    assert [each["name"] for each in values["devices"]] == [each.name for each in devices.devices]
    assert len(devices.devices) == 2 and devices.devices[0].memory_bytes == 64 * 2**20
    assert all(each.speed > 0.0 for each in devices.devices) and devices.links[0].bytes_per_second > 0.0


def test_replicas_share_a_last_batch_or_leave_it_out(capsys, monkeypatch):
    def batches():
        for count in (8, 5, 3):
            yield {"x": torch.arange(count)}, None

    monkeypatch.setattr(_train, "load_factory", lambda *_, **__: batches)
    plan, shares = SimpleNamespace(replicas=4), []
    for replica in range(4):
        runner = SimpleNamespace(replica=replica, plan=plan)
        shares.append([*_train._batches(SimpleNamespace(data="mine:batches"), runner)])
    assert [[inputs["x"].tolist() for inputs, _ in own] for own in shares] == [
        [[0, 1], [0, 1]], [[2, 3], [2]], [[4, 5], [3]], [[6, 7], [4]],
    ]  # fmt: skip
    assert all(target is None for own in shares for _, target in own)
    assert capsys.readouterr().out == "a batch of 3 is left out, as there are 4 replicas\n"
