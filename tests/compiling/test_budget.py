"""squeezebox.compile(budget=): the measured peak is within the budget, and nothing is lost."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._functorch import partitioners
from torch.fx.experimental.proxy_tensor import make_fx

import squeezebox
from squeezebox.capture._compiled._saved import Joint
from squeezebox.memory import Operator
from squeezebox.schema import BudgetError, OptionError, UnsupportedModelError
from tests.compiling.conftest import needs_compiler

pytestmark = needs_compiler


class Net(nn.Module):
    """Layers with dropout between, and a BatchNorm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.last = nn.Linear(64, 10)

    def forward(self, x):
        x = self.norm(self.first(x))
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), 0.1, self.training)
        return self.last(x)


X, Y = torch.randn(4096, 64), torch.randint(10, (4096,))


def step_of(model, budget):
    torch._dynamo.reset()
    return squeezebox.compile(model, budget=budget, sample=(X, Y), loss_fn=F.cross_entropy)


def trained(model, call):
    """Loss, gradients and buffers after one step."""
    torch.manual_seed(7)
    model.zero_grad()
    loss = F.cross_entropy(call(X), Y)
    loss.backward()
    return [loss.detach(), *(each.grad for each in model.parameters()), *model.buffers()]


@pytest.mark.slow
def test_every_budget_holds_and_nothing_is_lost():
    plain = Net()
    expected = trained(plain, torch.compile(plain, fullgraph=True))
    own = partitioners.choose_saved_values_set
    peaks, held = [], []
    for budget in ("100%", "88%", "78%"):
        model = Net()
        step = step_of(model, budget)
        peaks.append(step.peak_bytes)
        held.append(step.report().packed_bytes)
        for found, other in zip(trained(model, step), expected, strict=True):
            torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-6)
        assert torch.equal(model.norm.num_batches_tracked, torch.tensor(1))
    assert peaks[1] <= 0.88 * peaks[0] and peaks[2] <= 0.78 * peaks[0] and peaks[2] <= peaks[1]
    assert held[0] > held[1] > held[2] and step.report().saved_bytes == held[0]
    # the last one: evaluation of any shape, and training of smaller ones
    model.eval()
    with torch.no_grad():
        assert step(X[:3]).shape == (3, 10)
    model.train()
    assert step(X[:64]).shape == (64, 10)
    assert step.report().packed_bytes < held[2] / 50
    with pytest.raises(OptionError, match=r"peak with its sample is .* would take about .* MiB"):
        step(torch.cat([X, X]))
    assert partitioners.choose_saved_values_set is own
    with pytest.raises(BudgetError, match=r"at least .* when .* runs, and the budget is 100\.00 KiB"):
        step_of(Net(), "100KiB")
    assert partitioners.choose_saved_values_set is own


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_several_graphs_are_refused():
    class Broken(Net):
        def forward(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.last(F.gelu(x))

    with pytest.raises(UnsupportedModelError, match="several graphs"):
        step_of(Broken(), "90%")


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_model_that_is_never_compiled_is_refused():
    class Disabled(Net):
        @torch.compiler.disable
        def forward(self, x):
            return super().forward(x)

    with pytest.raises(UnsupportedModelError, match="no graph with gradients"):
        step_of(Disabled(), "50%")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": "50%"}, "sample="),
        (
            {"budget": "50%", "noise": 1e-2, "sample": (X, Y), "loss_fn": F.cross_entropy},
            "exclude each other",
        ),
        ({"budget": "half", "sample": (X, Y), "loss_fn": F.cross_entropy}, "no size"),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(OptionError, match=words):
        squeezebox.compile(Net(), **options)


def traced(function, tensors):
    """(graph, nodes that do not read the second tensor)"""
    graph = make_fx(function, tracing_mode="fake")(*tensors).graph
    nodes = list(graph.nodes)
    late = {nodes[1]}
    for node in nodes:
        late |= {node} if late & set(node.all_input_nodes) else set()
    return graph, [each for each in nodes if each not in late]


def joint():
    """Eight layers and their backward by hand, traced: (graph, forward's nodes)."""

    def function(x, above, *weights):
        read, out = [x], x
        for weight in weights:
            out = torch.tanh(out @ weight)
            read.append(out)
        gradients = []
        for weight in reversed(weights):
            above = above * (1 - read.pop() ** 2)
            gradients.append(read[-1].t() @ above)
            above = above @ weight.t()
        return out, *gradients

    return traced(
        function,
        [torch.empty(256, 64), torch.empty(256, 64), *(torch.empty(64, 64) for _ in range(8))],
    )


def test_the_search_saves_less_for_more_time():
    graph, forward = joint()
    joint_graph = Joint(graph, forward, 1)
    tanhs = [node for node in forward if "tanh" in str(node.target)]
    part = 256 * 64 * 4
    everything = joint_graph.choice(frozenset(tanhs), 1 << 40)
    least = joint_graph.within(tanhs, 0)
    limit = everything.peak_bytes - part // 2
    between = joint_graph.within(tanhs, limit)
    assert everything.excess == between.excess == 0.0
    assert least.peak_bytes < 0.65 * everything.peak_bytes and between.peak_bytes <= limit
    assert everything.seconds < between.seconds < least.seconds


def test_the_search_gives_up_all_parts_of_a_storage():
    def function(x, above, *weights):
        read, out = [], x
        for weight in weights:
            parts = (out @ weight).chunk(3, 1)
            read.append(parts)
            out = parts[0] * parts[1] * parts[2]
        for first, second, third in reversed(read):
            above = torch.tanh(above * first) * second + third
        return out, above

    graph, forward = traced(
        function,
        [torch.empty(256, 64), torch.empty(256, 64), *(torch.empty(64, 192) for _ in range(8))],
    )
    joint_graph = Joint(graph, forward, 1)
    parts = frozenset(node for node in forward if "split" in str(node.target) or "getitem" in node.name)
    everything = joint_graph.choice(parts, 1 << 40)
    least = joint_graph.search([parts], 0)
    assert least.peak_bytes < 0.6 * everything.peak_bytes


def test_the_search_is_corrected_by_what_was_measured():
    graph, forward = joint()
    joint_graph = Joint(graph, forward, 1)
    tanhs = frozenset(node for node in forward if "tanh" in str(node.target))
    before = joint_graph.choice(tanhs, 1 << 40)
    shapes = ((256, 64), (64, 64))
    more = [Operator("aten::mm", shapes, live_bytes=before.peak_bytes + 5000 + n) for n in range(8)]
    joint_graph.learn(tanhs, more)
    assert joint_graph.choice(tanhs, 1 << 40).peak_bytes >= before.peak_bytes + 5000
