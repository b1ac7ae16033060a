"""What a CUDA device does otherwise than a CPU; where there is none, nothing here runs."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import squeezebox
from benchmarks import models
from squeezebox.memory import Recording
from squeezebox.schema import OptionError, UnsupportedModelError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
DEVICE = torch.device("cuda:0")
MIB = 1 << 20


def convolutions(width=64):
    torch.manual_seed(0)
    layers = []
    for before, after in itertools.pairwise((3, width, width, 2 * width)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    head = [nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10)]
    return nn.Sequential(*layers, *head).to(DEVICE)


def images(count=32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, 64, 64, generator=generator)
    return x.to(DEVICE), torch.randint(10, (count,), generator=generator).to(DEVICE)


def attention():
    torch.manual_seed(0)
    return models.build("gpt", 256, width=256, depth=4, heads=4, context=128).to(DEVICE)


def tokens(count=16):
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(256, (count, 128), generator=generator) for _ in range(2))
    return x.to(DEVICE), y.to(DEVICE)


def loss_of(output, target):
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def trained(model, optimizer, x, y, steps=3):
    """Losses, and the most that the allocator gave in the last step."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        torch.cuda.reset_peak_memory_stats(DEVICE)
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cuda.max_memory_allocated(DEVICE)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def test_frees_outside_of_operators_are_seen():
    recording = Recording(DEVICE)
    assert recording.start()
    recording.mark("begins")
    x = torch.empty(MIB, dtype=torch.uint8, device=DEVICE)
    address = x.data_ptr()
    recording.mark("is there")
    del x
    recording.mark("is gone")
    found = [event for event in recording.events() if event[0] or event[1] == address]
    assert found == [
        ("begins", 0, 0),
        ("", address, MIB),
        ("is there", 0, 0),
        ("", address, -MIB),
        ("is gone", 0, 0),
    ]


@pytest.mark.parametrize(("make", "sample"), [(convolutions, images), (attention, tokens)])
@pytest.mark.parametrize("budget", ("85%", "75%"))
@pytest.mark.filterwarnings("ignore:.*deterministic")
def test_an_exact_plan_is_equal_to_the_bit_and_keeps_its_budget(make, sample, budget, deterministic):
    x, y = sample()
    plain = make()
    expected, _ = trained(plain, torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9), x, y)
    del plain
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    plan = squeezebox.plan(
        model, optimizer=optimizer, sample=(x, y), loss_fn=loss_of, budget=budget, exact=True
    )
    session = squeezebox.attach(model, optimizer=optimizer, plan=plan)
    losses, peak = trained(model, optimizer, x, y)
    session.detach()
    assert losses == expected
    assert peak <= 1.03 * plan.budget_bytes


def test_rows_without_a_positive_value_come_back_compiled():
    model, (x, y) = convolutions(), images()
    loss_of(model(x), y).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss_of(squeezebox.compile(model, bits=4)(x), y).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert (parameter.grad - gradient).norm() <= gradient.norm()  # NaN is not


def test_strips_give_the_whole_images_gradients():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 2, 3, padding=1)
    model = nn.Sequential(*layers).double().to(DEVICE)
    image, target = torch.rand(1, 3, 256, 64).double(), torch.randint(2, (1, 128, 32))
    whole = F.cross_entropy(model(image.to(DEVICE)), target.to(DEVICE))
    expected = torch.autograd.grad(whole, [*model.parameters()])
    loss = squeezebox.streaming.StreamedStep(model, F.cross_entropy, height=20)(image, target)
    assert abs(loss.item() - whole.item()) <= 1e-12
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-11, atol=1e-13)


def test_noise_stays_near_what_was_asked_for():
    model, (x, y) = convolutions(), images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session = squeezebox.attach(model, optimizer=optimizer, noise=1e-2)
    trained(model, optimizer, x, y, steps=20)
    measured = session.measure_noise(lambda: loss_of(model(x), y).backward())
    session.detach()
    assert 0.0 < measured < 3e-2


def test_what_is_of_the_host_only_is_refused():
    graph = squeezebox.streaming.Graph(
        features=torch.randn(5, 4), edges=torch.randint(5, (2, 9)), targets=torch.randint(4, (5,))
    )
    with pytest.raises(UnsupportedModelError, match=r"call model.cpu\(\)"):
        squeezebox.streaming.GraphStep([nn.Linear(4, 4).to(DEVICE)], graph, "1MiB")
    bags = squeezebox.layers.ShardedEmbeddingBag(
        [(10, 4)], "1MiB", optimizer=lambda tables: torch.optim.Adagrad(tables, lr=0.1)
    )
    with pytest.raises(OptionError, match=r"give indices.cpu\(\)"):
        bags([torch.tensor([[1]], device=DEVICE)])
