"""A graph network's step in parts gives the whole graph's loss and gradients, and refuses what it cannot."""

import dataclasses
import os

import numpy as np
import pytest
import torch
from torch import nn

from squeezebox.memory import PeakMeter
from squeezebox.schema import BudgetError, DatasetError, OptionError, OutputError, UnsupportedModelError
from squeezebox.streaming import Graph, GraphStep
from squeezebox.streaming._order import better_order, rows_read


class Gcn(nn.Linear):
    def forward(self, x, edge_index, edge_weight):
        sources, targets = edge_index
        messages = super().forward(x)[sources] * edge_weight[:, None]
        return x.new_zeros(len(x), self.out_features).index_add(0, targets, messages)


class Sage(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.own, self.others = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x, edge_index):
        sources, targets = edge_index
        sums = torch.zeros_like(x).index_add(0, targets, x[sources])
        degrees = torch.bincount(targets, minlength=len(x)).clamp(min=1)
        return self.own(x) + self.others(sums / degrees[:, None])


class Gin(Sage):
    def forward(self, x, edge_index):
        sources, targets = edge_index
        return self.own(torch.relu(self.others(x.index_add(0, targets, x[sources]))))


class Gat(nn.Linear):
    def forward(self, x, edge_index):
        sources, targets = edge_index
        z = super().forward(x)
        scores = nn.functional.leaky_relu(z[sources, 0] + z[targets, 1]).exp()
        total = z.new_zeros(len(x)).index_add(0, targets, scores)[targets]
        return torch.zeros_like(z).index_add(0, targets, z[sources] * (scores / total)[:, None])


def made(count=60, weights=False, dtype=torch.float64):
    torch.manual_seed(3)
    edges = torch.randint(count - 2, (2, 5 * count))  # the last two nodes are isolated, some edges are loops
    edges[1, :40] = 7  # and one node has many
    return Graph(
        features=torch.randn(count, 6, dtype=dtype),
        edges=edges,
        targets=torch.randint(4, (count,)),
        weights=torch.rand(edges.shape[1], dtype=dtype) if weights else None,
        nodes=torch.arange(0, count, 2),
    )


def networks():
    torch.manual_seed(1)
    yield "gcn", [Gcn(6, 9), nn.ReLU(), Gcn(9, 4)]
    yield "sage", [Sage(6, 9), nn.LayerNorm(9), nn.ReLU(), Sage(9, 8), nn.ELU(), Sage(8, 4)]
    yield "gat", [nn.Linear(6, 5), Gat(5, 8), nn.ELU(), Gat(8, 4), nn.Linear(4, 4)]
    yield "gin", [Gin(6, 6), nn.ReLU(), Gin(6, 6), nn.Linear(6, 4)]


def whole(model, graph):
    x, weights = graph.features, () if graph.weights is None else (graph.weights,)
    for module in model:
        is_layer = isinstance(module, Gcn | Sage | Gat)
        x = module(x, graph.edges, *weights) if is_layer else module(x)
    return x


@pytest.mark.parametrize(("name", "model"), list(networks()), ids=[name for name, _ in networks()])
def test_a_step_in_parts_is_the_whole_graphs(name, model):
    model, graph = nn.ModuleList(model).double(), made(weights=name == "gcn")
    step = GraphStep(model, graph, "20KiB")
    assert step.parts > 2
    loss = step()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    expected = nn.functional.cross_entropy(whole(model, graph)[graph.nodes], graph.targets[graph.nodes])
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        wanted = parameter.grad  # that of scores' common bias is 0
        assert wanted is None or (gradient - wanted).abs().max() <= 1e-12 * max(wanted.abs().max(), 1e-3)
    output = step.predict(np.empty((60, 4)))
    torch.testing.assert_close(torch.from_numpy(output), whole(model, graph).detach(), rtol=1e-12, atol=1e-14)


def test_what_needs_the_whole_graph_is_refused():
    class Normalised(Sage):
        def forward(self, x, edge_index):
            degrees = torch.bincount(edge_index[1], minlength=len(x)).clamp(min=1)
            return super().forward(x / degrees[:, None], edge_index)

    for module in (nn.BatchNorm1d(6), nn.Dropout(0.5), Normalised(6, 6)):
        with pytest.raises(UnsupportedModelError, match=type(module).__name__):
            GraphStep([module.double(), Sage(6, 4).double()], made(), "1MiB")
    evaluated = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(), Sage(6, 4)).double().eval()
    assert GraphStep(evaluated, made(), "1MiB").parts == 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"edges": torch.tensor([[0, 60], [1, 1]])}, "0 to 60, but features have rows 0 to 59"),
        ({"targets": torch.zeros(5)}, "targets have 5 rows"),
        ({"nodes": torch.tensor([1, 1])}, "distinct"),
        ({"edges": torch.zeros(3, 4)}, "2 x edges"),
        ({"nodes": torch.arange(60) > 30}, r"of bool \(60,\); .* such as np.flatnonzero\(nodes\)"),
        ({"features": torch.randn(60, 5).double()}, "rows of 5 numbers, with features of 60 x 5"),
        ({"targets": torch.full((60,), 7)}, "Targets go from 7 to 7, and the model gives 4 numbers"),
    ],
)
def test_a_graph_that_does_not_fit_together_is_refused(changed, said):
    graph = made()
    parts = {name: getattr(graph, name) for name in Graph.__slots__} | changed
    with pytest.raises(OptionError, match=said):
        GraphStep([Sage(6, 4).double()], Graph(**parts), "1MiB")()


def test_a_model_on_a_device_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"on meta, .* call model.cpu\(\)"):
        GraphStep([Sage(6, 4).to("meta")], made(), "1MiB")


def test_few_bits_and_autocast_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"of torch.bfloat16; call model.float\(\)"):
        GraphStep([Sage(6, 4).bfloat16()], made(), "1MiB")
    step = GraphStep([Sage(6, 4).float()], made(), "1MiB")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UnsupportedModelError, match="Leave torch.aut"):
        step()


def test_too_little_memory_and_a_bad_loss_are_refused(tmp_path):
    model = [Sage(6, 4).double(), Sage(4, 4).double()]
    with pytest.raises(BudgetError, match="node 7"):
        GraphStep(model, made(), 900)
    with pytest.raises(OptionError, match="reduction"):
        GraphStep(model, made(), "1MiB", loss_fn=nn.functional.cross_entropy)()
    with pytest.raises(OutputError, match="gone"):
        GraphStep(model, made(), "1MiB", folder=tmp_path / "gone")


@pytest.mark.parametrize("classes", [4, 300])
def test_a_steps_peak_stays_within_the_memory(classes):
    """Where some parts read many more rows than others, and where most is the loss's."""
    torch.manual_seed(0)
    targets = torch.arange(3000).repeat_interleave(6)
    sources = (targets + torch.randint(-100, 101, targets.shape)).clamp(0, 2999)
    sources[9000:10200] = torch.randint(3000, (1200,))
    graph = Graph(
        features=torch.randn(3000, 32),
        edges=torch.stack([sources, targets]),
        targets=torch.randint(classes, (3000,)),
    )
    model = nn.Sequential(Sage(32, 16), nn.ReLU(), Sage(16, classes))
    step = GraphStep(model, graph, "1MiB")
    meter = PeakMeter(torch.device("cpu"))
    assert step.parts > 1 and meter.start()
    step()
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert meter.stop(()).total_bytes <= 2**20 + 2 * gradients  # those there, and the sum with a part's


def test_a_features_file_that_shrinks_is_an_error_and_gradients_stay(tmp_path):
    graph, path = made(4000), tmp_path / "features"
    mapped = np.memmap(path, np.float64, "w+", shape=(4000, 6))
    mapped[:] = graph.features.numpy()
    model = [Sage(6, 4).double()]
    step = GraphStep(model, Graph(features=mapped, edges=graph.edges, targets=graph.targets), "1MiB")
    step()
    before = [parameter.grad.clone() for parameter in model[0].parameters()]
    with path.open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(DatasetError, match="features has 4,096 bytes, and 192,000"):
        step()
    assert all(torch.equal(p.grad, old) for p, old in zip(model[0].parameters(), before, strict=True))


@pytest.mark.parametrize("kind", ["chain", "communities"])
def test_another_order_reads_fewer_rows_and_gives_the_same(tmp_path, kind):
    """Nodes are numbered at random, features and outputs lie in files, nodes are isolated and loops there."""
    torch.manual_seed(0)
    count = 600
    targets = torch.arange(count - 5).repeat_interleave(4)
    near = (targets + torch.randint(-4, 5, targets.shape)).clamp(0, count - 6)
    block = targets // 30 * 30 + torch.randint(30, targets.shape)
    numbers = torch.randperm(count)
    edges = numbers[torch.stack([(near if kind == "chain" else block).clamp(max=count - 6), targets])]
    mapped = np.memmap(tmp_path / "features", np.float64, "w+", shape=(count, 6))
    mapped[:] = torch.randn(count, 6).numpy()
    graph = Graph(
        features=mapped, edges=edges, targets=torch.randint(4, (count,)), nodes=torch.randperm(count)[:400]
    )
    model = nn.ModuleList([Sage(6, 9), nn.ReLU(), Sage(9, 8), Sage(8, 4)]).double()
    losses, gradients = [], []
    for order in (None, np.arange(count), np.random.default_rng(0).permutation(count)):
        step = GraphStep(model, graph, "50KiB", order=order, folder=tmp_path)
        model.zero_grad()
        losses.append(step())
        gradients.append([parameter.grad for parameter in model.parameters()])
        out = np.memmap(tmp_path / "out", np.float64, "w+", shape=(count, 4))
        expected = whole(model, Graph(features=torch.tensor(mapped), edges=edges, targets=None))
        torch.testing.assert_close(torch.tensor(step.predict(out)), expected.detach(), rtol=1e-12, atol=1e-13)
    model.zero_grad()
    nn.functional.cross_entropy(expected[graph.nodes], graph.targets[graph.nodes]).backward()
    for loss, found in zip(losses, gradients, strict=True):
        torch.testing.assert_close(loss, losses[0], rtol=1e-12, atol=0)
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            assert (gradient - parameter.grad).abs().max() <= 1e-12 * parameter.grad.abs().max()
    parts = step.parts
    found = better_order(edges.numpy(), count, parts)
    assert sorted(found) == list(range(count))
    assert rows_read(edges.numpy(), found, parts) < 0.6 * rows_read(edges.numpy(), np.arange(count), parts)


def test_an_order_that_is_good_stays():
    targets = np.arange(1, 500)
    edges = np.stack([targets - 1, targets])
    assert better_order(edges, 500, 10) is None and rows_read(edges, np.arange(500), 10) == 509


@pytest.mark.parametrize(("order", "said"), [([0, 1], "2 nodes of 60"), ([0] * 60, "distinct")])
def test_an_order_that_is_none_is_refused(order, said):
    with pytest.raises(OptionError, match=said):
        GraphStep([Sage(6, 4).double()], made(), "1MiB", order=torch.tensor(order))


def test_modes_that_change_after_a_step_is_made_are_seen():
    model = nn.Sequential(Sage(6, 8), nn.LayerNorm(8), nn.Dropout(0.0), Sage(8, 4)).double().eval()
    step, out = GraphStep(model, made(), "20KiB"), np.zeros((60, 4))
    model.train()
    step()
    model[2].p = 0.5
    model.eval()
    step()
    model[0].train()
    model[2].train()
    with pytest.raises(UnsupportedModelError, match="Dropout gives other outputs"):
        step()
    with pytest.raises(UnsupportedModelError, match="Dropout gives other outputs"):
        step.predict(out)
    assert not out.any()


@pytest.mark.parametrize("is_module", [True, False])
def test_the_losss_own_parameters_have_gradients(is_module):
    class Warm(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

        def forward(self, output, target):
            return nn.functional.cross_entropy(output * self.scale, target, reduction="none")

    loss, graph = Warm(), made()
    model = nn.Sequential(Sage(6, 4)).double()
    function = loss if is_module else lambda output, target: loss(output, target)
    GraphStep(model, graph, "20KiB", loss_fn=function)()
    found, loss.scale.grad = loss.scale.grad, None
    loss(whole(model, graph)[graph.nodes], graph.targets[graph.nodes]).mean().backward()
    torch.testing.assert_close(found, loss.scale.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("out", "why"),
    [
        (
            np.zeros((60, 4), np.int64),
            r"out is \(60, 4\) of int64; give an array of 60 x 4 numbers",
        ),
        (np.zeros((61, 4)), r"out is \(61, 4\) of float64"),
        (np.zeros((60, 5)), r"out is \(60, 5\) of float64"),
        (np.broadcast_to(0.0, (60, 4)), "out is read-only"),
        (torch.zeros(60, 4), "out is a Tensor; give numpy's"),
    ],
)
def test_what_a_prediction_does_not_fit_in_is_refused(out, why):
    with pytest.raises(OptionError, match=why):
        GraphStep([Sage(6, 4).double()], made(), "1MiB").predict(out)


def test_what_graphs_and_layers_may_not_be_is_refused():
    class InPlace(Sage):
        def forward(self, x, edge_index):
            return super().forward(x.relu_(), edge_index)

    graph = made(weights=True)
    for name in ("features", "weights"):
        learnt = dataclasses.replace(graph, **{name: nn.Parameter(getattr(graph, name))})
        with pytest.raises(OptionError, match=f"the graph's {name} require a gradient"):
            GraphStep([Gcn(6, 4).double()], learnt, "1MiB")
    with pytest.raises(OptionError, match="weights are torch.float64, and the model's parameters"):
        GraphStep([Gcn(6, 4)], graph, "1MiB")
    with pytest.raises(UnsupportedModelError, match="InPlace changes its input in place"):
        GraphStep([Sage(6, 6).double(), InPlace(6, 4).double()], made(), "1MiB")
    with torch.inference_mode(), pytest.raises(OptionError, match="leave torch.inference_mode out"):
        GraphStep([Sage(6, 4).double()], made(), "1MiB")


def test_features_that_change_in_their_file_are_refused(tmp_path):
    graph = made()
    mapped = np.memmap(tmp_path / "features", np.float64, "w+", shape=(60, 6))
    mapped[:] = graph.features.numpy()
    model = nn.Sequential(Sage(6, 4)).double()
    step = GraphStep(model, dataclasses.replace(graph, features=mapped), "20KiB")
    with pytest.raises(OptionError, match="out shares memory"):
        step.predict(mapped[:, :4])
    os.utime(tmp_path / "features", (1, 1))
    with pytest.raises(DatasetError, match="the features' file has changed since the step was made"):
        step()
    assert all(parameter.grad is None for parameter in model.parameters())


class Propagate(nn.Module):
    @torch.no_grad()
    def forward(self, x, edge_index):
        sources, targets = edge_index
        return torch.zeros_like(x).index_add(0, targets, x[sources])


def test_below_a_stage_without_gradients_there_are_none():
    torch.manual_seed(0)
    model = nn.Sequential(Sage(6, 6), Propagate(), Sage(6, 4)).double()
    step = GraphStep(model, made(), "20KiB")
    assert step.parts > 2
    step()
    assert not any(each.grad is not None and each.grad.any() for each in model[0].parameters())
    assert all(each.grad.any() for each in model[2].parameters())


def test_numbers_of_nodes_may_be_of_64_bits_without_a_sign():
    graph = made()
    other = dataclasses.replace(graph, edges=graph.edges.numpy().astype(np.uint64))
    torch.manual_seed(0)
    model = nn.Sequential(Sage(6, 4)).double()
    assert GraphStep(model, other, "1MiB")() == GraphStep(model, graph, "1MiB")()


def test_numbers_that_change_in_a_mode_are_seen():
    model = nn.Sequential(Sage(6, 8), nn.Dropout(0.0), Sage(8, 4)).double()
    step = GraphStep(model, made(), "20KiB")
    step()
    model[1].p = 0.5
    with pytest.raises(UnsupportedModelError, match="Dropout gives other outputs"):
        step()


def test_the_losss_own_parameters_are_those_of_the_step():
    """Frozen, trained, or not there when the step was made."""
    graph, torch_loss = made(), nn.CrossEntropyLoss(reduction="none")
    model = nn.Sequential(Sage(6, 4)).double()
    scales = [nn.Parameter(torch.tensor(1.5).double(), requires_grad=number > 0) for number in range(2)]

    def loss_fn(output, target):
        return torch_loss(output * torch.stack(scales).prod(), target)

    step = GraphStep(model, graph, "20KiB", loss_fn=loss_fn)
    for number, scale in enumerate(scales):
        scale.requires_grad_(number == 0)
    step()
    found, scales[0].grad = scales[0].grad, None
    loss_fn(whole(model, graph)[graph.nodes], graph.targets[graph.nodes]).mean().backward()
    torch.testing.assert_close(found, scales[0].grad, rtol=1e-12, atol=0)
    assert scales[1].grad is None
