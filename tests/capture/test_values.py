"""Dtypes, layouts and values that statistics and codecs are not made for: a step goes on, exactly there."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import squeezebox
from squeezebox import codecs
from squeezebox.capture import Onlooker

ROWS = 64  # of 64 elements: large enough to be packed


class Calls(nn.Module):
    """A function of a copy of its input, which nobody else holds."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x.clone())


def gradient(model, x, given):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(model(x), x, given)[0]


def same_to_the_bit(one, other):
    equal = (one == other) & (one.signbit() == other.signbit())
    return bool((equal | (one.isnan() & other.isnan())).all())


def noise_of_steps(model, x, steps=3):
    def step():
        model.zero_grad()
        model(x).square().mean().backward()

    session = squeezebox.attach(model, noise=1e-2)
    try:
        for _ in range(steps):
            step()
        return session.measure_noise(step)
    finally:
        session.detach()


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("padding", ["valid", "same"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions_that_name_their_padding(dims, padding):
    layer = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dims - 1]
    layers = [nn.ReLU(), layer(8, 8, 3, padding=padding), nn.ReLU(), layer(8, 4, 2, padding=padding)]
    model = nn.Sequential(*layers)
    assert 0 < noise_of_steps(model, torch.randn(32, 8, *[9] * dims)) < 3e-2


class OneSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3, 3, 3))

    def forward(self, x):
        return F.max_pool2d(torch.conv2d(x.relu(), self.weight, None, [2], [1], [1]), [2])


def test_one_stride_and_one_dilation_for_all_dims():
    assert 0 < noise_of_steps(OneSize(), torch.randn(8, 3, 16, 16)) < 3e-2


def test_double_precision_is_measured_in_double_precision():
    layers = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)]
    assert 0 < noise_of_steps(nn.Sequential(*layers).double(), torch.randn(ROWS, 64).double()) < 3e-2


class Sparse(nn.Module):
    """Two sparse gradients, and one made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.words = (nn.EmbeddingBag(50, 64, sparse=True), nn.Embedding(50, 64, sparse=True))
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        x = F.relu(self.first(self.bag(x) + self.words(x).sum(1)))
        return F.relu(torch.sparse.mm(x.to_sparse(), self.last.weight))


def test_sparse_gradients():
    model = Sparse()
    assert 0 < noise_of_steps(model, torch.randint(50, (ROWS, 6))) < 3e-2
    assert model.bag.weight.grad.is_sparse


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64, dtype=torch.complex64), nn.Linear(64, 8)

    def forward(self, x):
        return self.last(F.relu(self.first(x.to(torch.complex64)).abs()))


def test_complex_parameters_and_activations():
    assert 0 < noise_of_steps(Complex(), torch.randn(ROWS, 64)) < 3e-2


FLAGGED = {
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "leaky_relu, in place": F.leaky_relu_,
    "leaky_relu of relu": lambda x: F.leaky_relu(F.relu(x)),
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardtanh of one point": lambda x: F.hardtanh(x, 0, 0),
    "hardtanh up to NaN": lambda x: F.hardtanh(x, -1, math.nan),
    "hardtanh from -inf": lambda x: F.hardtanh(x, -math.inf, 1),
    "hardtanh to no bfloat16": lambda x: F.hardtanh(x, -1.001, 0.3333),
}


@pytest.mark.parametrize("numel", [3, 1024, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", FLAGGED)
def test_one_bit_an_element_tells_what_backward_reads(name, dtype, numel):
    info = torch.finfo(dtype)
    odd = [math.nan, math.inf, -math.inf, 0.0, -0.0, info.max, info.min, info.tiny / 2, -1.001, -1, 0.3333, 1]
    for turn in (0, 4, 8):
        x = torch.tensor(odd).to(dtype).roll(turn).repeat(numel // len(odd) + 1)[:numel]
        model, given = Calls(FLAGGED[name]), torch.randn(numel).to(dtype)
        plain = gradient(model, x, given)
        session = squeezebox.attach(model, exact=True)
        session.engine.store.small_bytes = 0
        squeezed = gradient(model, x, given)
        session.detach()
        assert same_to_the_bit(squeezed, plain)


def test_what_is_held_exactly_is_noted_once_with_the_reason():
    model = Calls(F.hardtanh)
    x = torch.full((ROWS, 64), math.nan)
    session = squeezebox.attach(model, exact=True)
    for _ in range(2):
        gradient(model, x, torch.ones_like(x))
    (note,) = session.report().record.notes
    session.detach()
    assert "':Hardtanh.self'" in note and "held exactly" in note and "NaN" in note


class Trying:
    """Packs all that is offered, into an arena of its own."""

    def __init__(self):
        self.errors = []

    def offered(self, row, codec, flat, scale, highest, trial, again):
        arena = codecs.Arena(2 * flat.nbytes, flat.device)
        packed = trial("blocks", 0.1, arena=arena)
        assert packed.payload[0] is arena.words
        self.errors.append(float((codecs.get(codec).unpack(packed) - flat).abs().max()))


def test_trials_may_have_an_arena_of_their_own():
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    session = squeezebox.attach(model, noise=1e-3, codec="blocks")
    for _ in range(3):
        model(torch.randn(512, 16)).square().mean().backward()
    trying = Trying()
    with session.engine.store.shown_to(Onlooker(offered=trying.offered)):
        model(torch.randn(512, 16)).square().mean().backward()
    session.detach()
    assert trying.errors and max(trying.errors) <= 0.1
