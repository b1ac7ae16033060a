"""A plan's training where the system lets a process take little more than the plan's peak."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of data are Linux's")

TRAINING = """
import gc
import resource
import sys

import torch
from torch import nn

import squeezebox

torch.manual_seed(0)
block = lambda: (nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.Tanh())
layers = [each for _ in range(8) for each in block()]
model, x = nn.Sequential(*layers), torch.randn(1024, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def loss_fn(output, target):
    return output.square().mean()


plan = squeezebox.plan(model, optimizer=optimizer, sample=(x, x), loss_fn=loss_fn, budget="50%", exact=True,
                       offload=False)
model(x[:64]).mean().backward()
optimizer.zero_grad()
gc.collect()
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData:")) * 1024
room = float(sys.argv[1]) * plan.predicted_peak_bytes
resource.setrlimit(resource.RLIMIT_DATA, (int(used + room), resource.RLIM_INFINITY))
session = squeezebox.attach(model, optimizer=optimizer, plan=plan)
for _ in range(6):
    optimizer.zero_grad()
    loss_fn(model(x), x).backward()
    optimizer.step()
print("returned" if "go back to the system at once" in str(session.report()) else "kept")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("share", "freed"), [(1.2, "returned"), (20.0, "kept")])
def test_freed_blocks_go_back_where_a_process_may_take_little_more_than_the_peak(share, freed):
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, str(share)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{freed}\n"), done.stderr
