"""What passes hand on lies in a file that goes with the step, and convolutions before a barrier run once."""

import copy
import os
import shutil
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from squeezebox.memory import DiskFolder
from squeezebox.schema import OptionError, OutputError
from squeezebox.streaming import StreamedStep
from tests.streaming.test_exact import TOLERANCE, worst


class Residual(nn.Module):
    """Two levels of batch normalisation, a skip connection that crosses both, and a mask of the first."""

    def __init__(self, width=4):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, width, 5, padding=2), nn.Conv2d(width, width, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])
        self.head = nn.Conv2d(width, 2, 3, padding=1)

    def forward(self, x):
        x = self.norms[0](self.first(x))
        y = self.norms[1](self.second(x.relu())).relu()
        return self.head(torch.where(x > 0, x + y, y))


def residual():
    torch.manual_seed(0)
    return Residual().double(), torch.randn(2, 3, 60, 8, dtype=torch.float64), torch.randint(0, 2, (2, 60, 8))


def folder_is_open(folder):
    return any(str(folder) in os.readlink(each) for each in _open_files())


def _open_files():
    return [each for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not list open files")
@pytest.mark.parametrize("stopped", [False, True])
def test_the_file_goes_with_the_step(tmp_path, stopped):
    model, image, classes = residual()
    before, seen = copy.deepcopy(model.state_dict()), []

    def look(progress):
        seen.append(folder_is_open(tmp_path))
        if stopped and progress.done == progress.total - 1:
            raise KeyboardInterrupt

    step = StreamedStep(model, nn.CrossEntropyLoss(), height=9, spool=tmp_path, progress=look)
    if stopped:
        with pytest.raises(KeyboardInterrupt):
            step(image, classes)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    else:
        step(image, classes)
    assert all(seen) and not folder_is_open(tmp_path) and not [*tmp_path.iterdir()]


class Convolutions(TorchDispatchMode):
    """Counts the rows of images that convolutions give."""

    rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.convolution.default:
            self.rows += result.shape[2]
        return result


@pytest.mark.parametrize("recompute", [False, True])
def test_bytes_and_operators(tmp_path, recompute):
    model, image, classes = residual()
    whole = copy.deepcopy(model)
    nn.functional.cross_entropy(whole(image), classes).backward()
    step = StreamedStep(model, nn.CrossEntropyLoss(), height=20, spool=tmp_path, recompute=recompute)
    plan = step.plan(image, classes)
    assert (
        plan.disk_bytes == 2 * 8 * (3 * 2 * 4 * 60 * 8) + 2 * 4 * 60 * 8
    )  # doubles with gradients, the mask
    assert "stored on disk: 183.75 KiB" in str(plan)
    with Convolutions() as counted:
        step(image, classes)
    assert worst(whole, model) < TOLERANCE
    if not recompute:
        assert counted.rows < 3.4 * 60  # each of the three once, and halos of two


def test_a_full_disk_and_a_missing_folder_are_said_beforehand(tmp_path, monkeypatch):
    model, image, classes = residual()
    with pytest.raises(OutputError, match=f"188,160 bytes could be made in {tmp_path / 'no'}"):
        StreamedStep(model, nn.CrossEntropyLoss(), height=9, spool=tmp_path / "no")(image, classes)
    usage = namedtuple("usage", "total used free")(2**20, 2**20 - 1024, 1024)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(OutputError, match="188,160 bytes of disk; .* has 1,024 free"):
        StreamedStep(model, nn.CrossEntropyLoss(), height=9, spool=tmp_path)(image, classes)


def test_a_folder_in_memory_is_refused_and_true_takes_another(monkeypatch):
    memory = Path("/dev/shm")
    if DiskFolder(str(memory), "").frees_memory:
        pytest.skip("there is no folder in memory")
    monkeypatch.setattr(tempfile, "tempdir", str(memory))
    model, *_ = residual()
    step = StreamedStep(model, torch.nn.functional.cross_entropy, height=8, spool=True)
    assert step._folder != memory
    with pytest.raises(OptionError, match="a file in spool='/dev/shm' would free no memory"):
        StreamedStep(model, torch.nn.functional.cross_entropy, height=8, spool=memory)
