"""Sessions and streaming where the system lacks what Windows lacks, and plans, which are refused."""

import subprocess
import sys

import pytest

HIDDEN = """
import mmap, os, sys
import numba
import numpy as np
import torch
from torch import nn
for name in ("fork", "register_at_fork", "preadv", "pwritev", "pread", "pwrite", "posix_fallocate",
             "posix_fadvise", "fdatasync", "nice", "sched_getaffinity", "sysconf"):
    delattr(os, name)
for name in ("MAP_PRIVATE", "MAP_ANONYMOUS", "MADV_DONTNEED"):
    delattr(mmap, name)
sys.modules["fcntl"] = sys.modules["resource"] = None
import squeezebox
torch.manual_seed(0)
"""
PLANNED = """
model, x = nn.Linear(64, 8), torch.randn(512, 64)
try:
    squeezebox.plan(model, sample=(x, x[:, :8]), loss_fn=nn.functional.mse_loss, exact=True)
except squeezebox.OptionError as error:
    assert "in Windows' WSL" in str(error)
else:
    raise AssertionError("no refusal")
"""
PACKED = """
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
session = squeezebox.attach(model, noise=1e-3)
for _ in range(3):
    model(torch.randn(512, 64)).square().mean().backward()
assert session.report().record.packed_bytes < session.report().record.saved_bytes
session.detach()
"""
STAGED = """
from squeezebox.memory import Staging
Staging(None)  # as for a model on CUDA
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


@pytest.mark.parametrize(
    "work", [PLANNED, PACKED, STAGED, STREAMED], ids=["planned", "packed", "staged", "streamed"]
)
def test_what_windows_lacks_is_done_without(work, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN + work, str(tmp_path / "pixels.npy")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
