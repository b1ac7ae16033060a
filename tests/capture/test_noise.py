"""Noise that user code draws is drawn again, to the bit, and every generator stays as the caller has it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import squeezebox
from squeezebox.capture import Onlooker
from squeezebox.capture._repeatable import RandomState
from squeezebox.schema import Action
from tests.capture.test_lineage import Wrapped, gradients, recomputed, session_of


def drawn(make):
    """Two products with the noise, which backward reads."""

    def function(x, w, v):
        return torch.sigmoid((x * make(x)) @ w) @ (v * make(v))

    return function


def own_generator(x):
    generator = torch.Generator().manual_seed(x.numel())
    return torch.randn(x.shape, generator=generator) + torch.empty_like(x).uniform_(generator=generator)


def drop_path(x):
    keep = 0.7
    return x * 2.0 * x.new_empty(x.shape).bernoulli_(keep).div_(keep)


def gumbel(x):
    return -torch.log(torch.empty_like(x, memory_format=torch.legacy_contiguous_format).exponential_())


def reparameterised(x):
    return torch.distributions.Normal(x, F.softplus(x)).rsample()


def standard(x):
    return torch.distributions.Normal(0.0, 1.0).sample(x.size())


def thresholded(x):
    return (torch.rand_like(x) > 0.3).float() / 0.7


def diffused(x):
    t = torch.randint(0, 100, (x.shape[0], *[1] * (x.dim() - 1)))
    alpha = torch.cos(torch.linspace(0, 1.5, 100))[t]
    return alpha * x + (1 - alpha**2).sqrt() * torch.randn_like(x)


def columns_first(x):
    return torch.randn_like(x.mT.contiguous().mT)


NOISE = {
    "randn": lambda x: torch.randn(*x.shape),
    "rand": lambda x: torch.rand(x.shape),
    "normal": lambda x: torch.normal(1.0, 2.0, tuple(x.shape)),
    "normal_of_tensors": lambda x: torch.normal(x, x.abs() + 0.1),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    "randn_like": torch.randn_like,
    "rand_like": lambda x: torch.rand_like(x),
    "normal_": lambda x: torch.empty_like(x).normal_(0.5, 0.1),
    "uniform_": lambda x: torch.empty(x.shape).uniform_(-1, 1),
    "zeros_then_normal_": lambda x: torch.zeros_like(x).normal_(),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x + 0.0, tau=0.7),
    "rrelu_like": lambda x: torch.where(x > 0, x, x * torch.empty_like(x).uniform_(0.1, 0.3)),
    **{
        function.__name__: function
        for function in (own_generator, drop_path, gumbel, reparameterised, standard, thresholded)
    },
    **{function.__name__: function for function in (diffused, columns_first)},
}


@pytest.mark.parametrize("name", NOISE)
def test_each_kind_of_noise_is_drawn_again(name):
    torch.manual_seed(0)
    model, x, y = Wrapped(drawn(NOISE[name])), torch.randn(4, 32, 48), torch.randint(5, (128,))
    expected = gradients(model, x, y)
    session, found = session_of(model, x, y)
    noise = [key for key in found if ":Mul.other" in key or ":Softmax" in key]
    assert noise, found
    for plan in (found, *({key: found[key]} for key in noise)):
        session.engine.store.planned = recomputed(plan)
        results = gradients(model, x, y)
        assert all(torch.equal(a, b) for a, b in zip(expected, results, strict=True)), plan
        rows = {row.key: row for row in session.report().record.tensors}
        assert all(rows[key].packed_bytes == 0 for key in plan)
    session.detach()


class Moved(nn.Module):
    """Draws from a generator of its own, and from the global one."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        noise = torch.randn(64, 64, generator=self.generator)
        return F.dropout(torch.tanh(x @ (self.weight * noise)), 0.5) * torch.rand_like(x)


def one_step(model, x, between):
    torch.manual_seed(3)
    model.generator.manual_seed(7)
    model.zero_grad()
    loss = model(x).square().mean()
    between(model)
    loss.backward()
    return model.weight.grad, torch.get_rng_state(), model.generator.get_state()


@pytest.mark.parametrize(
    "between",
    (
        lambda model: None,
        lambda model: (torch.randn(1000), torch.rand(3, generator=model.generator)),
        lambda model: (torch.manual_seed(11), model.generator.manual_seed(12)),
    ),
)
def test_a_generator_that_moved_changes_nothing_and_stays_where_it_is(between):
    torch.manual_seed(0)
    model, x = Moved(), torch.randn(64, 64)
    expected = one_step(model, x, between)
    sample = (x, torch.zeros(64, 64))
    plan = squeezebox.plan(model, sample=sample, loss_fn=F.mse_loss, exact=True, offload=False)
    assert {Action.REGENERATE} <= {option.action for option in plan.options.values()}
    session = squeezebox.attach(model, plan=plan)
    found = one_step(model, x, between)
    session.detach()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_plan_draws_bayesian_weights_again():
    class Bayesian(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.mu = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
            self.rho = nn.Parameter(torch.full((outputs, inputs), -3.0))

        def forward(self, x):
            return F.linear(x, self.mu + F.softplus(self.rho) * torch.randn_like(self.mu))

    class Sampled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Bayesian(64, 128), Bayesian(128, 8)

        def forward(self, x):
            return torch.stack([self.second(F.relu(self.first(x))) for _ in range(6)]).mean(0)

    torch.manual_seed(0)
    model, x, y = Sampled(), torch.randn(16, 64), torch.randint(8, (16,))
    expected = gradients(model, x, y)
    plan = squeezebox.plan(model, sample=(x, y), loss_fn=F.cross_entropy, exact=True, offload=False)
    noise = [each for each in plan.tensors if "Mul.other" in each.key and each.saved_bytes >= 2**15]
    assert len(noise) == 6
    again = [each for each in noise if each.option.action is Action.REGENERATE]
    assert len(again) >= 3  # others are as cheap to keep where the peak is elsewhere
    assert 12 * sum(each.option.held_bytes for each in again) < sum(each.saved_bytes for each in again)
    session = squeezebox.attach(model, plan=plan)
    found = gradients(model, x, y)
    session.detach()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert plan.predicted_peak_bytes < 0.7 * plan.plain_peak_bytes  # half of the rest are gradients


def test_a_state_is_held_in_half_its_bytes_and_given_back_whole():
    for seed in (0, 2**40 + 5, -3):
        state = torch.Generator().manual_seed(seed).get_state()
        held = RandomState(state)
        assert torch.equal(held.whole(), state)
        assert held.nbytes <= 0.52 * state.nbytes


@pytest.mark.parametrize("training", (False, True))
def test_what_draws_nothing_holds_no_state(training):
    model, seen = Wrapped(drawn(lambda x: F.dropout(x, 0.5, training))), []
    session = squeezebox.attach(model, exact=True)
    store = session.engine.store
    store.lineage = session.engine.recorder.lineage()
    with store.shown_to(Onlooker(called=seen.append)):
        model(torch.randn(4, 32, 48))
        held = sum(call.state_bytes for call in seen)
    session.detach()
    assert bool(held) is training


def test_a_named_device_and_dtype_hold_when_the_defaults_changed_since():
    model = Wrapped(drawn(lambda x: torch.randn(x.shape)))
    x, y = torch.randn(4, 32, 48), torch.randint(5, (128,))
    expected = gradients(model, x, y)
    session, found = session_of(model, x, y)
    session.engine.store.planned = recomputed(found)
    torch.manual_seed(1)
    model.zero_grad()
    loss = F.cross_entropy(model(x), y)
    torch.set_default_dtype(torch.float64)
    try:
        loss.backward()
    finally:
        torch.set_default_dtype(torch.float32)
        session.detach()
    found = [p.grad for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=False))


class Added(nn.Module):
    """Products that are added to something as large, as fused low-rank adapters are."""

    def __init__(self):
        super().__init__()
        self.base, self.up = nn.Linear(256, 256), nn.Linear(256, 64)
        self.weight = nn.Parameter(0.05 * torch.randn(64, 256))

    def forward(self, x):
        h = torch.nn.functional.gelu(self.up(x))
        return torch.addmm(self.base(x), h, self.weight) + torch.baddbmm(
            self.base(x)[None], h[None], self.weight[None]
        ).squeeze(0)


class Spread(nn.Module):
    """Reads a view that is expanded, and one of nothing."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(128, 128), nn.Linear(128, 128)
        self.conv, self.empty = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x):
        h = self.first(x)
        maps = self.conv(x.view(-1, 1, 16, 8)).relu()
        return self.last(h[:1].expand(32, 128)).sum() + self.empty(maps[:0]).sum() + maps.sum()


@pytest.mark.parametrize("make", [Added, Spread])
def test_measuring_leaves_gradients_what_they_are(make):
    torch.manual_seed(0)
    model, x = make(), torch.randn(64, 256 if make is Added else 128)

    def gradients():
        model.zero_grad()
        model(x).square().mean().backward()
        return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])

    wanted = gradients()
    session = squeezebox.attach(model, noise=1e-3)
    for _ in range(3):  # each of which gathers statistics
        found = gradients()
        assert (found - wanted).norm() <= 0.2 * wanted.norm()
    session.detach()
