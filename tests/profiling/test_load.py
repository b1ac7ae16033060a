"""Experts on fake tensors: what an assumed load says of a step is what a real step of that load takes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import squeezebox
from squeezebox.profiling import loads_named, record_step, routed
from squeezebox.schema import BudgetError, OptionError

WIDTH, EXPERTS = 64, 6


class Experts(nn.Module):
    """Those that got tokens, one after the other; ``chosen`` says who gets them."""

    def __init__(self, find, choices=2):
        super().__init__()
        self.find, self.choices, self.chosen = find, choices, None
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 128), nn.SiLU(), nn.Linear(128, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x):
        gates, ids = self.router(x).softmax(-1).topk(self.choices, -1)
        ids = ids if self.chosen is None else self.chosen(ids)
        out = x
        for number, expert in enumerate(self.experts):
            tokens, place = self.find(ids, number)
            if len(tokens):
                out = out.index_add(0, tokens, expert(x[tokens]) * gates[tokens, place][:, None])
        return out


def by_nonzero(ids, number):
    return (ids == number).nonzero().unbind(1)


def by_where(ids, number):
    mask = F.one_hot(ids, EXPERTS).permute(2, 1, 0)
    place, tokens = torch.where(mask[number])
    return tokens, place


def by_count(ids, number):
    order = ids.flatten().argsort(stable=True)
    ends = torch.bincount(ids.flatten(), minlength=EXPERTS).cumsum(0).tolist()
    rows = order[ends[number - 1] if number else 0 : ends[number]]
    return rows // ids.shape[1], rows % ids.shape[1]


def by_mask(ids, number):
    rows = torch.arange(len(ids))[(ids == number).any(1)]
    return rows, (ids[rows] == number).int().argmax(1)


def at_one(first):
    return lambda ids: ((first + torch.arange(ids.shape[1])) % EXPERTS).repeat(len(ids), 1)


def nearly_at_one(ids):
    ids = at_one(0)(ids)
    others = EXPERTS - ids.shape[1]
    ids[-others:, -1] = torch.arange(ids.shape[1], EXPERTS)
    return ids


def spread(ids):
    return (torch.arange(ids.numel()) % EXPERTS).view_as(ids)


def step_of(model):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *model, nn.Linear(WIDTH, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sample = torch.randn(512, WIDTH), torch.randint(8, (512,))
    return model, {"sample": sample, "loss_fn": F.cross_entropy, "optimizer": optimizer}


@pytest.mark.parametrize(
    ("find", "choices"),
    (
        (by_nonzero, 2),
        pytest.param(by_where, 1, marks=pytest.mark.slow),
        pytest.param(by_count, 2, marks=pytest.mark.slow),
        pytest.param(by_mask, 1, marks=pytest.mark.slow),
    ),
)
def test_an_assumed_load_is_that_of_a_real_step(find, choices):
    layers = [Experts(find, choices)]
    model, step = step_of(layers)
    found = {load: squeezebox.estimate(model, load=load, **step) for load in ("balanced", "worst")}
    assert all(each.assumed_load == load and not each.why_real for load, each in found.items())
    assert "load is taken to be worst" in str(found["worst"])
    peaks = {}
    loads = {0: at_one(0), 5: at_one(5), "nearly": nearly_at_one, "own": None}
    for name, chosen in ({"balanced": spread} | loads).items():
        for layer in layers:
            layer.chosen = chosen
        peaks[name] = record_step(model, **step).peak().nbytes
    assert found["balanced"].peak_bytes == pytest.approx(peaks["balanced"], rel=0.05)
    assert found["worst"].peak_bytes >= max(peaks.values())
    assert found["worst"].peak_bytes <= 1.05 * max(peaks.values())


def test_integers_of_the_sample_are_followed():
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.linear = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, tokens):
            return self.linear(self.embedding(tokens)[tokens > 0])

    tokens = torch.zeros(8, 64, dtype=torch.int64)
    tokens[:, :10] = 3
    before, model = tokens.clone(), Padded()
    loss_fn = lambda output, _: output.square().sum()  # noqa: E731
    found = squeezebox.estimate(model, sample=(tokens, torch.zeros(())), loss_fn=loss_fn, optimizer="sgd")
    assert (found.assumed_load, found.why_real) == ("", "") and torch.equal(tokens, before)
    peak = record_step(model, sample=(tokens, torch.zeros(())), loss_fn=loss_fn).peak().nbytes
    assert found.peak_bytes == pytest.approx(peak, rel=0.01)


def test_a_load_of_another_name():
    model, step = step_of([Experts(by_nonzero)])
    for function in (squeezebox.estimate, squeezebox.plan, squeezebox.find_batch):
        with pytest.raises(OptionError, match="load 'even' is neither 'balanced' nor 'worst'"):
            function(model, load="even", **step)


def test_what_routers_choose_by_a_load_has_its_own_scores():
    scores = torch.randn(12, 4, requires_grad=True)
    with routed(*loads_named("balanced")):
        values, ids = scores.topk(2, -1)
        best, last = scores.max(-1), scores.argmin(-1)
    assert torch.equal(torch.bincount(ids.flatten()), torch.full((4,), 6))
    assert torch.equal(values, scores.gather(1, ids))
    assert torch.equal(best.values, scores.gather(1, best.indices[:, None])[:, 0])
    assert torch.equal(last, torch.arange(12) % 4)
    values.sum().backward()
    assert torch.equal(scores.grad, torch.zeros(12, 4).scatter(1, ids, 1.0))
    with routed(loads_named("worst")[0]):
        assert torch.equal(scores.topk(2, -1).indices, torch.tensor([0, 1]).repeat(12, 1))


@pytest.mark.slow
def test_a_plan_for_the_worst_load_keeps_its_budget_at_every_load():
    layers = [Experts(by_nonzero)]
    model, step = step_of(layers)
    lowest = squeezebox.plan(model, exact=True, offload=False, load="worst", **step)
    budget = int(1.05 * lowest.worst_peak_bytes)
    plan = squeezebox.plan(model, exact=True, offload=False, load="worst", budget=budget, **step)
    assert plan.budget_bytes == budget >= plan.worst_peak_bytes
    for chosen in (None, spread, at_one(0), at_one(5), nearly_at_one):
        for layer in layers:
            layer.chosen = chosen
        session = squeezebox.attach(model, plan=plan)
        for _ in range(2):
            step["optimizer"].zero_grad()
            step["loss_fn"](model(step["sample"][0]), step["sample"][1]).backward()
            step["optimizer"].step()
        assert session.report().record.peak_bytes <= budget
        session.detach()
    with pytest.raises(BudgetError):
        squeezebox.plan(
            model, exact=True, offload=False, load="worst", budget=lowest.worst_peak_bytes // 2, **step
        )


@pytest.mark.slow
@pytest.mark.parametrize("family", ("Mixtral", "Qwen2Moe"))
@pytest.mark.parametrize("form", ("eager", "batched_mm", "grouped_mm"))
def test_networks_of_transformers_are_estimated_at_a_load(family, form):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    experts = {"num_local_experts" if family == "Mixtral" else "num_experts": 4}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=256,
        moe_intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts_per_tok=2,
        use_cache=False,
        **experts,
    )
    config._experts_implementation = form
    model = getattr(transformers, f"{family}ForCausalLM")(config).train()
    tokens = torch.randint(64, (32, 32))
    step = {
        "sample": (tokens, tokens.roll(-1, 1)),
        "loss_fn": lambda output, target: F.cross_entropy(output.logits.flatten(0, 1), target.flatten()),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.0),
    }
    found = {load: squeezebox.estimate(model, load=load, **step) for load in ("balanced", "worst")}
    assert not any(each.why_real for each in found.values())
    routers = [each for each in model.modules() if type(each).__name__.endswith("TopKRouter")]
    peaks = {}
    for name, ids in {
        "balanced": torch.arange(2 * tokens.numel()).view(-1, 2) % 4,
        0: torch.tensor([0, 1]).repeat(tokens.numel(), 1),
        2: torch.tensor([2, 3]).repeat(tokens.numel(), 1),
    }.items():
        hooks = [each.register_forward_hook(lambda m, a, out, ids=ids: (*out[:2], ids)) for each in routers]
        peaks[name] = record_step(model, **step).peak().nbytes
        for hook in hooks:
            hook.remove()
    assert routers and found["balanced"].peak_bytes == pytest.approx(peaks["balanced"], rel=0.05)
    assert found["worst"].peak_bytes >= max(peaks.values())
