"""A linear layer's weight gradient in slices: the whole one's to the bit, and never whole in memory."""

import copy

import pytest
import torch
from torch import nn

import squeezebox
from squeezebox.memory import CHUNK_BYTES
from squeezebox.optim import Products, ProductTensor, Updates, sliceable
from squeezebox.profiling import PeakMeter

WIDE = (1600, 2048)  # (out, in): 12.5 MiB


class Wide(nn.Module):
    """Two layers that are large enough, one of them without a bias, and a small one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDE[1], WIDE[0])
        self.second = nn.Linear(WIDE[0], WIDE[1], bias=False)
        self.last = nn.Linear(WIDE[1], 3)

    def forward(self, x):
        return self.last(self.second(torch.relu_(self.first(x))))


def network():
    torch.manual_seed(0)
    return Wide()


def inputs(dims=2):
    return torch.randn(4, *[3] * (dims - 2), WIDE[1], generator=torch.Generator().manual_seed(1))


def sliced(model, optimizer, names):
    return Updates(
        model, optimizer, in_backward=True, states=(), packed={}, gradients=(), sliced=names, folder=None
    )


def train(model, optimizer, x, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.fixture
def alike():
    """BLAS rounds rows as it rounds the whole product, which not every CPU's may."""
    if not all(seen(network(), sliceable(network()), lambda each: each.is_equal_in_slices).values()):
        pytest.skip("BLAS rounds rows otherwise on this CPU, where a plan leaves gradients whole")


@pytest.mark.usefixtures("alike")
@pytest.mark.parametrize("dims", (2, 3))
@pytest.mark.parametrize("kind", (torch.optim.SGD, torch.optim.AdamW))
def test_training_is_equal_to_the_bit(dims, kind):
    model = network()
    plain = copy.deepcopy(model)
    assert sliceable(model) == ["first.weight", "second.weight"]
    optimizer = kind(model.parameters(), lr=1e-3)
    updates = sliced(model, optimizer, sliceable(model))
    train(model, optimizer, inputs(dims))
    train(plain, kind(plain.parameters(), lr=1e-3), inputs(dims))
    for own, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own, theirs)
    updates.close()
    train(model, optimizer, inputs(), 1)
    assert all(type(each.grad) is torch.Tensor for each in model.parameters())


def seen(model, names, look):
    """What ``look`` makes of each named weight's gradient in a backward."""
    products, found = Products(model, names), {}
    hooks = [
        parameter.register_post_accumulate_grad_hook(
            lambda each, name=name: found.update({name: look(each.grad)})
        )
        for name, parameter in model.named_parameters()
        if name in names
    ]
    model(inputs()).square().mean().backward()
    products.close()
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.usefixtures("alike")
def test_rows_are_the_products_wherever_a_piece_lies():
    def pieces_are_equal(gradient):
        assert isinstance(gradient, ProductTensor) and gradient.is_equal_in_slices
        whole = gradient.load().flatten()
        for start, stop in ((5, 6), (len(whole) - 7, len(whole))):  # BLAS rounds a few rows otherwise
            with gradient.lent(start, stop) as elements:
                torch.testing.assert_close(elements, whole[start:stop])
        assert torch.equal(gradient + 0.0, whole.view_as(gradient))  # as any operator reads it
        return True

    assert len(seen(network(), ["first.weight", "second.weight"], pieces_are_equal)) == 2


def test_other_gradients_of_the_weight_are_added_in_memory():
    model = network()
    model.third = nn.Linear(WIDE[1], WIDE[0])
    model.third.weight = model.first.weight
    model.forward = lambda x: model.first(x) + model.third(2 * x)
    plain = copy.deepcopy(model)
    plain.forward = lambda x: plain.first(x) + plain.third(2 * x)
    found = seen(model, ["first.weight"], type)
    plain(inputs()).square().mean().backward()
    assert found == {"first.weight": torch.Tensor}
    assert torch.equal(model.first.weight.grad, plain.first.weight.grad)


def test_hooks_of_others_get_their_gradient():
    model, plain = network(), network()
    for each in (model, plain):
        each.first.weight.register_hook(lambda gradient: 2 * gradient)
        each.second.register_full_backward_hook(lambda module, to, of: (to[0],))
    seen(model, ["first.weight", "second.weight"], type)
    plain(inputs()).square().mean().backward()
    for own, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.grad + 0.0, theirs.grad)


@pytest.mark.parametrize("other", ("frozen", "bfloat16", "small", "a class of its own"))
def test_other_layers_are_left_alone(other):
    model = network()
    if other == "frozen":
        model.requires_grad_(False)
    elif other == "bfloat16":
        model.bfloat16()
    elif other == "small":
        model = nn.Linear(64, 64)
    else:
        for layer in (model.first, model.second):
            layer.__class__ = type("Own", (nn.Linear,), {})
    assert sliceable(model) == []


@pytest.mark.usefixtures("alike")
@pytest.mark.parametrize("noise", (None, 1e-2))
def test_a_plan_slices_and_predicts_it(noise):
    model, x = network(), inputs()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def loss_fn(output, target):
        return (output - target).square().mean()

    target = torch.zeros(4, 3)
    given = {"exact": True} if noise is None else {"noise": noise}
    plan = squeezebox.plan(
        model, optimizer=optimizer, sample=(x, target), loss_fn=loss_fn, states=True, offload=False, **given
    )
    assert set(plan.optimizer.sliced) == {"first.weight", "second.weight"}
    assert "some rows at a time" in str(plan)
    session = squeezebox.attach(model, optimizer=optimizer, plan=plan)

    def step(model, optimizer):
        optimizer.zero_grad()
        loss_fn(model(x), target).backward()
        optimizer.step()

    for _ in range(3):
        step(model, optimizer)
    meter = PeakMeter(torch.device("cpu"))
    optimizer.zero_grad()
    held = sum(each.nbytes for each in (*model.parameters(), x, target)) * 2 - x.nbytes - target.nbytes
    assert meter.start()
    step(model, optimizer)
    peak = held + meter.stop(()).total_bytes
    session.measure_noise(lambda: loss_fn(model(x), target).backward())  # reads whole gradients
    session.detach()
    weights = sum(each.nbytes for each in model.parameters())
    assert peak < 2.5 * weights  # plain: 3
    assert peak == pytest.approx(plan.predicted_peak_bytes, rel=0.03)
    if noise is None:
        own = torch.optim.SGD(plain.parameters(), lr=1e-3, momentum=0.9)
        for _ in range(4):
            step(plain, own)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_a_plan_without_slices_counts_a_layer_s_input_until_its_weight_s_gradient_is_made():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 2048), nn.Tanh(), nn.Linear(2048, 1024)), torch.randn(512, 64)
    loss_fn, target = nn.functional.mse_loss, torch.zeros(512, 1024)
    plan = squeezebox.plan(model, sample=(x, target), loss_fn=loss_fn, exact=True, offload=False)
    session = squeezebox.attach(model, plan=plan)
    loss_fn(model(x), target).backward()
    assert session.report().peak_bytes <= plan.predicted_peak_bytes
    session.detach()


def test_clipping_gets_whole_gradients():
    model, x = network(), inputs()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    plan = squeezebox.plan(
        model,
        optimizer=optimizer,
        sample=(x, torch.zeros(4, 3)),
        loss_fn=nn.functional.mse_loss,
        states=True,
        clip=1.0,
        exact=True,
    )
    assert plan.optimizer.sliced == () and CHUNK_BYTES < model.first.weight.nbytes
    session = squeezebox.attach(model, optimizer=optimizer, plan=plan)
    nn.functional.mse_loss(model(x), torch.zeros(4, 3)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    session.detach()
    plain = network()
    nn.functional.mse_loss(plain(x), torch.zeros(4, 3)).backward()
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0))


def test_copies_have_nothing_of_it(tmp_path):
    model, x = network(), inputs()
    updates = sliced(model, torch.optim.SGD(model.parameters(), lr=0.1), ["first.weight"])
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        other(x).square().mean().backward()
        assert type(other.first.weight.grad) is torch.Tensor
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    updates.close()


def test_a_gradient_that_is_asked_for_has_views_and_can_be_changed():
    model, plain, x = network(), network(), inputs()
    updates = sliced(model, torch.optim.SGD(model.parameters(), lr=0.1), sliceable(model))
    (found,) = torch.autograd.grad(model(x).square().mean(), [model.second.weight])
    (wanted,) = torch.autograd.grad(plain(x).square().mean(), [plain.second.weight])
    assert isinstance(found, ProductTensor)
    for gradient in (found, wanted):
        gradient.view(-1)[:5] = 1.0
        gradient.t()[7] = 2.0
        gradient.mul_(3.0)
    torch.testing.assert_close(found[:9], wanted[:9])
    torch.testing.assert_close(found + 0.0, wanted)
    updates.close()
