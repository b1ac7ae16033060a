"""A budget that cannot be met is refused with the numbers of this very model, and they hold."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import squeezebox
from squeezebox.schema import BudgetError, MemoryGrowthWarning, OptionError, parse_size


def convolutions():
    torch.manual_seed(1)
    layers = [
        layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    ]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.Flatten(), nn.Linear(8 * 256, 10))


def batch(size):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(size, 3, 16, 16, generator=generator)
    return x, torch.randint(10, (size,), generator=generator)


def refused(model, sample, budget, loss_fn=F.cross_entropy, **options):
    with pytest.raises(BudgetError) as caught:
        squeezebox.plan(model, sample=sample, loss_fn=loss_fn, budget=budget, **options)
    return str(caught.value)


def test_below_parameters_gradients_and_state_it_is_refused_at_once():
    model, sample = convolutions(), batch(4)
    optimizer, steps = torch.optim.Adam(model.parameters()), []
    weights = sum(p.nbytes for p in model.parameters())
    buffers = sum(b.nbytes for b in model.buffers())
    state = sum(2 * p.nbytes + 4 for p in model.parameters())
    total = 2 * weights + state + buffers + sum(t.nbytes for t in sample)

    def counted(output, target):
        steps.append(0)
        return F.cross_entropy(output, target)

    text = refused(model, sample, total - 1, counted, optimizer=optimizer)
    assert f"{total} bytes, whatever is done" in text and f"optimizer state {state / 1024:.2f} KiB" in text
    assert len(steps) == 1
    assert "whatever is done with saved tensors" not in refused(model, sample, total, optimizer=optimizer)


def test_the_budget_it_names_is_enough_and_so_is_the_batch():
    model, sample = convolutions(), batch(16)
    text = refused(model, sample, "25%")
    (enough,) = (int(found) for found in re.findall(r"budget of (\d+) bytes", text))
    plain, least = (parse_size("", size) for size in re.findall(r" takes ([0-9.]+ .iB)", text))
    budget = 0.25 * plain
    plan = squeezebox.plan(model, sample=sample, loss_fn=F.cross_entropy, budget=int(1.02 * enough))
    assert plan.predicted_peak_bytes <= 1.02 * enough
    assert "in backward" in text and re.search(r"'\d+:NativeBatchNorm.input'|'\d+:Convolution.input'", text)
    parts = [parse_size("", size) for size in re.findall(r"[0-9.]+ .iB", re.search(r"\((.*)\)", text)[1])]
    assert enough == pytest.approx(least, rel=0.01) == pytest.approx(sum(parts), rel=0.01)
    smaller = int(re.search(r"batch of about (\d+)", text)[1])
    assert 1 <= smaller < 16
    plan = squeezebox.plan(model, sample=batch(smaller), loss_fn=F.cross_entropy)
    assert plan.predicted_peak_bytes <= 1.02 * budget


def test_states_are_not_offered_where_slices_take_less():
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Conv2d(c, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()) for c in (3, 32)]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    text = refused(model, batch(64), "3%", optimizer=optimizer, exact=True, offload=False)
    assert "smallest plan found" in text and "states=True" not in text


def test_a_peak_in_the_loss_is_blamed_on_the_loss():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(500, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 500))
    sample = torch.randint(500, (8, 32)), torch.randint(500, (8 * 32,))

    def loss_fn(output, target):
        return F.cross_entropy(output.flatten(0, 1), target)

    text = refused(model, sample, "70%", loss_fn)
    assert "in the loss" in text and "compute the loss in slices" in text
    budget, after = (
        parse_size("", re.search(rf"{word} ([0-9.]+ .iB)", text)[1]) for word in ("Budget", "loss to")
    )
    assert after < budget and "rewrite=True" in text
    with pytest.raises(BudgetError):
        squeezebox.attach(model, budget=after // 2, sample=sample, loss_fn=loss_fn, rewrite=True)
    assert "program" not in vars(type(model))
    session = squeezebox.attach(model, budget=budget, sample=sample, loss_fn=loss_fn, rewrite=True)
    assert [row.rule for row in session.rewritten.rewrites.applied] == ["sliced loss"]
    loss_fn(model(sample[0]), sample[1]).backward()
    assert session.report().peak_bytes <= budget
    session.detach()
    assert "program" not in vars(type(model))


def test_a_loop_that_holds_the_output_is_told_what_that_takes():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(500, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 500))
    x, y = torch.randint(500, (256,)), torch.randint(500, (256,))
    plan = squeezebox.plan(model, sample=(x, y), loss_fn=F.cross_entropy, budget="100%", exact=True)
    assert plan.output_bytes == 256 * 500 * 4
    words = "holds the model's output through backward takes up to 500.00 KiB more"
    assert words in str(plan)
    session = squeezebox.attach(model, plan=plan)
    for _ in range(2):
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
    assert session.report().peak_bytes <= plan.budget_bytes and words not in str(session.report())
    session.detach()
    session = squeezebox.attach(model, plan=plan)
    model.zero_grad()
    output = model(x)
    F.cross_entropy(output, y).backward()
    with pytest.warns(MemoryGrowthWarning, match=words):
        report = session.report()
    assert 0 < report.peak_bytes - plan.budget_bytes <= plan.output_bytes and words in str(report)
    session.detach()


def test_accumulated_gradients_count_from_the_start():
    torch.manual_seed(1)
    layers = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.GELU())]
    model, sample = nn.Sequential(*layers), (torch.randn(128, 128), torch.randn(128, 128))
    given = {"sample": sample, "loss_fn": F.mse_loss, "budget": "100%", "exact": True}
    once, plan = squeezebox.plan(model, **given), squeezebox.plan(model, accumulate=2, **given)
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert 0.7 * gradients < plan.budget_bytes - once.budget_bytes <= gradients
    words = f"gradients of an earlier backward take {gradients / 1024:.2f} KiB: plan with accumulate="

    def peak(plan):
        session = squeezebox.attach(model, plan=plan)
        for number in range(4):
            if number % 2 == 0:
                model.zero_grad()
            F.mse_loss(model(sample[0]), sample[1]).backward()
        reached = session.report().peak_bytes
        session.detach()
        return reached

    with pytest.warns(MemoryGrowthWarning, match=words):
        reached = peak(once)
    assert once.budget_bytes < reached == peak(plan) <= plan.budget_bytes
    with pytest.raises(OptionError, match="accumulate is for a budget"):
        squeezebox.attach(model, accumulate=2)


def test_rewriting_first_needs_a_sample_and_no_plan():
    model, sample = convolutions(), batch(4)
    with pytest.raises(OptionError, match="sample"):
        squeezebox.attach(model, rewrite=True)
    plan = squeezebox.plan(model, sample=sample, loss_fn=F.cross_entropy, exact=True)
    with pytest.raises(OptionError, match="model that was measured"):
        squeezebox.attach(model, plan=plan, sample=sample, loss_fn=F.cross_entropy, rewrite=True)
    assert "program" not in vars(type(model))
