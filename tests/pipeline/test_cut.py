"""Models cut into pieces: called one after the other, they are the model."""

import pytest
import torch
from torch import nn

from benchmarks import models
from squeezebox import UnsupportedModelError
from squeezebox.pipeline import cut, fingerprint

NETWORKS = {
    "gpt": (
        lambda: models.build("gpt", 50, width=16, depth=3, heads=2, context=8, dropout=0.1),
        lambda: torch.randint(0, 50, (2, 8)),
        7,
    ),
    "resnet18": (lambda: models.build("resnet18", 10), lambda: torch.randn(2, 3, 32, 32), 9),
    "vgg16": (lambda: models.build("vgg16", 10), lambda: torch.randn(1, 3, 32, 32), 14),
    "unet": (lambda: models.build("unet", 2, width=4), lambda: torch.randn(1, 3, 32, 32), 20),
    "sequential": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), nn.Linear(4, 2)),
        lambda: torch.randn(3, 4),
        2,  # what writes in place stays with what it writes into
    ),
}

LARGE = ("vgg16", "resnet18")


def through(pieces, inputs):
    values = (inputs,)
    for piece in pieces:
        values = piece.module(*values)
    return values[0]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else []) for name in NETWORKS]
)
def test_pieces_are_the_model(name, training):
    make, draw, least = NETWORKS[name]
    torch.manual_seed(0)
    model = make().train(training)
    inputs = draw()
    pieces = cut(model, (inputs,))
    assert len(pieces) >= least, [piece.name for piece in pieces]
    assert len({piece.name for piece in pieces}) == len(pieces)
    buffers = {key: value.clone() for key, value in model.named_buffers()}
    torch.manual_seed(1)
    found = through(pieces, inputs)
    found.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    after = {key: value.clone() for key, value in model.named_buffers()}
    model.zero_grad()
    for key, value in model.named_buffers():
        value.copy_(buffers[key])
    torch.manual_seed(1)
    wanted = model(inputs)
    wanted.square().sum().backward()
    assert torch.equal(found, wanted)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(after[key], value) for key, value in model.named_buffers())


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else x


class Several(nn.Module):
    """Takes and returns more than one tensor."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, mask):
        x = self.second(self.first(x)) * mask
        return {"features": x, "output": self.third(x)}


def test_what_cannot_be_traced_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="cannot trace Branching"):
        cut(Branching(), (torch.randn(2, 4),))


def test_several_inputs_and_outputs():
    model, inputs = Several(), (torch.randn(2, 4), torch.ones(2, 4))
    pieces = cut(model, inputs)
    assert len(pieces) > 1
    values = inputs
    for piece in pieces:
        values = piece.module(*values)
    wanted = model(*inputs)
    assert values[0].keys() == wanted.keys()
    assert all(torch.equal(values[0][key], wanted[key]) for key in wanted)


def test_fingerprints_tell_models_apart():
    def of(width):
        torch.manual_seed(width)
        return fingerprint(cut(nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2)), (torch.ones(1, 4),)))

    assert of(3) == of(3) != of(5)
