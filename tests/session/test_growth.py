"""The alarm for memory that grows from step to step: rings for a leak, not for what comes and goes."""

import subprocess
import sys
import warnings

import pytest

from squeezebox.schema import MemoryGrowthWarning
from squeezebox.session._records import Growth

MIB = 2**20


def observed(sizes):
    growth = Growth(notes={})
    for nbytes in sizes:
        growth.observe(nbytes)
    return growth


def test_a_steady_rise_is_told_once_with_its_numbers():
    with pytest.warns(
        MemoryGrowthWarning, match=r"from 100.00 MiB to 164.00 MiB in 64 steps, 1.00 MiB"
    ) as found:
        growth = observed(100 * MIB + step * MIB for step in range(200))
    assert len(found) == 1 and list(growth.notes) == [str(found[0].message)]


@pytest.mark.parametrize(
    "sizes",
    [
        [100 * MIB + step % 40 * MIB for step in range(400)],
        [(100 + 200 * (step > 30)) * MIB for step in range(400)],
        [1000 * MIB + step * MIB // 2 for step in range(79)],
        [2000 * MIB + step * MIB for step in range(90)],
        [None] * 400,
    ],
    ids=["comes and goes", "one jump", "too short", "a small share", "unknown"],
)
def test_anything_else_is_not(sizes):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not observed(sizes).notes


LEAKING = """
import torch
from torch import nn
import squeezebox

model, kept = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)), []
session = squeezebox.attach(model, exact=True)
for _ in range(120):
    output = model(torch.randn(16, 64))
    output.mean().backward()
    kept.append(torch.ones(1024, 1024) + output.detach().mean())
print(session.report())
"""


@pytest.mark.slow
def test_a_training_that_keeps_tensors_is_told():  # in a process of its own: another's free heap hides growth
    told = subprocess.run([sys.executable, "-c", LEAKING], capture_output=True, text=True, check=True)
    assert "MemoryGrowthWarning: memory held between steps grew from" in told.stderr
    assert "memory held between steps grew" in told.stdout
