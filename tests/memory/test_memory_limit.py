"""A step that moves its tensors to a file, under a limit of the system's that counts the page cache too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20
LIMIT = 320 * MIB
FILES = (  # of a control group, version 1 and 2: the limit, and the most that was taken
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max", "memory.peak"),
)

STEPS = """
import sys
import torch
from torch import nn
import squeezebox
from squeezebox.schema import Action, Option

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(*[layer for _ in range(16) for layer in (nn.Linear(1024, 1024, bias=False), nn.GELU())])
x = torch.randn(4096, 1024)

def step():
    model.zero_grad()
    model(x).square().mean().backward()
    return float(sum(p.grad.double().abs().sum() for p in model.parameters()))

saved = []
with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
    plain = step()
session = squeezebox.attach(model, exact=True)
session.engine.store.planned = lambda key: Option(action=Action.OFFLOAD, held_bytes=0)
with open(sys.argv[1] + "/cgroup.procs", "w") as group:
    group.write("0")  # what is taken from now on counts
assert all(step() == plain for _ in range(3))
assert sum(row.saved_bytes for row in session.report().tensors if row.codec == "offload") >= 400 * 2**20
session.detach()
"""


@pytest.fixture
def group():
    """A group of its own and the file with the most that it took; root can make one."""
    for root, limit, peak in FILES:
        folder = root / f"squeezebox-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / limit).write_text(str(LIMIT))
        except OSError:
            folder.rmdir()
            continue
        yield folder, folder / peak
        folder.rmdir()
        return
    pytest.skip("no control group of memory can be made here")


@pytest.mark.slow
def test_moved_tensors_are_in_no_memory(group):
    folder, peak = group
    ended = subprocess.run([sys.executable, "-c", STEPS, str(folder)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert 16 * MIB < int(peak.read_text()) <= LIMIT


ROOM = """
import sys
import torch
from squeezebox.memory import free_bytes

with open(sys.argv[1] + "/cgroup.procs", "w") as group:
    group.write("0")
before = free_bytes(torch.device("cpu"))
held = torch.ones(16 * 2**20)
print(before, before - free_bytes(torch.device("cpu")))
"""


@pytest.mark.parametrize("inner", [False, True])
def test_what_a_group_leaves_is_what_is_free(group, inner):
    """In it, and in a group within it that has no limit of its own."""
    folder = group[0] / "inner" if inner else group[0]
    folder.mkdir(exist_ok=True)
    try:
        ended = subprocess.run([sys.executable, "-c", ROOM, str(folder)], capture_output=True, text=True)
    finally:
        if inner:
            folder.rmdir()
    free, taken = map(int, ended.stdout.split())
    assert LIMIT - 16 * MIB < free <= LIMIT and 60 * MIB < taken < 80 * MIB
