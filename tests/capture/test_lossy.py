"""Within bounds: every unpacked element, every zero, every sign; and nothing that need not be lossy."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import squeezebox
from squeezebox.bounds import Fixed
from squeezebox.capture import Store
from squeezebox.capture._held import Packed
from squeezebox.schema import Reads
from tests.capture.nets import NETS, images, loss_of, noise_of, plain_step, train

FEW_VALUES = ("custom", "checkpointed whole", "outputs")  # these save little that may be lossy


@pytest.fixture
def unpacked(monkeypatch):
    """Compares what every handle gives back first with what it was given; counts comparisons by form."""
    originals, counts = {}, {}
    settle, unpack = Store.settle, Store.unpack

    def recording_settle(store, handle, *args):
        originals[handle] = handle.tensor.clone(), handle.tensor.stride()
        settle(store, handle, *args)

    def comparing_unpack(store, handle):
        found = unpack(store, handle)
        if handle in originals and handle.override is None:
            kind = form_of(handle)
            counts[kind] = counts.get(kind, 0) + 1
            assert_same(handle, found, *originals.pop(handle))  # an LSTM's backward then writes in its own
        return found

    monkeypatch.setattr(Store, "settle", recording_settle)
    monkeypatch.setattr(Store, "unpack", comparing_unpack)
    return counts


def form_of(handle):
    if handle.held is None:
        return "shape"
    if isinstance(handle.held, Packed):
        return handle.rule.codec or "values"
    return type(handle.held).__name__.lower()


def assert_same(handle, found, original, stride):
    assert (found.shape, found.dtype, found.device) == (original.shape, original.dtype, original.device)
    form = form_of(handle)
    if form == "shape":
        return
    assert found.stride() == stride
    if form == "values":
        bound = torch.full_like(original, handle.held.row.bound)
        if handle.held.scale is not None:
            handle.held.scale.multiply(bound)
        assert bool(((found.double() - original.double()).abs() <= bound.double() * (1 + 1e-6)).all())
        assert bool((found[original == 0] == 0).all())
    elif form == "interval":
        (options,) = (name for name, part in handle.entry.parts.items() if part is handle.held)
        lower, upper = (float(option.partition("=")[2]) for option in options.split(",")[1:])
        assert torch.equal((found > lower) & (found < upper), (original > lower) & (original < upper))
    elif form != "sign":
        assert torch.equal(found, original)
    if handle.rule.reads is Reads.SIGN:
        assert torch.equal(found > 0, original > 0)


@pytest.mark.parametrize("name", NETS)
def test_bounds_hold_for_every_element(name, unpacked):
    make, make_input = NETS[name]
    train(make(), make_input, noise=1e-2, covered=True)
    assert unpacked.get("values", 0) > 2 or name in FEW_VALUES


def test_bounds_hold_in_channels_last_and_bf16(unpacked):
    def step(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(x.to(memory_format=torch.channels_last)))
        loss.backward()
        return loss

    train(NETS["resnet"][0]().to(memory_format=torch.channels_last), images, step=step, noise=1e-2)
    assert unpacked["values"] > 20


def test_exact_needs_no_lossy_form(unpacked):
    train(NETS["resnet"][0](), images, exact=True)
    assert unpacked["sign"] > 0 and unpacked["kept"] > 0


@pytest.mark.parametrize("controller_noise", [1e-2, 1e-5])
@pytest.mark.parametrize("name", NETS)
def test_noise_stays_near_the_budget(name, controller_noise):
    make, make_input = NETS[name]
    model = make()
    reference = train(model, make_input, steps=1)
    squeezed = train(model, make_input, steps=1, noise=controller_noise)
    assert noise_of(squeezed, reference) <= 2 * controller_noise


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, groups=2),
        nn.LeakyReLU(),
        nn.AvgPool2d(3, 1, 1),
        nn.Conv2d(32, 32, 1),
        nn.ReLU6(inplace=True),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
    )


def test_only_weight_gradients_of_a_convolutional_net_are_lossy():
    model = convolutions()
    inputs = []

    def step(model, x):
        inputs.append(x.requires_grad_())
        return plain_step(model, x)

    reference = train(model, images, step=step)
    squeezed = train(model, images, step=step, steps=1, noise=1e-2)
    assert inputs[3].grad.abs().sum() > 0
    assert torch.equal(inputs[3].grad, inputs[0].grad)
    for name, gradient in squeezed.gradients[0].items():
        same = torch.equal(gradient, reference.gradients[0][name])
        assert same == (name.endswith("bias") or name == "0.weight")  # the images are left alone


class LowRank(nn.Module):
    """A frozen linear layer, and beside it what is trained."""

    def __init__(self, bias):
        super().__init__()
        self.base = nn.Linear(128, 128, bias=bias).requires_grad_(False)
        self.down, self.up = nn.Linear(128, 4, bias=False), nn.Linear(4, 128, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("bias", (False, True))
def test_frozen_linear_layers_above_trained_ones(bias):
    torch.manual_seed(0)
    model = nn.Sequential(LowRank(bias), nn.GELU(), LowRank(bias), nn.GELU(), LowRank(bias))
    session = squeezebox.attach(model, noise=1e-2)
    for _ in range(20):
        model(torch.randn(8, 32, 128)).square().mean().backward()
    noise = session.measure_noise(lambda: model(torch.ones(8, 32, 128).cumsum(1)).square().mean().backward())
    record = session.report().record
    session.detach()
    assert 0.0 < noise < 3e-2
    assert record.packed_bytes < record.saved_bytes / 2


def test_two_orders_of_budget_are_two_orders_of_noise():
    model = NETS["resnet"][0]()
    reference = train(model, images, steps=1)
    small, large = (noise_of(train(model, images, steps=1, noise=n), reference) for n in (1e-5, 1e-3))
    assert 10 < large / small < 1000


class Rows(nn.Module):
    """One row in sixteen is a ten thousandth as wide as the others when it is normalised."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(64, 64), norm, nn.Linear(64, 8)
        self.register_buffer("widths", torch.where(torch.arange(64) % 16 == 0, 1e-4, 1.0)[:, None])

    def forward(self, x):
        return self.head(self.norm(self.first(x) * self.widths))


@pytest.mark.parametrize("norm", [nn.LayerNorm(64, eps=1e-12), nn.GroupNorm(4, 64, eps=1e-12)], ids=type)
def test_narrow_rows_of_a_norm_are_bounded_by_their_own_width(norm):
    torch.manual_seed(0)
    model, x = Rows(norm), torch.randn(64, 64)
    session = squeezebox.attach(model, controller=Fixed(value=0.1))
    noise = session.measure_noise(lambda: model(x).square().mean().backward())
    session.detach()
    assert 0.0 < noise < 0.05


class Jagged(nn.Module):
    """Rows of unlike lengths between two layers of plain tensors."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        rows = self.first(functional.gelu(x * 1.0))
        jagged = torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 10, 40, len(x)]))
        return self.last(functional.gelu(self.inner(jagged.relu()).values()))


def test_jagged_tensors_are_held_as_they_are():
    torch.manual_seed(0)
    model, x = Jagged(), torch.randn(512, 64)

    def gradients():
        model.zero_grad()
        model(x).square().sum().backward()
        return torch.cat([each.grad.flatten() for each in model.parameters()])

    plain = gradients()
    session = squeezebox.attach(model, noise=1e-3)
    for _ in range(3):
        lossy = gradients()
    held = {each.key: each.codec for each in session.report().record.tensors}
    session.detach()
    assert 0.0 < (lossy - plain).square().sum() < 4e-3 * plain.square().sum()
    assert {"first:Addmm.mat1", "last:Addmm.mat1"} <= held.keys()
