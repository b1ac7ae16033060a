"""The first layers in slices are an option like any other: for every budget, and for every batch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import squeezebox
from squeezebox.planning import _profiles
from squeezebox.planning._plans import plain_peak, planned
from squeezebox.planning._profiles import profile_step
from squeezebox.planning._slicing import Slices
from squeezebox.session import profile_with_places
from squeezebox.steps import TrainingStep


def network(width=16, norm=nn.BatchNorm2d, act=nn.ReLU, pool=4):
    torch.manual_seed(1)
    stem = [nn.Conv2d(3, width, 3, padding=1, bias=False), norm(width), act(), nn.MaxPool2d(pool)]
    rest = [nn.Conv2d(width, width, 3, padding=1, bias=False), norm(width), act(), nn.MaxPool2d(2)]
    return nn.Sequential(*stem, *rest, nn.Flatten(), nn.LazyLinear(10))


NETWORKS = {
    "narrow": lambda: network(8, pool=2),
    "wide": lambda: network(24),
    "groups and SiLU": lambda: network(16, lambda width: nn.GroupNorm(4, width), nn.SiLU),
}


def sample(size, side=32):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(size, 3, side, side, generator=generator)
    return x, torch.randint(10, (size,), generator=generator)


def built(name, size=16):
    model, batch = NETWORKS[name](), sample(size)
    model(batch[0])
    return model, batch


@pytest.mark.parametrize("name", NETWORKS)
def test_time_never_rises_with_the_budget(name):
    model, batch = built(name)
    step = TrainingStep(model=model, sample=batch, loss_fn=F.cross_entropy, optimizer=None, noise=1e-2)
    seen, slices = profile_step(step), Slices(step)
    whole = plain_peak(seen)
    times, sliced = [], 0
    for share in range(100, 20, -5):
        try:
            plan = planned(model, seen, whole * share // 100, 1e-2, len(batch[0]), slices=slices)
        except squeezebox.BudgetError:
            break
        assert plan.predicted_peak_bytes <= whole * share // 100
        times.append(plan.predicted_seconds)
        sliced += plan.region is not None
    assert len(times) > 5
    pairs = zip(times, times[1:], strict=False)
    assert all(roomy <= 1.05 * tight for roomy, tight in pairs), times  # the choice is a heuristic
    assert sliced or name == "groups and SiLU"


@pytest.mark.slow
def test_batches_are_looked_for_in_slices_too():
    model, batch = built("wide", 8)
    options = {"loss_fn": F.cross_entropy, "noise": 1e-2}
    found = squeezebox.max_batch(model, sample=batch, budget="100%", **options)
    assert found.plan.region is not None
    assert found.predicted_peak_bytes <= found.plan.budget_bytes
    with pytest.raises(squeezebox.BudgetError):
        squeezebox.plan(
            model, sample=sample(int(1.2 * found.batch)), budget=found.plan.budget_bytes, **options
        )
    sizes = [point.batch for point in found.frontier]
    assert sizes == sorted(sizes) and sizes[-1] == found.batch and len(sizes) > 2
    assert all(point.peak_bytes <= found.plan.budget_bytes for point in found.frontier)
    assert all(point.time_ratio > 0.0 for point in found.frontier)
    assert found.to_dict()["frontier"][-1]["batch"] == found.batch


@pytest.mark.slow
def test_found_batches_are_looked_for_in_slices_too():
    model, batch = built("wide", 8)
    found = squeezebox.find_batch(model, batch, loss_fn=F.cross_entropy, noise=1e-2, memory="8MiB", reserve=0)
    assert found.plan.region is not None
    assert found.predicted_peak_bytes <= found.memory_bytes
    assert found.frontier[-1].batch == found.batch > found.plain_batch


@pytest.mark.parametrize("name", ["narrow", "wide"])
def test_a_plan_in_slices_foretells_its_peak(name):
    model, batch = built(name)
    plan = squeezebox.plan(model, sample=batch, loss_fn=F.cross_entropy, noise=1e-2)
    assert plan.region is not None
    session = squeezebox.attach(model, plan=plan)
    for _ in range(2):
        model.zero_grad()
        with session.step():
            loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
    measured = session.report().peak_bytes
    session.detach()
    assert plan.predicted_peak_bytes == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("budget", [None, "50%"])
def test_the_reports_peak_has_the_optimizers_state_as_the_plans_has(budget):
    model, batch = built("wide")
    optimizer = torch.optim.Adam(model.parameters())
    options = {"loss_fn": F.cross_entropy, "optimizer": optimizer, "noise": 1e-2}
    plan = squeezebox.plan(model, sample=batch, budget=budget, **options)
    session = squeezebox.attach(model, optimizer=optimizer, plan=plan)
    for _ in range(2):
        optimizer.zero_grad()
        with session.step():
            loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
    measured = session.report().peak_bytes
    session.detach()
    assert plan.predicted_peak_bytes == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("budget", ["90%", "40%", None, "1%"], ids=str)
def test_planning_runs_the_model_a_few_times(budget, monkeypatch):
    model, batch = built("wide")
    runs = []
    model[-1].register_forward_hook(lambda *_: runs.append(1))
    monkeypatch.setattr(_profiles, "_TIMED_SECONDS", 0.0)  # each step counts as a long one
    try:
        squeezebox.plan(model, sample=batch, loss_fn=F.cross_entropy, budget=budget, noise=1e-2)
    except squeezebox.BudgetError:
        assert budget == "1%"
    assert len(runs) <= 20


def test_slices_have_the_places_of_an_arena_once():
    model, batch = built("narrow")
    step = TrainingStep(model=model, sample=batch, loss_fn=F.cross_entropy, noise=1e-2)
    bare = profile_step(step)
    seen, slices = profile_with_places(bare), Slices(step, profile_with_places, bare)
    way = slices.predicted(seen, seen.regions[0], 16)[0]
    found = slices.profiled(seen, way, 16).profile.tensors
    placed = {tensor.key: [each.held_bytes for each in tensor.options] for tensor in seen.profile.tensors}
    known = [tensor for tensor in found if tensor.key in placed]
    assert any(len(tensor.options) > 1 for tensor in known)
    assert all(each.held_bytes in placed[tensor.key] for tensor in known for each in tensor.options)
