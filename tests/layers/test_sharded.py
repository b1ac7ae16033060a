"""Experts on several ranks compute what one process does, in every mode, within their budget."""

import math

import pytest
import torch

from squeezebox import BudgetError, OptionError, UnsupportedModelError, layers, memory
from squeezebox.layers._dispatch import Sizes, dispatch, pair_elements
from tests.pipeline import ranks

EXPERTS, DIM, HIDDEN = 4, 24, 40
SIZES = Sizes(dim=DIM, hidden=HIDDEN, choices=2, itemsize=4)


def whole():
    torch.manual_seed(0)
    return layers.ExpertMLP(EXPERTS, DIM, HIDDEN)


def routed(rank, kind, tokens=(40, 300, 7, 0)):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens[rank], DIM, generator=generator).requires_grad_()
    gates, ids = torch.randn(tokens[rank], EXPERTS, generator=generator).softmax(-1).topk(2, -1)
    if kind == "one":
        ids = torch.zeros_like(ids)
    if kind == "columns":  # as of topk(2, dim=0), transposed
        gates, ids = (each.t().contiguous().t() for each in (gates, ids))
    return x, ids, gates.detach().requires_grad_()


def on_rank(rank, world, kind, mode, budget=None):
    model, here = whole(), EXPERTS // world
    layer = layers.Experts(EXPERTS, DIM, HIDDEN, mode=mode, budget_bytes=budget)
    with torch.no_grad():
        layer.first.copy_(model.first[rank * here : (rank + 1) * here])
        layer.second.copy_(model.second[rank * here : (rank + 1) * here])
    x, ids, gates = routed(rank, kind)
    out = layer(x, ids, gates)
    out.square().sum().backward()
    return out.detach(), [x.grad, gates.grad], [layer.first.grad, layer.second.grad], layer.last


def check(found, world, kind):
    model = whole()
    for rank, (out, gradients, *_) in enumerate(found):
        x, ids, gates = routed(rank, kind)
        expected = model(x, ids, gates)
        expected.square().sum().backward()
        assert (out - expected).norm() <= 1e-6 * expected.norm()
        for one, other in zip(gradients, (x.grad, gates.grad), strict=True):
            assert (one - other).norm() <= 1e-6 * other.norm()
    for index, weight in enumerate((model.first, model.second)):
        joined = torch.cat([each[2][index] for each in found])
        assert (joined - weight.grad).norm() <= 1e-6 * weight.grad.norm()


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", ["usual", "one"])
@pytest.mark.parametrize("mode", ["auto", "tokens", "weights"])
def test_ranks_compute_what_one_process_does(world, kind, mode):
    found = ranks.run(on_rank, world, world, kind, mode)
    check(found, world, kind)
    assert len({each[3] for each in found}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tokens", "auto"])
def test_chunks_compute_the_same(mode):
    plain = ranks.run(on_rank, 2, 2, "one", mode)
    budget = int(max(plain[0][3].peak_bytes) * 0.6)
    found = ranks.run(on_rank, 2, 2, "one", mode, budget)
    assert found[0][3].chunks > 1
    check(found, 2, "one")


def measured(rank, kind, mode, budget):
    """A step's peak by the allocator's count, and the layer's prediction; a step before it warms up."""
    torch.manual_seed(0)
    layer = layers.Experts(4, 64, 96, mode=mode, budget_bytes=budget)
    tokens = 1024
    x = torch.randn(tokens, 64).requires_grad_()
    gates, ids = torch.randn(tokens, 4).softmax(-1).topk(2, -1)
    ids = torch.zeros_like(ids) if kind == "one" else ids
    gates.requires_grad_()
    above = torch.randn(tokens, 64)

    def step():
        for each in (x, gates, layer.first, layer.second):
            each.grad = None
        out = layer(x, ids, gates)
        out.backward(above)

    step()
    for each in (x, gates, layer.first, layer.second):
        each.grad = None
    meter = memory.PeakMeter(torch.device("cpu"))
    assert meter.start()
    step()
    return meter.stop(()).total_bytes, layer.last


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["usual", "one"])
@pytest.mark.parametrize("mode", ["tokens", "weights", "auto"])
@pytest.mark.parametrize("budget", [None, 2_500_000])
def test_the_peak_is_predicted_and_stays_within_the_budget(kind, mode, budget):
    found = ranks.run(measured, 2, kind, mode, budget)
    for rank, (peak, plan) in enumerate(found):
        assert budget is None or peak <= budget, (rank, plan)
    worst = max(range(2), key=lambda rank: found[rank][0])
    assert max(found[0][1].peak_bytes) == pytest.approx(found[worst][0], rel=0.05)


def counted(rank, kind, mode):
    """Bytes that a step hands to other ranks, and what the layer said."""
    moved = []
    send, swap = torch.distributed.send, torch.distributed.all_to_all_single

    def count_send(tensor, *rest, **options):
        moved.append(tensor.nbytes)
        return send(tensor, *rest, **options)

    def count_swap(got, given, out, into, **options):
        moved.append(sum(rows for other, rows in enumerate(into) if other != rank) * given.shape[1] * 4)
        return swap(got, given, out, into, **options)

    torch.distributed.send, torch.distributed.all_to_all_single = count_send, count_swap
    last = on_rank(rank, 2, kind, mode)[3]
    return sum(moved), last


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["usual", "one"])
@pytest.mark.parametrize("mode", ["auto", "tokens", "weights"])
def test_moved_bytes_are_those_that_were_said(kind, mode):
    found = ranks.run(counted, 2, kind, mode)
    assert sum(moved for moved, _ in found) == found[0][1].moved_bytes > 0


def refused(rank, kind):
    layer = layers.Experts(EXPERTS, DIM, HIDDEN, budget_bytes=1000 if kind == "budget" else None)
    x, ids, gates = routed(rank, "usual")
    if kind == "nan":
        gates = torch.where(torch.arange(len(x))[:, None] == 3, torch.nan, gates.detach())
        return layer(x, ids, gates).isnan().any(1).nonzero().flatten().tolist()
    if kind == "ids" and rank == 1:
        ids = ids + 1
    layer(x, ids, gates)


@pytest.mark.slow
def test_bad_input_is_refused_on_every_rank():
    first, second = ranks.run(refused, 2, "ids")
    assert "Rank 1 has tokens or routing that the layer does not take" in first
    assert "and there are 0 to 3" in second
    assert all("the budget is 1000" in each for each in ranks.run(refused, 2, "budget"))
    assert ranks.run(refused, 2, "nan") == [[3], [3]]


def drawn(rank):
    torch.manual_seed(0)
    layer = layers.Experts(EXPERTS, DIM, HIDDEN)
    x, ids, gates = routed(rank, "usual")
    said = []
    for given, autocast in ((x, rank == 0), (x.double(), False)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            try:
                layer(given, ids, gates)
            except (OptionError, UnsupportedModelError) as error:
                said.append(str(error))
    return layer.first.detach(), layer.second.detach(), torch.rand(3), said


def test_experts_are_those_of_one_process_and_other_numbers_are_refused():
    model, after = whole(), torch.rand(3)
    found = ranks.run(drawn, 2)
    assert torch.equal(torch.cat([each[0] for each in found]), model.first)
    assert torch.equal(torch.cat([each[1] for each in found]), model.second)
    assert all(torch.equal(each[2], after) for each in found)
    (autocast, wrong), (other, _) = (each[3] for each in found)
    assert "leave autocast" in autocast and "Rank 0 has tokens or routing" in other
    assert "do not match experts of 24 features in torch.float32" in wrong


def undivided(rank):
    layers.Experts(3, DIM, HIDDEN)


@pytest.mark.slow
def test_ranks_that_do_not_divide_the_experts():
    assert all("2 ranks do not divide 3 experts" in each for each in ranks.run(undivided, 2))


def test_moved_bytes_are_the_fewer_ones_for_every_rank_and_expert():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        some = torch.randint(2, (2, 4), generator=generator)
        counts = torch.randint(400, (2, 4), generator=generator) * some * 2
        counts = tuple(tuple(row) for row in counts.tolist())
        modes = ("auto", "tokens", "weights")
        moved = {mode: dispatch(counts, SIZES, mode, None).moved_bytes for mode in modes}
        elsewhere = [counts[0][2], counts[0][3], counts[1][0], counts[1][1]]
        assert moved["tokens"] == sum(elsewhere) * pair_elements(SIZES) * 4
        assert moved["weights"] == sum(count > 0 for count in elsewhere) * 9 * DIM * HIDDEN * 4
        assert moved["auto"] <= min(moved["tokens"], moved["weights"])


def test_chunks_grow_until_the_budget_holds():
    counts = ((600, 0, 0, 0), (600, 0, 0, 0))
    plain = dispatch(counts, SIZES, "tokens", None)
    tight = dispatch(counts, SIZES, "tokens", max(plain.peak_bytes) // 2)
    assert tight.chunks > 1
    assert max(tight.peak_bytes) <= max(plain.peak_bytes) // 2
    assert sum(math.prod([tight.sent(0, 0, chunk)]) for chunk in range(tight.chunks)) == 600
    with pytest.raises(BudgetError, match="in 600 chunks, and the budget is 1000"):
        dispatch(counts, SIZES, "tokens", 1000)


@pytest.mark.parametrize("kind", ["usual", "columns"])
def test_a_group_of_one(tmp_path, kind):
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        check([on_rank(0, 1, kind, "auto")], 1, kind)
    finally:
        torch.distributed.destroy_process_group()
