"""exact=True: losses, gradients, buffers and random states of plain PyTorch, to the bit."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import squeezebox
from squeezebox.profiling import PeakMeter
from squeezebox.schema import Action, Option
from tests.capture.nets import NETS, Residual, assert_equal, images, loss_of, plain_step, resnet, train


@pytest.mark.parametrize("covered", [False, True], ids=["", "step()"])
@pytest.mark.parametrize("name", NETS)
def test_every_net_trains_as_plain(name, covered):
    make, make_input = NETS[name]
    model = make()
    assert_equal(train(model, make_input, exact=True, covered=covered), train(model, make_input))


@pytest.mark.parametrize("name", ["resnet", "pools", "activations"])
def test_channels_last(name):
    model = NETS[name][0]().to(memory_format=torch.channels_last)

    def step(model, x):
        return plain_step(model, x.to(memory_format=torch.channels_last))

    assert_equal(train(model, images, step=step, exact=True), train(model, images, step=step))


@pytest.mark.parametrize("name", ["resnet", "attention", "activations"])
def test_bf16_autocast(name):
    make, make_input = NETS[name]
    model = make()

    def step(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(x))
        loss.backward()
        return loss

    assert_equal(train(model, make_input, step=step, exact=True), train(model, make_input, step=step))


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype):
    model = resnet().to(dtype)

    def step(model, x):
        return plain_step(model, x.to(dtype))

    assert_equal(train(model, images, step=step, exact=True), train(model, images, step=step))


def accumulate(model, x):
    return sum(plain_step(model, part).detach() for part in x.split(2))


def several_forwards(model, x):
    loss = sum(loss_of(model(part)) for part in x.split(2))
    loss.backward()
    return loss


def crossed_forwards(model, x):
    """The first graph's backward runs after the second's, and a third forward comes in between."""
    one, two = loss_of(model(x)), loss_of(model(x * 2))
    two.backward()
    three = loss_of(model(x * 3))
    one.backward()
    three.backward()
    return one + two + three


def retained(model, x):
    loss = loss_of(model(x))
    for _ in range(3):
        loss.backward(retain_graph=True)
    return loss


def gradient_penalty(model, x):
    x = x.requires_grad_()
    loss = loss_of(model(x))
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    total = loss + slope.pow(2).sum()
    total.backward()
    return total


def gradient_of_parameters(model, x):
    loss = loss_of(model(x))
    slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True, allow_unused=True)
    total = loss + sum(slope.pow(2).sum() for slope in slopes if slope is not None)
    total.backward()
    return total


def evaluations_between(model, x):
    model.eval()
    with torch.no_grad():
        before = loss_of(model(x))
    loss_of(model(x))  # somebody forgot no_grad
    model.train()
    loss = loss_of(model(x))
    with torch.no_grad():
        loss_of(model(x))
    with torch.inference_mode():
        loss_of(model(x))
    loss.backward()
    return loss + before


STEPS = [
    accumulate,
    several_forwards,
    crossed_forwards,
    retained,
    gradient_penalty,
    gradient_of_parameters,
    evaluations_between,
]


@pytest.mark.parametrize("covered", [False, True], ids=["", "step()"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
@pytest.mark.parametrize("name", ["resnet", "pools"])
def test_ways_to_step(name, step, covered):
    model = NETS[name][0]()
    squeezed = train(model, images, step=step, exact=True, covered=covered)
    assert_equal(squeezed, train(model, images, step=step))


def test_second_derivatives_of_activations():
    model = NETS["activations"][0]()
    squeezed = train(model, images, step=gradient_of_parameters, steps=1, exact=True)
    reference = train(model, images, step=gradient_of_parameters, steps=1)
    assert all(gradient.isfinite().all() for gradient in reference.gradients[0].values())
    assert_equal(squeezed, reference)


def test_gradient_taken_within_forward():
    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

        def forward(self, x):
            with torch.enable_grad():
                x = x.requires_grad_()
                return torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0]

    model = Force()

    def make_input():
        return torch.randn(32, 64)

    assert_equal(train(model, make_input, exact=True), train(model, make_input))


def test_batches_are_counted_once():
    model = resnet()
    session = squeezebox.attach(model, exact=True)
    plain_step(model, images())
    session.detach()
    assert model[1].num_batches_tracked == 1


def test_a_deep_copy_runs_bare():
    model = resnet()
    session = squeezebox.attach(model, exact=True)
    plain_step(model, images())
    twin = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert twin(images()).abs().sum() > 0
    packed = session.report().packed_bytes
    plain_step(twin, images())
    assert session.report().packed_bytes == packed
    session.detach()


def test_a_sparse_input_is_left_alone():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 10)

        def forward(self, adjacency):
            x = torch.sparse.mm(adjacency, self.one.weight).relu()
            return self.two(torch.sparse.mm(adjacency, x))

    def make_input():
        return (torch.rand(64, 64) > 0.8).float().to_sparse()

    model = Graph()
    assert_equal(train(model, make_input, exact=True), train(model, make_input))


def test_hooks_of_somebody_else_are_left_alone():
    model, x = resnet(), images()
    seen = []

    def pack(tensor):
        seen.append(tensor)
        return tensor

    def step(model, x):
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_of(model(x))
        loss.backward()
        return loss

    session = squeezebox.attach(model, exact=True)
    plain_step(model, x)
    with pytest.warns(squeezebox.CaptureWarning, match="other saved-tensor hooks"):
        step(model, x)
    step(model, x)  # told once
    assert seen
    plain_step(model, x)
    assert any("other saved-tensor hooks" in note for note in session.report().record.notes)
    session.detach()


def test_hooks_inside_the_model_win_there():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = Residual(3, 16), nn.Linear(16, 10)

        def forward(self, x):
            with saved_tensors_hooks(lambda tensor: tensor.double(), lambda tensor: tensor.float()):
                x = self.one(x)
            return self.two(x.mean((2, 3)))

    model = Inner()
    assert_equal(train(model, images, exact=True), train(model, images))


def test_an_lstm_takes_no_more_than_plain():
    """Its workspace on a CPU is bytes already, most of what it saves."""
    model, x = nn.LSTM(32, 64, batch_first=True), torch.randn(8, 25, 32)

    def peak():
        model.zero_grad()
        meter = PeakMeter(torch.device("cpu"))
        assert meter.start()
        model(x)[0].sum().backward()
        return meter.stop([]).total_bytes

    plain = [peak() for _ in range(2)][-1]
    session = squeezebox.attach(model, exact=True)
    squeezed = [peak() for _ in range(2)][-1]
    session.detach()
    assert squeezed < 1.5 * plain


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 256), nn.Linear(256, 1)

    def forward(self, x):
        h = self.first(x)
        return self.last(torch.where(h > 0, h, 0.1 * h))


def test_two_penalties_in_one_step_each_have_their_own_masks():
    torch.manual_seed(0)
    critic = Critic()
    real, fake = (torch.randn(64, 64, requires_grad=True) for _ in range(2))

    def gradients(context):
        critic.zero_grad()
        with context:
            loss = 0.0
            for x in (real, fake):
                (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
                loss = loss + (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        return [each.grad for each in critic.parameters() if each.grad is not None]

    wanted = gradients(contextlib.nullcontext())
    session = squeezebox.attach(critic, exact=True)
    for _ in range(2):
        assert all(map(torch.equal, gradients(session.step()), wanted))
    session.detach()


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        result = x.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


class Ending(nn.Module):
    def __init__(self, end):
        super().__init__()
        self.layer, self.end = nn.Linear(64, 64), end

    def forward(self, x):
        return self.end(self.layer(x).sin())


ENDS = {
    "function": Exponential.apply,
    "region": lambda x: checkpoint(torch.tanh, x, use_reentrant=True),
}


@pytest.mark.parametrize("end", ENDS)
def test_what_no_operator_claims_at_the_end_may_be_moved(end):
    model, x = Ending(ENDS[end]), torch.randn(512, 64)

    def gradient():
        model.zero_grad()
        model(x).sum().backward()
        return model.layer.weight.grad

    expected = gradient()
    session = squeezebox.attach(model, exact=True)
    session.engine.store.planned = lambda key: Option(action=Action.OFFLOAD, held_bytes=0)
    assert torch.equal(gradient(), expected)
    session.detach()
