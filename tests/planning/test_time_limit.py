"""As little memory as fits the time: more time, less memory, never beyond the limit."""

import dataclasses

import pytest
from torch import nn
from torch.nn import functional as F

import squeezebox
from squeezebox.planning import _plans
from squeezebox.schema import BudgetError, OptionError
from tests.planning.test_max_batch import batch, network


def test_more_time_means_less_memory():
    model, sample, limits = network(), batch(16), (5.0, 6.0, 100.0)
    plans = [
        squeezebox.plan(model, sample=sample, loss_fn=F.cross_entropy, noise=1e-2, time_limit=limit)
        for limit in limits
    ]
    for plan, limit in zip(plans, limits, strict=True):
        assert plan.budget_bytes is None
        assert plan.predicted_seconds <= limit * plan.plain_seconds * (1 + 1e-9)
        assert plan.predicted_peak_bytes <= plan.plain_peak_bytes
    assert plans[2].predicted_peak_bytes < 0.8 * plans[2].plain_peak_bytes
    assert plans[2].predicted_peak_bytes <= 1.01 * plans[1].predicted_peak_bytes
    assert plans[1].predicted_peak_bytes <= 1.01 * plans[0].predicted_peak_bytes


def test_what_every_plan_costs_counts(monkeypatch):
    model, sample = network(), batch(4)
    measured = _plans.profile_step

    def slow(*arguments, **named):
        return dataclasses.replace(measured(*arguments, **named), plain_seconds=1.0, holding_seconds=0.25)

    monkeypatch.setattr(_plans, "profile_step", slow)
    with pytest.raises(BudgetError, match=r"0\.25[0-9]* s more .* Allow at least 1\.2[5-9]"):
        squeezebox.plan(model, sample=sample, loss_fn=F.cross_entropy, time_limit=1.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time_limit": 0.9}, "0.9 is below 1"),
        ({"time_limit": float("nan")}, "nan is below 1 or not finite"),
        ({"time_limit": float("inf")}, "not finite"),
        ({"time_limit": 1.5, "budget": "50%"}, "budget or time_limit"),
    ],
)
def test_limits_that_are_none_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        squeezebox.plan(nn.Linear(2, 2), sample=(None, None), loss_fn=F.cross_entropy, **options)
