"""Doubles, complex numbers, channels last and sparse tensors at every door: works, or one sentence."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import squeezebox
from squeezebox.schema import SqueezeboxError
from squeezebox.streaming import StreamedStep

ROWS, WIDTH = 16, 64


class Sparse(nn.Module):
    """Two sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.words = nn.EmbeddingBag(50, WIDTH, sparse=True), nn.Embedding(50, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return F.relu(self.head(self.bag(x) + self.words(x).sum(1)))


class MadeSparse(nn.Module):
    """An intermediate that becomes sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(torch.sparse.mm(F.relu(self.first(x)).to_sparse(), self.last.weight))


class SparseGraph(nn.Module):
    """A sparse buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.eye(WIDTH).to_sparse())
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(torch.sparse.mm(self.edges, F.relu(self.first(x)).T).T)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.complex64)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(F.relu(self.first(x.to(torch.complex64)).abs()))


def convolutions():
    layers = [nn.Conv2d(3, 8, 3, padding="same"), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.GELU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def images():
    return torch.randn(ROWS, 3, 16, 16)


KINDS = {
    "float64": (lambda: convolutions().double(), lambda: images().double()),
    "channels last": (
        lambda: convolutions().to(memory_format=torch.channels_last),
        lambda: images().to(memory_format=torch.channels_last),
    ),
    "sparse gradients": (Sparse, lambda: torch.randint(50, (ROWS, 6))),
    "made sparse": (MadeSparse, lambda: torch.randn(ROWS, WIDTH)),
    "sparse buffer": (SparseGraph, lambda: torch.randn(ROWS, WIDTH)),
    "complex64": (Complex, lambda: torch.randn(ROWS, WIDTH)),
}


def loss_fn(output, target):
    return (output - target).square().mean()


def attached(model, x, target, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session = squeezebox.attach(model, optimizer=optimizer, **options)
    for _ in range(3):
        optimizer.zero_grad()
        loss_fn(model(x), target).backward()
        optimizer.step()
    noise = session.measure_noise(lambda: loss_fn(model(x), target).backward())
    session.detach()
    return noise


def stepped(model, x, target):
    StreamedStep(model, loss_fn, height=8)(x, target)


def compiled(model, x, target):
    step = squeezebox.compile(model, noise=1e-2, sample=(x, target), loss_fn=loss_fn)
    loss_fn(step(x), target).backward()


def planned(model, x, target, **options):
    plan = squeezebox.plan(model, sample=(x, target), loss_fn=loss_fn, **options)
    assert plan.predicted_peak_bytes <= plan.plain_peak_bytes


DOORS = {
    "attach, noise": lambda *step: attached(*step, noise=1e-2) < 3e-2,
    "attach, exact": lambda *step: attached(*step, exact=True) == 0.0,
    "plan": lambda *step: planned(*step, noise=1e-2),
    "plan, exact": lambda *step: planned(*step, exact=True),
    "estimate": lambda m, x, t: squeezebox.estimate(m, sample=(x, t), loss_fn=loss_fn),
    "rewrite": lambda m, x, t: squeezebox.rewrite(m, sample=(x, t), loss_fn=loss_fn),
    "max_batch": lambda m, x, t: squeezebox.max_batch(
        m, sample=(x, t), loss_fn=loss_fn, budget="150%", noise=1e-2
    ),
    "find_batch": lambda m, x, t: squeezebox.find_batch(
        m, sample=(x, t), loss_fn=loss_fn, memory="64MiB", exact=True
    ),
    "compile": compiled,
    "StreamedStep": stepped,
}
SLOW = {"compile": pytest.mark.slow, "find_batch": pytest.mark.slow}
MAY_REFUSE = ("compile", "StreamedStep")  # what they cannot trace


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize("door", [pytest.param(each, marks=SLOW.get(each, ())) for each in DOORS])
@pytest.mark.parametrize("kind", KINDS)
def test_it_works_or_is_refused_in_one_sentence(kind, door):
    make, make_input = KINDS[kind]
    model, x = make(), make_input()
    with torch.no_grad():
        target = torch.zeros_like(model(x))
    try:
        assert DOORS[door](model, x, target) is not False
    except SqueezeboxError as error:
        assert door in MAY_REFUSE, error
        assert len(str(error)) > 40
