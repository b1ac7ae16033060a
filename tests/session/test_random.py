"""Squeezed training draws the random numbers of plain training."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import squeezebox
from squeezebox.bounds import Fixed
from tests.capture.nets import NETS, images, plain_step, train


class Noting(nn.Module):
    """Dropout behind operators that are probed; keeps its masks."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(16, 10)
        self.masks = []

    def forward(self, x):
        x = torch.nn.functional.gelu(self.norm(self.conv(x))).mean((2, 3))
        self.masks.append(self.drop(torch.ones_like(x)))
        return self.head(x * self.masks[-1])


def masks(**options):
    torch.manual_seed(0)
    model = Noting()
    session = squeezebox.attach(model, **options) if options else None
    for _ in range(4):
        plain_step(model, torch.randn(6, 3, 18, 18))
    if session:
        session.detach()
    return torch.stack(model.masks)


@pytest.mark.parametrize(
    "options",
    [{"exact": True}, {"noise": 1e-2}, {"controller": Fixed(value=0.1)}],
    ids=["exact", "noise", "fixed"],
)
def test_dropout_masks_are_those_of_plain_training(options):
    assert torch.equal(masks(**options), masks())


@pytest.mark.parametrize("name", ["activations", "attention"])
def test_the_random_state_after_training_is_that_of_plain_training(name):
    make, make_input = NETS[name]
    model = make()
    assert torch.equal(train(model, make_input, noise=1e-2).random, train(model, make_input).random)


def test_two_squeezed_runs_are_the_same_to_the_bit():
    model = NETS["activations"][0]()
    one, two = (train(model, images, noise=1e-2) for _ in range(2))
    torch.testing.assert_close(one.gradients, two.gradients, rtol=0, atol=0)


class Drawing(nn.Module):
    """Scales layers by numpy's and Python's random numbers, and has a buffer whose elements are one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
        self.register_buffer("scale", torch.ones(1).expand(8))
        self.register_buffer("mixing", torch.eye(4).to_sparse())

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = (
                torch.sparse.mm(self.mixing, layer(x).relu())
                * self.scale
                * (np.random.rand() if number % 2 else random.random())
            )
        return x


def test_numbers_of_numpy_and_python_are_drawn_once_more_and_put_back():
    model, x = Drawing(), torch.randn(4, 8)
    session = squeezebox.attach(model, exact=True)
    np.random.seed(0)
    random.seed(0)
    for _ in range(5):
        assert session.measure_noise(lambda: model(x).square().sum().backward()) == 0.0
    session.detach()
    drawn = np.random.rand(), random.random()
    np.random.seed(0)
    random.seed(0)
    assert drawn == (np.random.rand(), random.random())
    before = random.getstate()
    squeezebox.plan(model, sample=(x, x), loss_fn=nn.functional.mse_loss, exact=True)
    assert random.getstate() == before
