"""Where ``squeezebox pipeline train`` begins, and where it leaves the weights, also on disks apart."""

import contextlib
import dataclasses
import io
import json
import shlex
import shutil
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from squeezebox.cli import main
from squeezebox.cli._checkpoints import Checkpoints
from squeezebox.pipeline import Runner
from squeezebox.schema import FormatError, InputForm, OptionError, OutputError
from tests.pipeline import ranks

MODULE = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))

loss = nn.functional.mse_loss

def five():
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        yield torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoints")
    (path / "one.py").write_text(MODULE)
    form = InputForm(shape=(6,), dtype="float32")
    plan = dataclasses.replace(
        ranks.plan(3, 1, "gpipe", 2, inputs=(form,)), rank_peak_bytes=(0,), model="one:net", loss="one:loss"
    )
    plan.save(path / "plan.json")
    return path


@pytest.fixture
def train(folder, tmp_path, monkeypatch):
    """The command on one rank, as torchrun starts it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(folder)
    for name, value in {
        "TORCHELASTIC_RUN_ID": "1",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)

    def run(*options, code=0):
        monkeypatch.setenv("MASTER_PORT", str(ranks.free_port()))
        out, error = io.StringIO(), io.StringIO()
        arguments = [
            "pipeline",
            "train",
            str(folder / "plan.json"),
            "--data",
            "one:five",
            "--log-every",
            "1",
            *options,
        ]
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(error),
            pytest.raises(SystemExit) as ended,
        ):
            main(arguments)
        dist.destroy_process_group()
        assert ended.value.code == code, error.getvalue()
        return (error if code else out).getvalue()

    yield run
    sys.modules.pop("one", None)


def _whole(folder):
    whole = folder.parents[1] / "whole.pt"
    dcp_to_torch_save(folder, whole)
    return torch.load(whole)["model"]


def _losses(text):
    return [line for line in text.splitlines() if line.startswith("batch")]


def test_weights_at_the_end_are_always_saved_and_named(train, tmp_path):
    assert "weights: not saved; give --checkpoint DIRECTORY to keep them\n" in train("--steps", "2")
    assert not [*tmp_path.iterdir()]
    end = train("--steps", "3", "--checkpoint", "a b").splitlines()[-1]
    assert [path.name for path in (tmp_path / "a b").iterdir()] == ["batch-3"]
    assert end.startswith('weights: a b/batch-3; as "model" in one file: python -m torch.distributed')
    assert shlex.split(end.partition("file: ")[2])[-3:] == ["dcp_to_torch", "a b/batch-3", "whole.pt"]
    train("--steps", "3", "--save-every", "2", "--checkpoint", "c")
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["batch-2", "batch-3"]
    one, other = _whole(tmp_path / "a b" / "batch-3"), _whole(tmp_path / "c" / "batch-3")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_one_command_starts_and_resumes(train, tmp_path):
    whole = train("--checkpoint", "whole", "--save-every", "5")  # all of the data, and saved once at its end
    first = train("--steps", "3", "--checkpoint", "c", "--resume")
    assert "c has no checkpoint yet: training begins at the first batch\n" in first
    again = train("--checkpoint", "c", "--resume")
    assert "resumed from c/batch-3\n" in again
    assert _losses(first) + _losses(again) == _losses(whole)
    one, other = _whole(tmp_path / "whole" / "batch-5"), _whole(tmp_path / "c" / "batch-5")
    assert all(torch.equal(one[name], other[name]) for name in one)
    for options in ((), ("--steps", "5"), ("--steps", "2")):  # the data, or the steps, are at their end
        done = train("--checkpoint", "c", "--resume", *options)
        assert not _losses(done) and "nothing was left to train on: 5 batches were done before" in done
        assert "weights: c/batch-5;" in done
    assert "the data ended after 5 batches, of 7" in train("--checkpoint", "c", "--resume", "--steps", "7")
    values = json.loads(train("--checkpoint", "c", "--resume", "--json"))
    assert values["checkpoint"] == "c/batch-5"
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["batch-3", "batch-5"]


def test_directories_are_refused_before_training(train, tmp_path):
    train("--steps", "1", "--checkpoint", "c")
    used = train("--steps", "1", "--checkpoint", "c", code=2)
    assert "c has checkpoints of an earlier run, such as batch-1. Give --resume" in used
    (tmp_path / "file").touch()
    assert "file cannot be a directory for checkpoints" in train("--checkpoint", "file", code=1)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    assert "no complete checkpoint in other" in train("--checkpoint", "other", "--resume", code=1)
    (tmp_path / "c" / "batch-1" / ".metadata").unlink()
    assert "cannot be read" in train("--checkpoint", "c", "--resume", code=1)
    (tmp_path / "cut" / ".batch-1.partial").mkdir(parents=True)  # a first save that was cut off
    assert "cut has no checkpoint yet" in train("--steps", "1", "--checkpoint", "cut", "--resume")


def _apart(rank, directory):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runner = Runner(model, ranks.plan(4, 2, "gpipe", 2), optimizer=optimizer, loss_fn=nn.functional.mse_loss)
    found = []
    for done, disks in enumerate(("shared", f"node-{rank}"), 1):
        checkpoints = Checkpoints(runner, directory / disks, 0)
        found.append(checkpoints.begin(resume=True))
        runner.step(torch.ones(4, 6).double(), torch.ones(4, 6).double())
        checkpoints.finish(done)
        found.append(checkpoints.summary())
    for disks in (f"lost-{rank}", f"file-{rank}"):
        if rank == 0:
            (directory / "lost-0" / "batch-1").mkdir(parents=True, exist_ok=True)
            (directory / "file-0").touch()
        try:
            Checkpoints(runner, directory / disks, 0).begin(resume=True)
        except (FormatError, OptionError, OutputError) as error:
            found.append(str(error))
    runner.close()
    return found


def test_ranks_decide_together_though_their_disks_differ(tmp_path):
    for found in ranks.run(_apart, 2, tmp_path):
        first, shared, second, apart, lost, file = found
        assert first == second == 0
        assert "rank-*" not in shared and "(first copy the other machines' rank-* folders into it)" in apart
        assert "is empty for rank 1, and rank 0 has batch-1 there" in lost
        assert file.startswith("rank 0: ") and file.endswith("Name another --checkpoint.")
    node = tmp_path / "node-0" / "batch-2"
    with pytest.raises(CheckpointException, match="rank-1"):
        _whole(node)
    shutil.copytree(tmp_path / "node-1" / "batch-2" / "rank-1", node / "rank-1")
    assert len(_whole(node)) == 8
