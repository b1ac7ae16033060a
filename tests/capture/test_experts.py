"""Experts and graph layers: what they gather is gathered again, and routing may differ from the sample's."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import squeezebox
from squeezebox import layers
from squeezebox.schema import OptionError, PlanError
from tests.capture.test_lineage import gradients

WIDTH, EXPERTS = 48, 4


class Routed(nn.Module):
    """Two experts a token, in one of the forms that models have them."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 96) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 96, WIDTH) / 96**0.5)

    def forward(self, x):
        gates, experts = self.router(x).softmax(-1).topk(2, -1)
        return x + getattr(self, self.form)(x, gates, experts)

    def loop(self, x, gates, experts):
        result = torch.zeros_like(x)
        for number in range(EXPERTS):
            tokens, place = torch.where(experts == number)
            found = F.silu(x[tokens] @ self.up[number]) @ self.down[number]
            result = result.index_add(0, tokens, found * gates[tokens, place, None])
        return result

    def grouped(self, x, gates, experts):
        order = experts.flatten().argsort(stable=True)
        tokens = order // 2
        ends = F.one_hot(experts.flatten(), EXPERTS).sum(0).cumsum(0).to(torch.int32)
        found = F.grouped_mm(F.silu(F.grouped_mm(x[tokens], self.up, offs=ends)), self.down, offs=ends)
        return torch.zeros_like(x).index_add(0, tokens, found * gates.flatten()[order][:, None])


def network(form, depth=1):
    torch.manual_seed(0)
    blocks = [layer for _ in range(depth) for layer in (nn.LayerNorm(WIDTH), Routed(form))]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 8))


def towards(model, chosen):
    """Every router sends all tokens to expert ``chosen`` first."""
    for layer in model:
        if isinstance(layer, Routed):
            with torch.no_grad():
                layer.router.bias.zero_()
                layer.router.bias[chosen] = 50.0


@pytest.mark.parametrize("form", ("loop", "grouped"))
def test_experts_are_exact_whatever_the_routing(form):
    model, x, y = network(form), torch.randn(256, WIDTH), torch.randint(8, (256,))
    plan = squeezebox.plan(model, sample=(x, y), loss_fn=F.cross_entropy, exact=True, offload=False)
    assert plan.predicted_peak_bytes < 0.9 * plan.plain_peak_bytes
    for change in (None, 0, 3):
        if change is not None:
            towards(model, change)
        expected = gradients(model, x, y)
        session = squeezebox.attach(model, plan=plan)
        found = gradients(model, x, y)
        notes = session.report().record.notes
        session.detach()
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        larger = any("larger than planned" in note for note in notes)
        assert larger is (form == "loop" and change is not None)


def test_a_larger_batch_is_refused_before_any_routing():
    model, x, y = network("loop"), torch.randn(128, WIDTH), torch.randint(8, (128,))
    plan = squeezebox.plan(model, sample=(x, y), loss_fn=F.cross_entropy, exact=True, offload=False)
    session = squeezebox.attach(model, plan=plan)
    with pytest.raises(PlanError, match="larger|saves"):
        model(torch.cat([x, x]))
    session.detach()


def test_the_error_law_of_grouped_experts_is_that_of_each_in_turn():
    errors = {}
    for form in ("loop", "grouped"):
        model, x, y = network(form, depth=2), torch.randn(256, WIDTH), torch.randint(8, (256,))
        expected = torch.cat([a.flatten() for a in gradients(model, x, y)])
        session = squeezebox.attach(model, noise=1e-2)
        checks = {}
        for _ in range(4):
            found = torch.cat([a.flatten() for a in gradients(model, x, y)])
            checks |= {check.key: check for check in session.report().checks}
        errors[form] = float((found - expected).norm() / expected.norm())
        session.detach()
        grouped = [check for key, check in checks.items() if "GroupedMm.self" in key]
        assert bool(grouped) is (form == "grouped")
        assert all(0.6 < check.measured / check.predicted < 1.5 for check in grouped)
    assert 0.8 < errors["grouped"] / errors["loop"] < 1.25


def test_ids_out_of_range_end_one_step_under_a_plan_and_not_the_next():
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.experts = nn.Linear(WIDTH, 4), layers.ExpertMLP(4, WIDTH, 32)
            self.offset = 0

        def forward(self, x):
            gates, ids = self.router(x).softmax(-1).topk(2, -1)
            return self.experts(x, ids + self.offset, gates)

    torch.manual_seed(0)
    model, x, y = Chosen(), torch.randn(64, WIDTH), torch.randint(8, (64,))
    plan = squeezebox.plan(model, sample=(x, y), loss_fn=F.cross_entropy, noise=1e-2, offload=False)
    session = squeezebox.attach(model, plan=plan)
    before = gradients(model, x, y)
    model.offset = 4
    with pytest.raises(OptionError, match="there are 0 to 3"):
        model(x)
    model.offset = 0
    assert all(map(torch.equal, gradients(model, x, y), before))
    session.detach()


@pytest.mark.parametrize("form", ("loop", "grouped"))
def test_nan_in_a_router_is_as_it_is_in_plain_torch(form):
    model, x, y = network(form), torch.randn(64, WIDTH), torch.randint(8, (64,))
    plan = squeezebox.plan(model, sample=(x.clone(), y), loss_fn=F.cross_entropy, noise=1e-2, offload=False)
    x[3] = float("nan")
    expected = gradients(model, x, y)
    for options in ({"exact": True}, {"plan": plan}):
        session = squeezebox.attach(model, **options)
        found = gradients(model, x, y)
        session.detach()
        assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(expected, found, strict=True))


def edges():
    torch.manual_seed(0)
    return torch.randint(200, (2, 2000))


def adjacency(source, target):
    indices = torch.stack([target, source])
    with torch.sparse.check_sparse_tensor_invariants():  # or else torch 2.11 warns
        return torch.sparse_coo_tensor(indices, torch.ones(len(source)), (200, 200))


def summed(x, source, target):
    return torch.zeros(200, x.shape[1]).index_add(0, target, x[source])


def mean(x, source, target):
    index = target[:, None].expand(-1, x.shape[1])
    return torch.zeros(200, x.shape[1]).scatter_reduce(0, index, x[source], "mean", include_self=False)


def segments(x, source, target):
    ordered, places = target.sort()
    lengths = torch.bincount(ordered, minlength=200)
    return torch.segment_reduce(x[source[places]], "mean", lengths=lengths, initial=0.0)


def scattered(x, source, target):
    return torch.zeros(200, x.shape[1]).scatter_add(0, target[:, None].expand(-1, x.shape[1]), x[source])


def hypergraph(x, source, target):
    edge = torch.zeros(200, x.shape[1]).index_add(0, target, x.index_select(0, source))
    return torch.zeros(200, x.shape[1]).index_add(0, source, edge.index_select(0, target))


def propagated(x, source, target):
    matrix, start = adjacency(source, target), x
    for _ in range(3):
        x = 0.9 * torch.sparse.mm(matrix, x) / 10 + 0.1 * start
    return x


@pytest.mark.parametrize("aggregate", (summed, mean, segments, scattered, hypergraph, propagated))
def test_aggregation_holds_no_values(aggregate):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 32) / 6)

        def forward(self, x):
            return 2.0 * aggregate(x @ self.weight, *edges())  # else the next product holds it

    model, x = nn.Sequential(Layer(), Layer(), Layer()), torch.randn(200, 32)
    goal = torch.zeros(200, 32)
    model.zero_grad()
    F.mse_loss(model(x), goal).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    session = squeezebox.attach(model, exact=True)
    model.zero_grad()
    F.mse_loss(model(x), goal).backward()
    rows = session.report().record.tensors
    session.detach()
    assert all(torch.equal(a, p.grad) for a, p in zip(expected, model.parameters(), strict=True))
    seen = [row for row in rows if "float" in row.dtype and ":Mm." not in row.key]
    assert [row.key for row in seen if row.packed_bytes] == []


def of_transformers(family, experts):
    """A small network, and its loss."""
    transformers = pytest.importorskip("transformers")
    sizes = {"num_local_experts": 4}
    if family == "Qwen2Moe":
        sizes = {"num_experts": 4, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 96}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts_per_tok=2,
        use_cache=False,
        **sizes,
    )
    config._experts_implementation = experts
    network = getattr(transformers, f"{family}ForCausalLM")(config).train()

    def loss_fn(output, target):
        return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())

    return network, loss_fn


@pytest.mark.slow
@pytest.mark.parametrize("family", ("Mixtral", "Qwen2Moe"))
def test_a_plan_for_a_network_of_transformers_has_the_noise_that_was_allowed(family):
    network, loss_fn = of_transformers(family, "grouped_mm")
    sample, other = torch.randint(64, (2, 8, 64))
    plan = squeezebox.plan(
        network, sample=(sample, sample.roll(-1, 1)), loss_fn=loss_fn, noise=1e-2, offload=False
    )
    assert 0.0 < plan.predicted_noise <= 1e-2
    session = squeezebox.attach(network, plan=plan)
    noise = [
        session.measure_noise(lambda: loss_fn(network(each), each.roll(-1, 1)).backward())  # noqa: B023
        for each in (sample, other)
    ]
    session.detach()
    assert noise[0] <= 1e-2 and noise[1] <= 2e-2


@pytest.mark.slow
@pytest.mark.parametrize("family", ("Mixtral", "Qwen2Moe"))
@pytest.mark.parametrize("experts", ("eager", "batched_mm", "grouped_mm"))
def test_unmodified_networks_of_transformers_are_exact_under_a_plan(family, experts):
    network, loss_fn = of_transformers(family, experts)

    def results(tokens):
        network.zero_grad()
        loss = loss_fn(network(tokens), tokens.roll(-1, 1))
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in network.parameters())]

    sample = torch.randint(64, (4, 64))
    batches = (sample, torch.randint(64, (4, 64)), torch.full_like(sample, 5))
    expected = [results(tokens) for tokens in batches]
    plan = squeezebox.plan(
        network, sample=(sample, sample.roll(-1, 1)), loss_fn=loss_fn, exact=True, offload=False
    )
    assert plan.predicted_peak_bytes < 0.8 * plan.plain_peak_bytes
    session = squeezebox.attach(network, plan=plan)
    found = [results(tokens) for tokens in batches]
    session.detach()
    for one, other in zip(expected, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
