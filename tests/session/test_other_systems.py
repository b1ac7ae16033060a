"""Plans and streaming where the system lacks what Windows lacks: exact as ever, and nothing is in a file."""

import subprocess
import sys

import pytest

HIDDEN = """
import os, sys
for name in ("fork", "register_at_fork", "preadv", "pwritev", "pread", "pwrite", "posix_fallocate",
             "posix_fadvise", "fdatasync", "sysconf", "nice", "sched_getaffinity"):
    if hasattr(os, name):
        delattr(os, name)
sys.modules["fcntl"] = sys.modules["resource"] = None
import mmap
del mmap.MAP_PRIVATE, mmap.MAP_ANONYMOUS, mmap.MADV_DONTNEED
import numpy as np
import torch
from torch import nn
import squeezebox
torch.manual_seed(0)
"""
PLANNED = """
def trained(plan):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(512, 64), torch.randint(8, (512,))
    loss_fn = nn.functional.cross_entropy
    session = None
    if plan:
        found = squeezebox.plan(
            model, optimizer=optimizer, sample=(x, y), loss_fn=loss_fn, budget="75%", states=True, exact=True
        )
        assert found.offload is None
        session = squeezebox.attach(model, optimizer=optimizer, plan=found)
    for _ in range(3):
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
    if plan:
        assert session.report().peak_bytes <= found.budget_bytes
        session.detach()
    return torch.cat([each.detach().flatten() for each in model.parameters()])
assert torch.equal(trained(False), trained(True))
"""
PACKED = """
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
session = squeezebox.attach(model, noise=1e-3)
for _ in range(3):
    model(torch.randn(512, 64)).square().mean().backward()
assert session.report().record.packed_bytes < session.report().record.saved_bytes
session.detach()
"""
STREAMED = """
pixels = np.lib.format.open_memmap(sys.argv[1], "w+", np.float32, (1, 3, 128, 32))
pixels[:] = 0.5
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
step = squeezebox.streaming.StreamedStep(model, nn.functional.cross_entropy, memory="1MiB")
label = torch.tensor([1])
wanted = nn.functional.cross_entropy(model(torch.from_numpy(pixels)), label)
assert torch.allclose(step(pixels, label), wanted)
"""


@pytest.mark.parametrize("work", [PLANNED, PACKED, STREAMED], ids=["planned", "packed", "streamed"])
def test_what_windows_lacks_is_done_without(work, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN + work, str(tmp_path / "pixels.npy")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
