"""Inputs that a plan was not made for: refused, or planned for before they run; losses under step()."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import squeezebox
from squeezebox.planning import _attach
from squeezebox.profiling import PeakMeter
from squeezebox.schema import Action, BudgetError, OptionError, PlanError
from tests.planning.test_max_batch import batch, network
from tests.planning.test_plan import measured_peak


class Counted(nn.Module):
    def __init__(self, body=None):
        super().__init__()
        self.body, self.calls = body or network(), 0

    def forward(self, x):
        self.calls += 1
        return self.body(x)


def gradients(model, x, y, loss_fn=F.cross_entropy, frame=None):
    for parameter in model.parameters():
        parameter.grad = None
    if frame is None:
        loss = loss_fn(model(x), y)
    else:
        with frame():
            loss = loss_fn(model(x), y)
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("framed", (True, False))
def test_a_larger_batch_is_planned_before_it_runs(framed):
    model = Counted()
    expected = {size: gradients(model, *batch(size)) for size in (4, 6, 12, 16)}
    session = squeezebox.attach(
        model, budget="300%", exact=True, sample=batch(4), loss_fn=F.cross_entropy, on_mismatch="replan"
    )
    planned = session.engine.plan
    for size, plans in ((4, 0), (12, 1), (6, 0), (16, 1), (4, 0), (12, 0), (16, 0)):
        before = model.calls
        found = gradients(model, *batch(size), frame=session.step if framed else None)
        assert (model.calls - before > 1) == bool(plans), size
        assert all(torch.equal(a, b) for a, b in zip(expected[size], found, strict=True))
        assert session.engine.plan.budget_bytes == planned.budget_bytes
        assert session.report().record.notes == ()
        assert {row.key for row in session.report().tensors} <= {t.key for t in session.engine.plan.tensors}
    assert session.engine.plan is not planned
    session.detach()
    assert "forward" not in model.__dict__
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def test_a_replanned_step_stays_within_the_budget():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x, y = batch(11)
    session = squeezebox.attach(
        model,
        optimizer=optimizer,
        budget="100%",
        sample=batch(8),
        loss_fn=F.cross_entropy,
        on_mismatch="replan",
    )
    gradients(model, x, y)
    for _ in range(2):
        gradients(model, x, y)
        session.report()
    assert measured_peak(model, optimizer, (x, y)) <= session.engine.plan.budget_bytes
    with pytest.raises(BudgetError, match="too small"):
        gradients(model, *batch(256))
    gradients(model, x, y)
    session.detach()


def test_what_a_plan_may_not_do_other_inputs_plans_do_not_either():
    model = network()
    step = {"sample": batch(4), "loss_fn": F.cross_entropy}
    plan = squeezebox.plan(model, exact=True, offload=False, recompute=False, time_limit=99.0, **step)
    session = squeezebox.attach(model, plan=plan, on_mismatch="replan", **step)
    gradients(model, *batch(8))
    other = session.engine.plan
    session.detach()
    assert other is not plan and not other.keys(Action.OFFLOAD, Action.RECOMPUTE)
    assert (other.without, other.time_limit) == (("offload", "recompute"), 99.0)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(50, 64), nn.Linear(64, 50)

    def forward(self, tokens, scale=1.0):
        return self.layer(torch.tanh(self.embedding(tokens)) * scale)


@pytest.mark.parametrize("flat", (True, False))
def test_a_longer_sequence_is_planned_with_a_longer_target(flat):
    model = Tokens()

    def loss(out, target):
        return F.cross_entropy(out.flatten(0, 1), target.flatten())

    def tokens(rows, length):
        y = torch.randint(50, (rows, length))
        return torch.randint(50, (rows, length)), y.flatten() if flat else y

    session = squeezebox.attach(
        model, budget="300%", noise=1e-2, sample=tokens(4, 32), loss_fn=loss, on_mismatch="replan"
    )
    small = session.engine.plan
    gradients(model, *tokens(4, 48), loss)
    assert session.engine.plan is not small and session.report().record.notes == ()
    gradients(model, *tokens(2, 40), loss)
    gradients(model, *tokens(4, 16), loss)
    assert session.report().record.notes == ()
    session.detach()


def test_where_no_plan_can_be_made_unknown_tensors_are_exact_and_noted():
    model = Tokens()
    x, y = torch.randint(50, (4, 32)), torch.randint(50, (4, 32))

    def loss(out, target):
        return F.cross_entropy(out.flatten(0, 1), target.flatten())

    scale = torch.full((4, 32, 64), 2.0, requires_grad=True)
    loss(model(x, scale=scale), y).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    session = squeezebox.attach(
        model, budget="300%", noise=1e-2, sample=(x, y), loss_fn=loss, on_mismatch="replan"
    )
    for parameter in model.parameters():
        parameter.grad = None
    loss(model(x, scale=scale), y).backward()
    notes = " ".join(session.report().record.notes)
    assert "some of them are by place and some by keyword" in notes
    error = sum(float((p.grad - e).square().sum()) for p, e in zip(model.parameters(), expected, strict=True))
    assert error <= 0.1 * sum(float(e.square().sum()) for e in expected)
    session.detach()
    plan = squeezebox.plan(model, sample=(x, y), loss_fn=loss, exact=True)
    session = squeezebox.attach(model, plan=plan, on_mismatch="replan")
    loss(model(x.repeat(2, 1)), y.repeat(2, 1)).backward()
    assert "held exactly" in " ".join(session.report().record.notes)
    session.detach()


def test_a_target_that_cannot_follow_is_tried_once():
    model = Counted()

    def loss(out, target):
        return (out * target).sum()

    session = squeezebox.attach(
        model,
        budget="500%",
        exact=True,
        sample=(batch(4)[0], torch.ones(4, 10)),
        loss_fn=lambda out, target: loss(out, target.expand(4, 10)),
        on_mismatch="replan",
    )
    for calls in (2, 1):
        before = model.calls
        gradients(model, batch(6)[0], torch.ones(6, 10), loss)
        assert model.calls - before == calls
    assert "target float32[6, 10]" in " ".join(session.report().record.notes)
    session.detach()


def test_an_earlier_forward_in_flight_keeps_the_plan():
    model = network()
    (x, y), (more, labels) = batch(4), batch(8)
    expected = [a + b for a, b in zip(gradients(model, x, y), gradients(model, more, labels), strict=True)]
    session = squeezebox.attach(
        model, budget="300%", exact=True, sample=(x, y), loss_fn=F.cross_entropy, on_mismatch="replan"
    )
    for parameter in model.parameters():
        parameter.grad = None
    loss = F.cross_entropy(model(x), y) + F.cross_entropy(model(more), labels)
    loss.backward()
    assert "waiting for its backward" in " ".join(session.report().record.notes)
    assert all(
        torch.allclose(p.grad, e, atol=1e-6) for p, e in zip(model.parameters(), expected, strict=True)
    )
    session.detach()


def test_refusing_is_the_default_and_other_words_are_refused():
    model = network()
    session = squeezebox.attach(model, budget="100%", sample=batch(4), loss_fn=F.cross_entropy)
    with pytest.raises(PlanError, match="bytes"):
        model(batch(8)[0])
    session.detach()
    with pytest.raises(OptionError, match="neither 'refuse' nor 'replan'"):
        squeezebox.attach(model, on_mismatch="panic")
    with pytest.raises(OptionError, match="for a plan or a budget"):
        squeezebox.attach(model, on_mismatch="replan")


def test_a_refusal_names_the_mode_that_a_plan_was_made_in():
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(), nn.Linear(64, 4)).eval()
    plan = squeezebox.plan(model, sample=(torch.randn(64, 32), None), loss_fn=lambda out, _: out.sum())
    session = squeezebox.attach(model.train(), plan=plan)
    with pytest.raises(PlanError, match=r"in model\.eval\(\), .* after model\.train"):
        model(torch.randn(64, 32))
    session.detach()


def test_plans_with_states_are_not_made_anew():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"sample": (torch.randn(8, 16), torch.randint(8, (8,))), "loss_fn": F.cross_entropy}
    plan = squeezebox.plan(model, optimizer=optimizer, states=True, exact=True, offload=False, **given)
    with pytest.raises(OptionError, match="without states=True"):
        squeezebox.attach(model, optimizer=optimizer, plan=plan, on_mismatch="replan", **given)


@pytest.mark.parametrize("framed", (True, False))
def test_a_loss_outside_the_model_is_known_to_the_plan(framed):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(200, 32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 200), nn.ReLU())
    sample = torch.randint(200, (8, 32)), torch.rand(8, 32, 200)

    def loss(out, target):
        return ((out - target) * torch.sigmoid(out)).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plan = squeezebox.plan(model, sample=sample, loss_fn=loss, optimizer=optimizer, noise=1e-2)
    session = squeezebox.attach(model, optimizer=optimizer, plan=plan)
    for _ in range(2):
        gradients(model, *sample, loss, session.step if framed else None)
        session.report()
    held = sum(t.nbytes for t in (*model.parameters(), *sample))
    meter = PeakMeter(torch.device("cpu"))
    for parameter in model.parameters():
        parameter.grad = None
    assert meter.start()
    gradients(model, *sample, loss, session.step if framed else None)
    peak = held + meter.stop([]).total_bytes
    assert peak <= 1.01 * plan.predicted_peak_bytes
    assert peak == pytest.approx(plan.predicted_peak_bytes, rel=0.03)
    session.detach()


class Product(nn.Module):
    """Saves two tensors at once."""

    def forward(self, x):
        return (x + 1) * (x + 2)


def test_the_refusal_that_is_told_is_the_first():
    model = nn.Sequential(nn.Linear(32, 32), Product())
    plan = squeezebox.plan(model, sample=(torch.randn(64, 32), None), loss_fn=lambda out, _: out.sum())
    session = squeezebox.attach(model, plan=plan)
    with pytest.raises(PlanError, match="1:Mul") as refused:
        model(torch.randn(128, 32))
    assert refused.value.__context__ is None
    session.detach()


class Failing(nn.Sequential):
    fails = False

    def forward(self, x):
        x = self[1](self[0](x))
        if self.fails:
            raise RuntimeError("out of memory, say")
        return self[2](x)


def test_a_forward_that_failed_is_no_earlier_one_while_its_error_lives():
    torch.manual_seed(0)
    model, x, y = (
        Failing(nn.Linear(16, 1024), nn.GELU(), nn.Linear(1024, 4)),
        torch.randn(6, 16),
        torch.arange(6),
    )
    plan = squeezebox.plan(model, sample=(x, y % 4), loss_fn=F.cross_entropy, exact=True)
    session = squeezebox.attach(model, plan=plan)
    model.fails = True
    try:
        model(x)
    except RuntimeError as error:
        model.fails = False
        F.cross_entropy(model(x), y % 4).backward()
        assert "out of memory" in str(error)
    assert session.report().record.step == 0
    session.detach()


@pytest.mark.parametrize("given", [{"offload": False}, {}])
def test_a_plan_that_is_made_anew_moves_nothing_where_that_is_forbidden(given, monkeypatch):
    asked = []
    real = _attach.make_plan
    monkeypatch.setattr(
        _attach, "make_plan", lambda *_, **options: asked.append(options["offload"]) or real(*_, **options)
    )
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options = {"sample": batch(8), "loss_fn": F.cross_entropy, "on_mismatch": "replan", **given}
    session = squeezebox.attach(model, optimizer=optimizer, budget="100%", **options)
    gradients(model, *batch(11))
    session.detach()
    assert len(asked) == 2 and asked[0] == asked[1] == given.get("offload", True)


class Norm(nn.Module):
    """Reads each row's scale twice, as Llama's does."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


def test_a_last_batch_whose_rows_scales_are_small_is_the_plan_s():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 64), Norm(64), nn.Linear(64, 50), nn.Flatten(0, 1))
    tokens = torch.randint(50, (8, 256))
    sample = tokens, tokens.flatten()
    plan = squeezebox.plan(model, sample=sample, loss_fn=F.cross_entropy, exact=True)
    session = squeezebox.attach(model, plan=plan)
    for rows in (8, 3):
        gradients(model, tokens[:rows], tokens[:rows].flatten())
        assert {row.key for row in session.report().tensors} <= {t.key for t in plan.tensors}
    session.detach()
