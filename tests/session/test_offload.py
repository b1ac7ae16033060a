"""A full disk ends a step and nothing else; nothing is left on disk, however the process ends."""

import os
import signal
import subprocess
import sys

import pytest

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
for _ in range(2):
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
    for parameter, gradient in zip(model.parameters(), kept):
        parameter.grad = gradient
session.detach()
"""
)

KILLED = (
    COMMON
    + """
session = squeezebox.attach(model, plan=plan)
loss = F.cross_entropy(model(x), y)
print(os.fstat(session._store.spill._file.fileno()).st_size, flush=True)
sys.stdin.read()
"""
)


def environment(folder):
    return {**os.environ, "TMPDIR": str(folder), "KINETO_LOG_LEVEL": "9", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files as Linux does")
def test_a_full_disk_is_explained_and_the_session_goes_on(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", FULL], capture_output=True, text=True, env=environment(tmp_path), check=False
    )
    assert result.returncode == 0, result.stderr
    messages = result.stdout.splitlines()
    assert len(messages) == 4
    for message in messages:
        assert message.startswith("131072 bytes could not be offloaded") and str(tmp_path) in message
        assert "bytes free" in message and "TMPDIR" in message and "larger budget" in message


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no SIGKILL")
def test_nothing_is_left_on_disk_after_a_kill(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", KILLED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(tmp_path),
    ) as process:
        assert int(process.stdout.readline()) > 500_000
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert list(tmp_path.rglob("*")) == []
