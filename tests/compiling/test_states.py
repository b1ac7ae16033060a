"""squeezebox.compile(budget=, states=True): the whole step is within the budget, updates are plain ones."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import squeezebox
from squeezebox.capture import CompiledStep, Spending
from squeezebox.memory import FileTensor, PeakMeter
from squeezebox.schema import AttachError, BudgetError, CaptureError, OptionError, UnsupportedModelError
from squeezebox.steps import held_by, nbytes_of, persistent
from tests.compiling.conftest import needs_compiler


class Net(nn.Module):
    """A table that is the last layer's weight too, layers, a norm, and a parameter that is not used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(512, 128)
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))
        self.norm = nn.LayerNorm(128)
        self.unused = nn.Parameter(torch.zeros(256, 256))

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.norm(x) @ self.table.weight.t()


X, Y = torch.randint(512, (32,)), torch.randint(512, (32,))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def compiled(model, optimizer, budget, loss_fn=F.cross_entropy, **options):
    torch._dynamo.reset()
    return squeezebox.compile(
        model,
        budget=budget,
        optimizer=optimizer,
        states=True,
        sample=(X, Y),
        loss_fn=loss_fn,
        **options,
    )


def train(call, optimizer, steps, losses=()):
    losses = [*losses]
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(call(X), Y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def plain(make, steps):
    torch._dynamo.reset()
    model = Net()
    optimizer = make(model)
    return train(torch.compile(model), optimizer, steps), model, optimizer


@needs_compiler
@pytest.mark.slow
def test_steps_are_plain_ones_within_the_budget():
    losses, other, theirs = plain(adamw, 3)
    model = Net()
    optimizer = adamw(model)
    before = [each.clone() for each in model.parameters()]
    step = compiled(model, optimizer, "50%")
    assert all(map(torch.equal, before, model.parameters())) and not optimizer.state
    assert train(step, optimizer, 3) == pytest.approx(losses, rel=1e-4)  # other kernels add in another order
    for start, ours, exact in zip(before, model.parameters(), other.parameters(), strict=True):
        assert (ours - exact).norm() <= 1e-3 * (exact - start).norm()
    moved = [
        each for state in optimizer.state.values() for each in state.values() if isinstance(each, FileTensor)
    ]
    assert moved and "in a file" in str(step.report())
    optimizer.zero_grad()
    held = nbytes_of([*held_by(model), X, Y, *persistent(model, optimizer)])
    meter = PeakMeter(torch.device("cpu"))
    assert meter.start()
    train(step, optimizer, 1)
    assert held + meter.stop(()).total_bytes <= step.peak_bytes + 1000  # counts of steps
    train(torch.compile(other), theirs, 1)
    # gradients are gone, and asking for one is refused by name
    with pytest.raises(CaptureError, match="gradient of 'table.weight'"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.zero_grad()
    # another shape is updated in the same way; a second backward without a step is refused
    F.cross_entropy(step(X[:8]), Y[:8]).backward()
    with pytest.raises((AttachError, CaptureError), match="asks for the gradient"):
        F.cross_entropy(step(X[:8]), Y[:8]).backward()
    optimizer.step()
    # states are the optimizer's own, and come back to memory
    step.close()
    assert not any(isinstance(each, FileTensor) for s in optimizer.state.values() for each in s.values())
    optimizer.zero_grad()
    F.cross_entropy(step(X), Y).backward()
    assert model.table.weight.grad.abs().sum() > 0


class Wide(nn.Module):
    """Blocks whose activations weigh more than their weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.ups = nn.ModuleList(nn.Linear(128, 256) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(256, 128) for _ in range(3))

    def forward(self, x):
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(F.gelu(up(x)))
        return x


@needs_compiler
@pytest.mark.slow
def test_noise_goes_with_states():
    torch._dynamo.reset()
    model = Wide()
    optimizer = adamw(model)
    before = [each.clone() for each in model.parameters()]
    x, y = torch.randn(1024, 128), torch.randint(128, (1024,))
    options = {"optimizer": optimizer, "states": True, "sample": (x, y), "loss_fn": F.cross_entropy}
    step = squeezebox.compile(model, budget="47%", noise=1e-2, **options)
    assert all(map(torch.equal, before, model.parameters())) and not optimizer.state
    assert 0 < step.noise <= 1e-2 and "bit" in str(step.report())
    other = copy.deepcopy(model)
    theirs = adamw(other)
    for call, taken in ((step, optimizer), (other, theirs)):
        taken.zero_grad()
        F.cross_entropy(call(x), y).backward()
        taken.step()
    for start, ours, exact in zip(before, model.parameters(), other.parameters(), strict=True):
        assert (ours - exact).norm() <= 0.5 * (exact - start).norm()  # AdamW's first step is of signs
    optimizer.zero_grad()
    held = nbytes_of([*held_by(model), x, y, *persistent(model, optimizer)])
    meter = PeakMeter(torch.device("cpu"))
    assert meter.start()
    F.cross_entropy(step(x), y).backward()
    optimizer.step()
    assert held + meter.stop(()).total_bytes <= step.peak_bytes + 1000


@needs_compiler
@pytest.mark.slow
def test_what_cannot_be_is_refused():
    model = Net()
    with pytest.raises(BudgetError, match=r"buffers and the sample alone take .* is 300\.00 KiB"):
        compiled(model, adamw(model), "300KiB")
    with pytest.raises(BudgetError, match=r"least .* takes .* and the budget is 1\.00 MiB"):
        compiled(model, adamw(model), "1MiB")

    calls = []

    def growing(output, target):
        calls.append(output)
        return len(calls) * F.cross_entropy(output, target)

    with pytest.raises(UnsupportedModelError, match=r"is another one with states=True than without"):
        compiled(model, adamw(model), "60%", growing)

    def penalized(output, target):
        return F.cross_entropy(output, target) + 1e-3 * model.table.weight.square().sum()

    with pytest.raises(UnsupportedModelError, match=r"'table.weight' has a second part"):
        compiled(model, adamw(model), "60%", penalized)
    assert all(each.grad is None for each in model.parameters())


@needs_compiler
@pytest.mark.slow
def test_packed_states_need_no_file():
    model = Net()
    optimizer = adamw(model)
    step = compiled(model, optimizer, "80%", update_noise=0.02, offload=False)
    losses = train(step, optimizer, 3)
    exact, _, _ = plain(adamw, 3)
    assert losses[0] == exact[0]
    assert losses == pytest.approx(exact, rel=0.05)
    plan = step.report().optimizer
    assert plan.packed and not plan.states and "update noise" in str(step.report())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"states": True}, "go with budget="),
        ({"budget": "50%", "sample": (X, Y), "loss_fn": F.cross_entropy, "states": True}, "none was given"),
        (
            {"budget": "50%", "sample": (X, Y), "loss_fn": F.cross_entropy, "update_noise": 0.02},
            "say how states=True",
        ),
        *(
            (
                {"budget": "50%", "sample": (X, Y), "loss_fn": F.cross_entropy, **ignored},
                "optimizer and offload say how states=True",
            )
            for ignored in ({"optimizer": object()}, {"offload": "folder"})
        ),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(OptionError, match=words):
        squeezebox.compile(Net(), **options)


class Layer(nn.Linear):
    def forward(self, x):
        return F.gelu(super().forward(x))


class Image(nn.Conv2d):
    def forward(self, x):
        return super().forward(x.view(-1, 128, 1, 1)).flatten(1)


class Broken(nn.Module):
    """A graph that runs for several layers, or for one of them twice; and a weight that Inductor copies."""

    def __init__(self, layers, times=1):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.times = nn.Embedding(512, 128), times
        self.image = Image(128, 128, 3, padding=1)
        self.layers = nn.ModuleList(Layer(128, 128) for _ in range(layers))
        self.last = nn.Linear(128, 512)

    def forward(self, tokens):
        x = self.image(self.table(tokens))
        for layer in self.times * list(self.layers):
            x = layer(x)
            torch._dynamo.graph_break()
        return self.last(x)


@needs_compiler
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_several_graphs_update_each_parameter_once():
    torch._dynamo.reset()
    other = Broken(2)
    optimizer = adamw(other)
    losses = train(torch.compile(other), optimizer, 3)
    model = Broken(2)
    optimizer = adamw(model)
    step = compiled(model, optimizer, "80%")
    assert train(step, optimizer, 3) == pytest.approx(losses, rel=1e-4)
    model = Broken(1, 2)
    before = [each.clone() for each in model.parameters()]
    with pytest.raises(UnsupportedModelError, match="two compute parts of one parameter's gradient"):
        compiled(model, adamw(model), "60%")
    assert all(map(torch.equal, before, model.parameters()))


def test_gradients_after_close_are_not_in_memory_that_kernels_write_over():
    weight, gradient = nn.Parameter(torch.zeros(3)), torch.empty(3)
    spending = Spending({weight: 0}, lambda *_: None)
    CompiledStep(nn.Identity(), lambda *_: None, lambda: None, spending=spending).close()
    for times in (1.0, 2.0):
        spending.take(weight, gradient.fill_(1.0))
        gradient.zero_()
        assert torch.equal(weight.grad, torch.full((3,), times))
