"""The alarm for memory that grows from step to step: rings for a leak, not for what comes and goes."""

import warnings

import pytest
import torch
from torch import nn

import squeezebox
from squeezebox.schema import MemoryGrowthWarning
from squeezebox.session._growth import Growth

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


def test_a_training_that_keeps_every_graph_is_told(monkeypatch):
    torch.manual_seed(0)
    model, kept = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)), []
    session = squeezebox.attach(model, exact=True)
    with pytest.warns(MemoryGrowthWarning, match="grew from"):
        for _ in range(120):
            output = model(torch.randn(16, 64))
            output.mean().backward()
            kept.append(torch.ones(1024, 1024) + output.detach().mean())  # 4 MiB: this process may be large
    assert any("memory held between steps grew" in note for note in session.report().record.notes)
    assert "grew from" in str(session.report())
    session.detach()
