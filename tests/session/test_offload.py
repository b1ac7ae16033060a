"""A full disk ends a step and nothing else; nothing is left on disk, however the process ends."""

import dataclasses
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import squeezebox
from squeezebox.memory import disk_folder
from squeezebox.schema import Action, Option

COMMON = """
import dataclasses, os, sys
import torch
from torch import nn
from torch.nn import functional as F
import squeezebox
from squeezebox.schema import Action, Option

torch.set_num_threads(1)
torch.manual_seed(0)
layers = [layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.GELU())]
model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.Flatten(), nn.Linear(8 * 256, 10))
x, y = torch.randn(16, 3, 16, 16), torch.randint(10, (16,))
plan = squeezebox.plan(model, sample=(x, y), loss_fn=F.cross_entropy, exact=True)

def moved(tensor):
    option = Option(action=Action.OFFLOAD, codec="file", held_bytes=0, working_bytes=tensor.saved_bytes)
    return dataclasses.replace(tensor, option=option)

plan = dataclasses.replace(plan, tensors=tuple(map(moved, plan.tensors)))
"""

FULL = (
    COMMON
    + """
import resource

def step():
    F.cross_entropy(model(x), y).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]

expected = step()
kept = [parameter.grad for parameter in model.parameters()]
weights = [parameter.detach().clone() for parameter in model.parameters()]
session = squeezebox.attach(model, plan=plan)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
for _ in range(2):
    try:
        step()
    except squeezebox.CaptureError as error:
        print(error)
    else:
        raise SystemExit("the disk was not full")
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
assert all(p.grad is g and torch.equal(g, e) for p, g, e in zip(model.parameters(), kept, expected))
assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights))
for parameter in model.parameters():
    parameter.grad = None
assert all(torch.equal(a, b) for a, b in zip(step(), expected))
assert session.report().saved_bytes > 300_000 > session.report().packed_bytes
session.detach()
"""
)

KILLED = (
    COMMON
    + """
session = squeezebox.attach(model, plan=plan)
loss = F.cross_entropy(model(x), y)
print(os.fstat(session.engine.store.spill._file.fileno()).st_size, flush=True)
sys.stdin.read()
"""
)


@pytest.fixture
def folder():
    """The one for temporary files may be in memory."""
    with tempfile.TemporaryDirectory(dir=disk_folder().path) as path:
        yield Path(path)


def environment(folder):
    return {**os.environ, "TMPDIR": str(folder), "KINETO_LOG_LEVEL": "9", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files as Linux does")
def test_a_full_disk_is_explained_and_the_session_goes_on(folder):
    result = subprocess.run(
        [sys.executable, "-c", FULL], capture_output=True, text=True, env=environment(folder), check=False
    )
    assert result.returncode == 0, result.stderr
    messages = result.stdout.splitlines()
    assert len(messages) == 2
    for message in messages:
        assert message.startswith("131072 bytes could not be offloaded") and str(folder) in message
        assert "bytes free" in message and "TMPDIR" in message and "larger budget" in message


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no SIGKILL")
def test_nothing_is_left_on_disk_after_a_kill(folder):
    with subprocess.Popen(
        [sys.executable, "-c", KILLED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(folder),
    ) as process:
        assert int(process.stdout.readline()) > 500_000
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert list(folder.rglob("*")) == []


def open_files(folder):
    """Bytes on disk of every file in the folder that this process has open."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(folder)):
                found.append(os.fstat(int(descriptor)).st_blocks * 512)
        except OSError:  # the listing's own
            continue
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system lists no open files")
@pytest.mark.parametrize("waiting", [False, True])
def test_detach_closes_the_file_though_the_session_lives(folder, monkeypatch, waiting):
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
    x, y = torch.randn(128, 64), torch.randint(10, (128,))
    plan = squeezebox.plan(model, sample=(x, y), loss_fn=F.cross_entropy, exact=True)
    option = Option(action=Action.OFFLOAD, codec="file", held_bytes=0, working_bytes=0)
    tensors = tuple(dataclasses.replace(tensor, option=option) for tensor in plan.tensors)
    sessions = []
    for _ in range(5):
        session = squeezebox.attach(model, plan=dataclasses.replace(plan, tensors=tensors))
        sessions.append(session)
        loss = F.cross_entropy(model(x), y)
        assert sum(open_files(folder)) >= 128 * 256 * 4
        if waiting:
            session.detach()
            loss.backward()
        else:
            loss.backward()
            session.detach()
        del loss
        gc.collect()  # the last tensor that was read is a buffer's
        deadline = time.monotonic() + 30
        while open_files(folder) and time.monotonic() < deadline:  # the disk's threads end by themselves
            time.sleep(0.01)
        assert open_files(folder) == []
