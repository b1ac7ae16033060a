"""Plans that differ by less than the clock count as equally fast."""

from dataclasses import replace

import torch
from torch import nn

from squeezebox.planning._plans import planned
from squeezebox.planning._profiles import profile_step
from squeezebox.steps import TrainingStep


def test_the_frontier_leaves_out_what_gains_less_than_the_clock():
    torch.manual_seed(0)
    layers = [each for _ in range(4) for each in (nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))]
    model, sample = nn.Sequential(*layers), (torch.randn(256, 128), torch.randn(256, 128))
    seen = profile_step(
        TrainingStep(model=model, sample=sample, loss_fn=nn.functional.mse_loss, optimizer=None, noise=1e-2)
    )
    assert seen.clock_seconds >= 0.0

    def points(clock):
        chosen = replace(seen, clock_seconds=clock)
        return planned(model, chosen, None, 1e-2, 256, frontier=True).frontier

    every = points(0.0)
    gains = [one.seconds - two.seconds for one, two in zip(every, every[1:], strict=False)]
    assert len(every) > 1 and min(gains) > 0.0
    assert points(0.5 * min(gains)) == every
    assert 1 <= len(points(1.01 * max(gains))) < len(every)
    assert points(1e9) == every[:1]
