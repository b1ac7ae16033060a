"""Two ranks that share a graph have the loss and gradients of one process, or near ones in fewer bytes."""

import numpy as np
import pytest
import torch
from torch import nn

from squeezebox.schema import OptionError
from squeezebox.streaming import Graph, GraphStep
from tests.pipeline import ranks
from tests.streaming.test_graph_step import Sage, made, networks


def model_of(name, dtype):
    if name == "wide":
        torch.manual_seed(1)
        return nn.ModuleList([Sage(6, 64), nn.ReLU(), Sage(64, 64), nn.ReLU(), Sage(64, 4)]).to(dtype)
    return nn.ModuleList(dict(networks())[name]).to(dtype)


def on_rank(rank, name, dtype, memory, bits):
    model, graph = model_of(name, dtype), made(600, weights=name == "gcn", dtype=dtype)
    group = None if rank is None else torch.distributed.group.WORLD
    step = GraphStep(model, graph, memory, group=group, message_bits=bits)
    torch.manual_seed(rank or 0)
    loss = step()
    out = step.predict(np.full((600, 4), np.nan))
    return loss, [parameter.grad for parameter in model.parameters()], out, step.message_bytes, step.parts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world", "dtype"),
    [("sage", 2, torch.float64), ("gcn", 3, torch.float64), ("gat", 2, torch.float32)],
)
def test_ranks_have_what_one_process_has(name, world, dtype):
    loss, gradients, out, *_ = on_rank(None, name, dtype, "1MiB", None)
    found = ranks.run(on_rank, world, name, dtype, "100KiB", None)
    within = 1e-12 if dtype == torch.float64 else 2e-5
    together = np.full_like(out, np.nan)
    for other, theirs, rows, sent, parts in found:
        assert sent > 0 and parts > 1
        torch.testing.assert_close(other, loss, rtol=within, atol=0)
        for one, gradient in zip(gradients, theirs, strict=True):
            assert (gradient - one).abs().max() <= within * max(one.abs().max(), 1e-3)
        own = ~np.isnan(rows)
        assert np.isnan(together[own]).all()
        together[own] = rows[own]
    np.testing.assert_allclose(together, out, rtol=10 * within, atol=10 * within)


def on_near_nodes(rank):
    """Edges to near nodes only, so that few parts have to do with other ranks."""
    torch.manual_seed(0)
    targets = torch.arange(600).repeat_interleave(4)
    sources = (targets + torch.randint(-5, 6, targets.shape)).clamp(0, 599)
    graph = Graph(
        features=torch.randn(600, 6).double(), edges=torch.stack([sources, targets]), targets=targets[::4] % 4
    )
    model = model_of("wide", torch.float64)
    group = None if rank is None else torch.distributed.group.WORLD
    step = GraphStep(model, graph, "400KiB", group=group)
    loss = step()
    return loss, [parameter.grad for parameter in model.parameters()], len(step._marginal), step.parts


@pytest.mark.slow
def test_parts_are_computed_while_messages_travel():
    loss, gradients, *_ = on_near_nodes(None)
    for other, theirs, marginal, parts in ranks.run(on_near_nodes, 2):
        assert 0 < marginal < parts
        torch.testing.assert_close(other, loss, rtol=1e-12, atol=0)
        for one, gradient in zip(gradients, theirs, strict=True):
            assert (gradient - one).abs().max() <= 1e-12 * one.abs().max()


def draws(rank):
    """Gradients with rounded messages, of two like steps, and whether torch's random state is as before."""
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        model, graph = model_of("wide", torch.float32), made(600, weights=False, dtype=torch.float32)
        step = GraphStep(model, graph, "1MiB", group=torch.distributed.group.WORLD, message_bits=2)
        before = torch.get_rng_state()
        step()
        found.append([parameter.grad for parameter in model.parameters()])
    return found, torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_rounding_has_random_numbers_of_its_own():
    for (first, second), is_same in ranks.run(draws, 2):
        assert is_same and all(map(torch.equal, first, second))


@pytest.mark.slow
def test_few_bits_send_fewer_bytes_and_near_gradients():
    exact = ranks.run(on_rank, 2, "wide", torch.float32, "1MiB", None)
    for bits, fewer, near in ((6.5, 4, 0.15), (2, 9, 3)):
        found = ranks.run(on_rank, 2, "wide", torch.float32, "1MiB", bits)
        assert exact[0][3] > fewer * found[0][3] and exact[1][3] > fewer * found[1][3]
        for one, gradient in zip(exact[0][1], found[0][1], strict=True):
            assert 0 < (gradient - one).norm() < near * one.norm()
            assert torch.equal(gradient, found[1][1][list(map(id, found[0][1])).index(id(gradient))])


def test_bits_out_of_range_are_refused():
    found = ranks.run(refused, 1)
    assert found == ["message_bits is 9; give a number from 2 to 8, or None for exact."]


def refused(rank):
    try:
        on_rank(rank, "sage", torch.float32, "1MiB", 9)
    except OptionError as error:
        return str(error)


def of_a_shared_stage(rank):
    torch.manual_seed(1)
    shared = Sage(8, 8)
    model = nn.Sequential(Sage(6, 8), shared, nn.ReLU(), shared, Sage(8, 4)).double()
    group = None if rank is None else torch.distributed.group.WORLD
    GraphStep(model, made(600), "200KiB", group=group)()
    return [parameter.grad for parameter in model.parameters()]


def test_a_stage_that_is_there_twice_is_added_up_once():
    wanted = of_a_shared_stage(None)
    for found in ranks.run(of_a_shared_stage, 2):
        for one, gradient in zip(wanted, found, strict=True):
            assert (gradient - one).abs().max() <= 1e-12 * max(one.abs().max(), 1e-3)


class ByRank(nn.Module):
    """Of its parameters each rank reads another one, and none the last."""

    def __init__(self, number):
        super().__init__()
        self.scales, self.number = nn.ParameterList([torch.ones(1).double()] * 3), number

    def forward(self, output, target):
        return nn.functional.cross_entropy(output * self.scales[self.number], target, reduction="none")


def with_parameters_by_rank(rank):
    torch.manual_seed(1)
    model, loss = nn.Sequential(Sage(6, 4)).double(), ByRank(rank or 0)
    group = None if rank is None else torch.distributed.group.WORLD
    GraphStep(model, made(600), "200KiB", loss_fn=loss, group=group)()
    return model[0].own.weight.grad, [scale.grad for scale in loss.scales]


def test_ranks_have_a_gradient_where_one_of_them_has():
    wanted, (whole, *_) = with_parameters_by_rank(None)
    for found, (first, second, last) in ranks.run(with_parameters_by_rank, 2):
        assert (found - wanted).abs().max() <= 1e-12 * wanted.abs().max()
        torch.testing.assert_close(first + second, whole, rtol=1e-12, atol=0)
        assert first != second and last is None
