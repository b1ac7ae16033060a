"""A session whose kernels come while it trains: from then on as one that begins there."""

import copy

import pytest
import torch
from torch.nn import functional as F

import squeezebox
from squeezebox import codecs
from tests.capture.nets import NETS, images, plain_step

BEGUN = 7  # the first step with kernels


class Kernels:
    """Whether those of float32 and of float64 are there."""

    def __init__(self):
        self.there = set()

    def ready(self, dtype):
        """As codecs.ready: only float64 has kernels of its own."""
        return (dtype if dtype == torch.float64 else torch.float32) in self.there


@pytest.fixture
def kernels(monkeypatch):
    found = Kernels()
    monkeypatch.setattr(codecs, "ready", found.ready)
    return found


class Run:
    """A model in training; ``bounds`` are those of each step."""

    def __init__(self, model, step=plain_step):
        self.model, self.step, self.bounds, self.losses = model, step, [], []
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.session = None

    def attach(self, **options):
        self.session = squeezebox.attach(self.model, optimizer=self.optimizer, **options)
        return self

    def steps(self, first, last):
        for number in range(first, last):
            torch.manual_seed(number)
            self.optimizer.zero_grad()
            self.losses.append(self.step(self.model, images()).item())
            self.optimizer.step()
            if self.session is not None:
                tensors = self.session.report().record.tensors
                self.bounds.append({each.key: each.bound for each in tensors if each.bound})
        return self


@pytest.fixture
def made():
    model = NETS["activations"][0]()
    return lambda: copy.deepcopy(model)


def test_bounds_are_those_of_a_session_that_begins_then(kernels, made):
    late = Run(made()).attach(noise=1e-2).steps(0, BEGUN)
    kernels.there.add(torch.float32)
    late.steps(BEGUN, BEGUN + 20)
    begun = Run(made()).steps(0, BEGUN).attach(noise=1e-2)
    begun.session.load_state_dict(begun.session.state_dict() | {"step": BEGUN - 1, "first": BEGUN})
    begun.steps(BEGUN, BEGUN + 20)
    assert not any(late.bounds[:BEGUN]) and all(late.bounds[BEGUN:])
    assert late.bounds[BEGUN:] == begun.bounds and late.losses == begun.losses
    assert late.session.report().record.notes[-1].startswith(f"{BEGUN} steps held tensors exactly")


@pytest.mark.parametrize("options", [{"noise": 1e-2}, {"exact": True}], ids=["noise", "exact"])
def test_peaks_are_of_steps_with_kernels(kernels, made, options):
    late = Run(made()).attach(**options).steps(0, BEGUN)
    before = late.session.report().record.peak_bytes
    kernels.there.add(torch.float32)
    peak = late.steps(BEGUN, BEGUN + 20).session.report().record.peak_bytes
    begun = Run(made()).attach(**options).steps(0, 20)
    assert peak == pytest.approx(begun.session.report().record.peak_bytes, rel=0.02) and peak < 0.95 * before


def test_a_resumed_session_goes_on_in_the_schedule(kernels, made):
    late = Run(made()).attach(noise=1e-2).steps(0, BEGUN)
    kernels.there.add(torch.float32)
    late.steps(BEGUN, BEGUN + 18)  # the 19th step gathers no statistics
    state, model = late.session.state_dict(), copy.deepcopy(late.model)
    late.steps(BEGUN + 18, BEGUN + 22)
    resumed = Run(model).attach(noise=1e-2)
    resumed.session.load_state_dict(state)
    resumed.steps(BEGUN + 18, BEGUN + 22)
    assert resumed.bounds == late.bounds[-4:] and resumed.losses == late.losses[-4:]


class Twofold(torch.nn.Module):
    """One layer computes in float64, and all have float32 weights."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)

    def forward(self, x):
        x = F.silu(self.first(x)).double()
        return F.silu(F.linear(x, self.second.weight.double())).sum()


def test_every_step_that_packs_is_measured_until_all_can(kernels):
    kernels.there.add(torch.float32)

    def step(model, _):
        loss = model(torch.randn(64, 256))
        loss.backward()
        return loss

    run = Run(Twofold(), step).attach(noise=1e-2).steps(0, 30)
    assert run.session.engine.policy.state.updates == 30
    kernels.there.add(torch.float64)
    run.steps(30, 50)
    assert run.session.engine.policy.state.updates == 47  # the first 17 of 20
    assert len(run.bounds[-1]) > len(run.bounds[0]) > 0


def test_forwards_without_a_backward_delay_nothing(kernels, made):
    late = Run(made()).attach(noise=1e-2).steps(0, 2)
    for _ in range(30):
        late.model(images())
    kernels.there.add(torch.float32)
    assert all(late.steps(2, 4).bounds[2:])
    assert late.session.engine.policy.state.updates == 2
