"""The first layers of a compiled step in slices of the batch, where nothing else is within the budget."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import squeezebox
from squeezebox.capture._compiled._first import first_layers
from squeezebox.schema import BudgetError
from tests.compiling.conftest import needs_compiler

X, Y = torch.randn(32, 3, 48, 48), torch.randint(10, (32,))


class Net(nn.Module):
    """Its first layers own the peak."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            *(nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True)),
            *(nn.Conv2d(32, 32, 3, padding=1), nn.SiLU(), nn.MaxPool2d(2)),
        )
        self.body = nn.Sequential(nn.Conv2d(32, 16, 3), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.last = nn.Linear(16, 10)

    def forward(self, x):
        return self.last(self.body(self.stem(x)))


class Skipping(Net):
    """What comes before the pooling is read again behind it."""

    def forward(self, x):
        y = self.stem[:-1](x)
        return self.last(self.body(self.stem[-1](y) + y[..., ::2, ::2]))


class Casting(Net):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Centred(Net):
    """Changes its image in place."""

    def forward(self, x):
        x -= 0.5
        return super().forward(x)


class Clamped(Net):
    """Changes a weight in place."""

    def forward(self, x):
        with torch.no_grad():
            self.stem[3].weight.clamp_(-0.01, 0.01)
        return super().forward(x)


def normalised():
    """A weight that is computed."""
    model = Net()
    nn.utils.parametrizations.weight_norm(model.stem[3])
    return model


def found(model, x=X, *, compiled=lambda rest: rest):
    """The first layers of a model's graph, and the result of the graph cut behind them."""
    cuts = []

    def backend(graph, inputs):
        cuts.append(first_layers(graph))
        return graph.forward if cuts[0] is None else cuts[0].before(compiled(cuts[0].rest), 5)

    torch._dynamo.reset()
    output = torch.compile(model, backend=backend, fullgraph=True)(x)
    return cuts[0], output


def test_a_graph_cut_in_two_computes_the_same():
    torch.manual_seed(0)
    model = Net().double()
    other = copy.deepcopy(model)
    cut, output = found(model, X.double())
    assert [node.op for node in cut.rest.graph.nodes].count("placeholder") == 6  # with the counter of batches
    expected = other(X.double())
    torch.testing.assert_close(output, expected)
    for each in (output, expected):
        F.cross_entropy(each, Y).backward()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    for mine, theirs in zip(model.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("count", [3, 1, 0])
def test_a_batch_may_be_smaller_than_slices_or_empty(count):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    cut, output = found(model, X[:count])
    torch.testing.assert_close(output, model(X[:count]))
    assert (cut is None) == (count == 0)


def test_layouts_of_the_rest_are_those_that_it_is_compiled_for():
    strides = []

    def compiled(rest):
        def run(*given):
            strides.append(given[-1].stride())
            return rest(*given)

        return run

    cut, _ = found(Net(), X.to(memory_format=torch.channels_last), compiled=compiled)
    assert strides == [cut.inputs([None] * 13)[-1].stride()]


@pytest.mark.parametrize(
    "make",
    [
        *(Skipping, Casting, Centred, Clamped, normalised),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten()),
        lambda: Net().bfloat16(),
    ],
)
def test_what_slices_could_not_reach_is_left_alone(make):
    model = make()
    assert found(model, X.to(next(model.parameters()).dtype).clone())[0] is None


def test_layers_without_gradients_are_left_alone():
    model = Net()
    model.stem.requires_grad_(False)
    assert found(model)[0] is None
    assert found(Net(), X.clone().requires_grad_())[0] is None


def trained(model, call):
    model.zero_grad()
    loss = F.cross_entropy(call(X), Y)
    loss.backward()
    return [loss.detach(), *(each.grad for each in model.parameters()), *model.buffers()]


@needs_compiler
@pytest.mark.slow
def test_a_budget_that_nothing_else_keeps():
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    torch._dynamo.reset()
    step = squeezebox.compile(model, budget="30%", sample=(X, Y), loss_fn=F.cross_entropy)
    assert step.slices == 8
    assert "the first layers, up to a pooling, in 8 slices of the batch" in str(step.report())
    for mine, theirs in zip(trained(model, step), trained(plain, plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2 * float(theirs.abs().max()))
    assert step(X[:3]).shape == (3, 10)  # fewer than slices
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(step(X[:5]), model(X[:5]), rtol=1e-4, atol=1e-5)
    with pytest.raises(BudgetError, match="the least compiled step that was found"):
        squeezebox.compile(Net(), budget="5%", sample=(X, Y), loss_fn=F.cross_entropy)


@needs_compiler
@pytest.mark.slow
def test_updates_and_noise_go_with_slices():
    torch.manual_seed(0)
    model = Net()
    other, weights = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch._dynamo.reset()
    step = squeezebox.compile(
        model,
        optimizer=optimizer,
        states=True,
        budget="30%",
        noise=1e-2,
        sample=(X, Y),
        loss_fn=F.cross_entropy,
    )
    assert step.slices == 8 and step.noise <= 1e-2
    plain = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    for call, each in ((step, optimizer), (other, plain)):
        each.zero_grad()
        F.cross_entropy(call(X), Y).backward()
        each.step()
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        moved = (theirs - weights[name]).detach().norm()
        assert (mine - theirs).detach().norm() < 0.2 * moved
