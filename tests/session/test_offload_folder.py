"""Where a plan moves tensors to, what it says of that, and that results are plain PyTorch's to the bit."""

import copy
import dataclasses
import os
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import squeezebox
from squeezebox.memory import disk_folder, disk_speed
from squeezebox.schema import Action, OptionError

IN_MEMORY = Path("/dev/shm")
needs_memory = pytest.mark.skipif(not IN_MEMORY.is_dir(), reason="there is no folder in memory")


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(dir=disk_folder().path) as path:
        yield path


def network():
    torch.manual_seed(0)
    wide = [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.GELU()]
    layers = [nn.Conv2d(3, 16, 3, padding=1), *wide, *copy.deepcopy(wide)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 32 * 32, 9))


def sample():
    torch.manual_seed(1)
    return torch.randn(8, 3, 32, 32), torch.randint(9, (8,))


def step(model):
    model.zero_grad()
    inputs, target = sample()
    loss = F.cross_entropy(model(inputs), target)
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def planned(model, **options):
    plan = squeezebox.plan(
        model, sample=sample(), loss_fn=F.cross_entropy, exact=True, recompute=False, **options
    )
    assert plan.keys(Action.OFFLOAD)
    return plan


def test_a_plan_says_its_folder_and_what_that_takes_and_attach_goes_there(folder, tmp_path):
    model = network()
    plain = step(model)
    plan = planned(model, offload=folder)
    moved = [tensor.saved_bytes for tensor in plan.tensors if tensor.option.action is Action.OFFLOAD]
    assert (plan.offload.folder, plan.offload.file_bytes) == (folder, sum(moved))
    line = f"offloaded to {folder}"
    assert line in str(plan) and "of page cache" in str(plan)
    plan.save(tmp_path / "plan.json")
    read = squeezebox.load_plan(tmp_path / "plan.json")
    assert read == plan
    session = squeezebox.attach(model, plan=read)
    for _ in range(2):
        for squeezed, expected in zip(step(model), plain, strict=True):
            assert torch.equal(squeezed, expected)
    target = os.readlink(f"/proc/self/fd/{session.engine.store.spill._file.fileno()}")
    assert target.startswith(folder)
    record = session.report().record.offload
    assert record.folder == folder and record.file_bytes >= sum(moved)
    assert f"saved tensors {line}" in str(session.report())


@needs_memory
def test_a_folder_in_memory_is_refused_before_anything_runs():
    class Never(nn.Module):
        def forward(self, x):
            raise AssertionError("the model ran")

    model = nn.Sequential(nn.Linear(2, 2), Never())
    for offload, said in ((IN_MEMORY, "in memory itself"), ("/no/such", "is no folder")):
        with pytest.raises(OptionError, match=said):
            squeezebox.plan(model, sample=(torch.ones(2, 2), None), loss_fn=F.mse_loss, offload=offload)


@needs_memory
def test_the_usual_folder_is_another_where_the_temporary_one_is_in_memory(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(IN_MEMORY))
    model = network()
    assert Path(planned(model).offload.folder) not in (IN_MEMORY, *IN_MEMORY.parents)


@needs_memory
def test_nothing_is_moved_where_no_folder_is_on_a_disk(monkeypatch):
    monkeypatch.setattr("squeezebox.memory._disk._usual", lambda: iter([str(IN_MEMORY)]))
    model = network()
    plan = squeezebox.plan(model, sample=sample(), loss_fn=F.cross_entropy, exact=True)
    assert not plan.keys(Action.OFFLOAD) and plan.offload is None
    monkeypatch.undo()
    moving = planned(model)
    monkeypatch.setattr("squeezebox.memory._disk._usual", lambda: iter([str(IN_MEMORY)]))
    lost = dataclasses.replace(moving, offload=None)
    with pytest.raises(OptionError, match="none is both writable and on a disk"):
        squeezebox.attach(model, plan=lost)


def test_a_plan_whose_folder_is_gone_goes_to_another_and_says_so(folder):
    model = network()
    plain, plan = step(model), planned(model)
    gone = dataclasses.replace(plan, offload=dataclasses.replace(plan.offload, folder=f"{folder}/gone"))
    session = squeezebox.attach(model, plan=gone)
    for squeezed, expected in zip(step(model), plain, strict=True):
        assert torch.equal(squeezed, expected)
    assert session.report().record.offload.folder == disk_folder().path
    assert "gone, which is no folder" in str(session.report())
    session.detach()
    assert session.report().record.offload.folder == disk_folder().path


def test_the_disk_s_speed_is_measured_once_for_a_folder():
    speed = disk_speed(disk_folder())
    assert disk_speed(disk_folder()) is speed
    assert 0.0 < speed.leaving < min(speed.writing, speed.reading)
    assert speed.returning > 0.0


def test_a_plan_that_moves_nothing_asks_for_no_disk_s_speed(folder, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", folder)  # which has not been measured yet
    monkeypatch.setattr("squeezebox.memory._disk_speed._rounds", None)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plan = squeezebox.plan(
        model,
        optimizer=optimizer,
        sample=sample(),
        loss_fn=F.cross_entropy,
        exact=True,
        offload=False,
        states=True,
    )
    assert plan.offload is None and not plan.optimizer.states
