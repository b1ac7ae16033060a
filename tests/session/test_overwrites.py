"""Saved tensors that are overwritten through ``.data`` are found, and correct models cause no alarm."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import squeezebox
from squeezebox.schema import Waste
from tests.capture import nets


class Bayesian(nn.Module):
    """Draws its noise into a buffer, as bayesian-torch and blitz do."""

    def __init__(self, safe=False, size=64):
        super().__init__()
        self.mu = nn.Parameter(torch.randn(size, 64) / 8)
        self.rho = nn.Parameter(torch.full((size, 64), -1.0))
        self.register_buffer("eps", torch.zeros(size, 64))
        self.safe = safe

    def forward(self, x):
        eps = torch.empty_like(self.eps) if self.safe else self.eps
        eps.data.normal_()
        return F.linear(x, self.mu + F.softplus(self.rho) * eps)


LINE = Bayesian.forward.__code__.co_firstlineno + 3


def network(safe=False, size=64):
    torch.manual_seed(0)
    return nn.Sequential(Bayesian(safe, size), nn.Tanh())


def step(model):
    torch.manual_seed(1)
    model.zero_grad()
    x = torch.randn(16, 64)
    sum(model(x).square().mean() for _ in range(3)).backward()


@pytest.mark.parametrize("size", [8, 64])  # small tensors, too
@pytest.mark.parametrize("options", [{"exact": True}, {"noise": 1e-3}], ids=str)
def test_an_overwritten_tensor_is_named(options, size):
    model = network(size=size)
    session = squeezebox.attach(model, checks=True, **options)
    message = rf"Mul saved in module '0' at .*overwrites\.py:{LINE} "
    with pytest.raises(squeezebox.CaptureError, match=message):
        step(model)
    session.detach()
    step(model)


def test_the_doctor_names_it():
    model = network()
    found = [each for each in squeezebox.check_step(lambda: step(model)).findings if each.seconds == 0.0]
    assert [(each.waste, each.operator, each.line, each.count) for each in found] == [
        (Waste.OVERWRITTEN, "Mul", LINE, 2)
    ]
    assert found[0].modules == ("0",)
    assert "overwritten before backward" in str(squeezebox.check_step(lambda: step(model)))


def silent(model, run):
    session = squeezebox.attach(model, exact=True, checks=True)
    run()
    session.detach()
    run()
    checked = squeezebox.check_step(run)
    assert not [each for each in checked.findings if each.waste is Waste.OVERWRITTEN]


def test_noise_of_its_own_is_no_alarm():
    model = network(safe=True)
    silent(model, lambda: step(model))


def test_running_statistics_are_no_alarm():
    """They change with each forward, and no backward in training reads them."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    x = torch.randn(4, 3, 16, 16)
    silent(model, lambda: (model(x).sum() + model(2 * x).sum()).backward())


def test_a_workspace_is_no_alarm():
    """An LSTM's backward writes in it, and statistics of a step run it twice."""
    tokens = torch.randint(99, (4, 32))
    model = nn.Sequential(nn.Embedding(99, 32), nn.LSTM(32, 32, 2, batch_first=True))
    session = squeezebox.attach(model, noise=1e-2, checks=True)
    for _ in range(3):
        sum(model(tokens)[0].square().mean() for _ in range(2)).backward()
    session.detach()


def test_statistics_that_are_read_are_an_alarm():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
    session = squeezebox.attach(model, exact=True, checks=True)
    loss = model(torch.randn(4, 3, 16, 16)).square().sum()
    model[1].running_var.data.mul_(2)
    with pytest.raises(squeezebox.CaptureError, match="BatchNorm"):
        loss.backward()
    session.detach()


def test_a_session_within_a_checked_step_goes_on():
    model = network(safe=True)
    session = squeezebox.attach(model, exact=True)
    assert not [each for each in squeezebox.check_step(lambda: step(model)).findings if each.seconds == 0.0]
    assert session.report().saved_bytes > 0
    session.detach()


@pytest.mark.parametrize("name", nets.NETS)
def test_plain_networks_are_no_alarm(name):
    make, x = nets.NETS[name][:2]
    model = make()
    session = squeezebox.attach(model, exact=True, checks=True)
    for _ in range(2):
        nets.plain_step(model, x())
    session.detach()
