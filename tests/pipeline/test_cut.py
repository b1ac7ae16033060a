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


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x), x


class OfPair(Two):
    def forward(self, pair):
        return self.linear(pair[0]) * pair[1]


class OfTwo(Two):
    def forward(self, x, y):
        return self.linear(x) * y


class Other(Two):
    """Returns what cannot cross."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return self.kind([("x", self.linear(x))]) if self.kind is dict else self.kind([self.linear(x)])


def _hooked(model, which):
    module = model if which is None else model[which]
    module.register_forward_hook(lambda _, inputs, output: output * 3)
    return model


def _linear():
    return nn.Linear(4, 4)


def _shared(shared):
    return nn.Sequential(_linear(), shared, _linear(), shared, _linear())


SEQUENTIALS = {
    "one activation twice": (lambda: _shared(nn.Tanh()), 5),
    "one layer twice": (lambda: _shared(_linear()), 5),
    "a block with a forward of its own": (
        lambda: nn.Sequential(_linear(), Residual(_linear(), nn.Tanh()), nn.Sequential(_linear(), nn.Tanh())),
        4,
    ),
    "the whole with a forward of its own": (lambda: Residual(_linear(), nn.Tanh(), _linear()), 2),
    "a block with a hook": (
        lambda: _hooked(nn.Sequential(_linear(), nn.Sequential(_linear(), nn.Tanh()), _linear()), 1),
        3,
    ),
    "the whole with a hook": (lambda: _hooked(nn.Sequential(_linear(), nn.Tanh(), _linear()), None), 2),
    "a pair as one argument": (lambda: nn.Sequential(Two(), OfPair()), 2),
    "a pair in the end": (lambda: nn.Sequential(_linear(), Two()), 2),
    "a dict in the end": (lambda: nn.Sequential(_linear(), Other(dict)), 2),
}


@pytest.mark.parametrize("name", SEQUENTIALS)
def test_a_sequential_stays_the_model_that_it_is(name):
    make, count = SEQUENTIALS[name]
    torch.manual_seed(0)
    model, inputs = make(), torch.randn(3, 4)
    pieces = cut(model, (inputs,))
    assert len({piece.name for piece in pieces}) == len(pieces) == count
    torch.testing.assert_close(through(pieces, inputs), model(inputs), rtol=0, atol=0)


def test_a_child_may_need_each_tensor_of_a_tuple_as_an_argument():
    first, second, inputs = Two(), OfTwo(), torch.randn(3, 4)
    assert torch.equal(through(cut(nn.Sequential(first, second), (inputs,)), inputs), second(*first(inputs)))


@pytest.mark.parametrize(("kind", "what"), [(dict, "a dict"), (tuple, "a tuple of 1")])
def test_what_cannot_cross_is_refused_by_name(kind, what):
    inputs = torch.randn(3, 4)
    with pytest.raises(UnsupportedModelError, match=f"^Other in an nn.Sequential returns {what}, and only"):
        through(cut(nn.Sequential(Other(kind), _linear()), (inputs,)), inputs)


def test_what_cannot_be_traced_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="cannot trace Branching"):
        cut(Branching(), (torch.randn(2, 4),))


def test_a_backward_hook_that_export_would_leave_out_is_refused():
    model = Several()
    model.second.register_full_backward_hook(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="^second has a backward hook"):
        cut(model, (torch.randn(2, 4), torch.ones(2, 4)))


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


class Partial(Several):
    """Returns what is no tensor next to one, as a loss without targets."""

    def forward(self, x):
        return self.third(self.second(self.first(x))), None, 2


def test_outputs_that_are_no_tensors_come_as_they_are():
    model, inputs = Partial(), torch.randn(2, 4)
    pieces = cut(model, (inputs,))
    assert len(pieces) > 1
    output, *others = through(pieces, inputs)
    assert torch.equal(output, model(inputs)[0]) and others == [None, 2]


def test_fingerprints_tell_models_apart():
    def of(width):
        torch.manual_seed(width)
        return fingerprint(cut(nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2)), (torch.ones(1, 4),)))

    assert of(3) == of(3) != of(5)


class Filled(nn.Module):
    """Constants that its forward fills through views, and a sum in place through one."""

    def __init__(self):
        super().__init__()
        self.blocks, self.place = (
            nn.ModuleList(nn.Linear(8, 8) for _ in range(6)),
            nn.Parameter(torch.randn(4, 8)),
        )

    def forward(self, x):
        scale, mask = torch.ones(8), torch.ones(2, 4, 8)
        scale[:4] = 0.5
        mask.transpose(0, 1)[1:3].mul_(0.25)
        scale.chunk(2)[1].mul_(2.0)
        for number, block in enumerate(self.blocks):
            x = block(x * scale * mask).tanh()
            if number == 2:
                x = x.flatten(1).unflatten(1, (4, 8))
                x += self.place
        return x


def test_constants_that_are_filled_stay_filled_and_sums_in_place_have_what_they_write_into():
    torch.manual_seed(0)
    model, x = Filled(), torch.randn(2, 4, 8)
    pieces = cut(model, (x,))
    assert len(pieces) > 3
    assert torch.equal(through(pieces, x), model(x))
    for piece in pieces:  # as a stage begins: with a leaf
        x = piece.module(*([x] if isinstance(x, torch.Tensor) else x))
        x = tuple(
            each.detach().requires_grad_(each.requires_grad) for each in (x if isinstance(x, tuple) else (x,))
        )
