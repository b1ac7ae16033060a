"""A model that checkpoints layers itself: no noise where it would win no peak."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import squeezebox

STEPS = 6


class Layers(nn.Module):
    """An input layer, residual layers of which some are checkpointed, and a head."""

    def __init__(self, reentrant, checkpointed=4):
        super().__init__()
        make = lambda: nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))  # noqa: E731
        self.first, self.layers = nn.Linear(16, 64), nn.ModuleList(make() for _ in range(4))
        self.head = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 10))
        self.reentrant, self.checkpointed = reentrant, checkpointed

    def forward(self, x):
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            if number < self.checkpointed:
                x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
            else:
                x = x + layer(x)
        return self.head(x)


def trained(model, steps=STEPS, **options):
    """The session and its closure after a few steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = squeezebox.attach(model, optimizer=optimizer, **options)
    images, labels = torch.randn(512, 16), torch.randint(10, (512,))

    def closure():
        nn.functional.cross_entropy(model(images), labels).backward()

    for _ in range(steps):
        optimizer.zero_grad()
        closure()
        optimizer.step()
    return session, closure


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_wins_no_peak_is_held_exactly(reentrant):
    torch.manual_seed(0)
    session, closure = trained(Layers(reentrant), noise=1e-2)
    assert session.measure_noise(closure) == 0.0
    assert session.report().record.predicted_noise == 0.0
    session.detach()


@pytest.mark.parametrize("reentrant", [False, True])
def test_many_layers_behind_the_last_region_are_packed(reentrant):
    torch.manual_seed(0)
    session, closure = trained(Layers(reentrant, checkpointed=1), noise=1e-2)
    record = session.report().record
    assert record.packed_bytes < 0.5 * record.saved_bytes
    assert session.measure_noise(closure) > 1e-3
    session.detach()


@pytest.mark.parametrize("reentrant", [False, True])
def test_statistics_make_no_region_again(reentrant):
    peaks = []
    for options in ({"exact": True}, {"noise": 1e-2}):
        torch.manual_seed(0)
        session, _ = trained(Layers(reentrant), steps=18, **options)
        record = session.report().record
        peaks.append(record.refresh_peak_bytes or record.peak_bytes)
        session.detach()
    assert peaks[1] < 1.35 * peaks[0]  # a second gradient is on its way, and no second region


@pytest.mark.parametrize("reentrant", [False, True])
def test_resuming_goes_on_as_before(reentrant):
    found = []
    for resumed in (False, True):
        torch.manual_seed(0)
        session, closure = trained(Layers(reentrant), steps=3, noise=1e-2)
        if resumed:
            state, model = session.state_dict(), session.engine.model
            session.detach()
            session = squeezebox.attach(model, noise=1e-2)
            session.load_state_dict(state)
        closure()
        found.append([each.grad.clone() for each in session.engine.model.parameters()])
        session.detach()
    assert all(map(torch.equal, *found))
