"""What notebooks show, as text and in a real browser: the figures of plans and reports, at 400 pixels."""

import itertools
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import squeezebox
from squeezebox.planner import over_step
from squeezebox.reports import StepPlan
from squeezebox.schema import Action, Moment, Option, Profile, TensorProfile
from tests.reports.browser import PATH, Browser


@pytest.fixture(scope="module")
def plan():
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    return squeezebox.plan(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        sample=(torch.randn(512, 64), torch.randint(10, (512,))),
        loss_fn=nn.functional.cross_entropy,
        budget="80%",
        noise=1e-2,
        frontier=True,
    )


def test_the_curves_peaks_are_the_plans(plan):
    highest = [max(map(max, each.values())) for each in (plan.curve.plain_bytes, plan.curve.planned_bytes)]
    assert highest == [plan.plain_peak_bytes, plan.predicted_peak_bytes]
    assert list(plan.curve.plain_bytes) == ["forward", "backward", "optimizer"]


def test_a_plan_says_where_the_clock_does_not_tell_it_from_plain_pytorch(plan):
    slower = replace(plan, plain_seconds=1.0, predicted_seconds=1.2)
    told, untold = (replace(slower, clock_seconds=clock) for clock in (0.1, 0.3))
    assert "differ by less" not in str(told)
    assert "differ by less than plain steps did here (0.300 s)" in str(untold)


def test_the_frontier_falls_as_time_rises(plan):
    pairs = list(itertools.pairwise(plan.frontier))
    assert plan.frontier and all(
        before.peak_bytes < after.peak_bytes and before.seconds > after.seconds for before, after in pairs
    )


def test_a_share_has_its_positions_highest_bytes():
    keep = Option(action=Action.KEEP, held_bytes=7)
    tensor = TensorProfile(key="a", saved_at=1, first_use=3, last_use=3, options=(keep,))
    phases = ["forward"] * 2 + ["loss"] + ["backward"] * 250
    base = tuple(10 * place for place in range(len(phases)))
    moments = tuple(Moment(phase=phase) for phase in phases)
    curve = over_step(Profile(base_bytes=base, tensors=(tensor,), moments=moments), {"a": keep})
    assert {name: len(values) for name, values in curve.items()} == {"forward": 80, "backward": 100}
    assert [curve["forward"][place] for place in (0, 40, 79)] == [0, 17, 27]
    assert curve["backward"][-1] == base[-1] and curve["backward"][0] == 40 + 10  # positions 3, 4 and 5


def test_a_plan_without_drawings_shows_its_text(plan):
    bare = replace(plan, curve=None, frontier=(), model="<b>")
    assert "<svg" not in bare._repr_html_() and "plan for &lt;b&gt;" in bare._repr_html_()
    assert StepPlan.from_dict(plan.to_dict()) == plan


@pytest.mark.skipif(PATH is None, reason="no Chromium is installed")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_drawings_are_readable_at_400_pixels(plan, scheme, tmp_path):
    page = tmp_path / "notebook.html"
    page.write_text(f"<meta charset=utf-8>{plan._repr_html_()}")
    browser = Browser()
    try:
        browser.open(page, scheme=scheme, width=400)
        assert browser.errors == [] and len(browser.requests) == 1
        assert browser.evaluate("document.querySelectorAll('svg').length") == 2
        letters = browser.evaluate(
            "Math.min(...[...document.querySelectorAll('svg text')].map(each => each.getScreenCTM().a * "
            "parseFloat(getComputedStyle(each).fontSize)))"
        )
        assert letters > 10.5
        cut = browser.evaluate(
            "[...document.querySelectorAll('svg')].flatMap(svg => [...svg.querySelectorAll('text')].filter("
            "each => { const a = each.getBoundingClientRect(), b = svg.getBoundingClientRect();"
            " return a.left < b.left || a.right > b.right || a.bottom > b.bottom })).length"
        )
        assert cut == 0
        assert browser.evaluate("document.documentElement.scrollWidth") <= 400
    finally:
        browser.close()


def test_a_report_draws_the_bits_of_every_layer():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    session = squeezebox.attach(model, exact=True)
    model(torch.randn(256, 64)).sum().backward()
    report = session.report()
    session.detach()
    html = report._repr_html_()
    bars = re.findall(r"<title>([^<]*): ([0-9.]+) bits an element</title>", html)
    assert {name for name, _ in bars} == {tensor.module for tensor in report.tensors}
    assert report.figures()["squeezebox/saved_bytes"] == report.saved_bytes
    assert "squeezebox/update_noise" not in report.figures()
