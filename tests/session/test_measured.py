"""Which steps' peaks are measured, and what a session says of one above its plan."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import squeezebox
from squeezebox.schema import MemoryGrowthWarning, OptionError, human_bytes


def network():
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(128, 10))


def train(model, rows, optimizer=None):
    x, y = torch.randn(rows, 128), torch.arange(rows) % 10
    (optimizer or model).zero_grad()
    F.cross_entropy(model(x), y).backward()
    if optimizer is not None:
        optimizer.step()


def peak_line(session):
    return next(line for line in str(session.report()).splitlines() if line.startswith("peak of the step"))


def test_a_step_with_larger_inputs_than_any_before_is_measured():
    model = network()
    session = squeezebox.attach(model, exact=True)
    for rows in (64, 64, 64):
        train(model, rows)
    assert "step 0's, the last that was measured" in peak_line(session)
    small = session.report().peak_bytes
    train(model, 1024)
    assert "measured" not in peak_line(session)
    large = session.report()
    assert large.peak_bytes > large.packed_bytes > small and large.record.peak_step == 3
    for rows in (64, 1024):
        train(model, rows)
    assert session.report().record.peak_step == 3
    session.detach()


def test_the_highest_peak_is_of_the_largest_batch_with_the_optimizers_state():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    session = squeezebox.attach(model, optimizer=optimizer, exact=True)
    peaks = []
    for rows in (1024, 64, 64, 512, 1024, 1024):
        train(model, rows, optimizer)
        peaks.append(session.report())
    first, small, large = peaks[0], peaks[2], peaks[-1]
    assert first.highest_peak_bytes == first.peak_bytes == small.highest_peak_bytes > small.peak_bytes
    assert str(small).splitlines()[2].endswith(f"{human_bytes(first.peak_bytes)} the highest so far")
    assert large.record.peak_step == 4 and large.highest_peak_bytes == large.peak_bytes > first.peak_bytes
    assert "highest" not in str(first) + str(large)
    few = replace(large.record, highest_peak_bytes=large.peak_bytes + 1)  # the same in print
    assert "highest" not in str(replace(large, record=few))
    session.detach()


def test_a_step_with_larger_inputs_is_measured_under_step_too():
    model = network()
    session = squeezebox.attach(model, exact=True)
    for rows in (64, 64, 64, 1024, 64):
        x, y = torch.randn(rows, 128), torch.arange(rows) % 10
        model.zero_grad()
        with session.step():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
    report = session.report()
    assert report.record.peak_step == 3 and report.peak_bytes > 8 * 1024 * 128 * 4
    session.detach()


def test_the_first_steps_after_loading_are_measured():
    model = network()
    session = squeezebox.attach(model, noise=1e-3)
    for _ in range(5):
        train(model, 64)
    state = session.state_dict()
    session.detach()
    session = squeezebox.attach(model, noise=1e-3)
    session.load_state_dict(state)
    train(model, 64)
    assert session.report().record.peak_step == 5
    session.detach()


@pytest.fixture(scope="module")
def plan():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sample = torch.randn(64, 128), torch.arange(64) % 10
    given = {"sample": sample, "loss_fn": F.cross_entropy, "optimizer": optimizer, "exact": True}
    return squeezebox.plan(model, budget="100%", **given)


def test_an_optimizer_that_the_budget_has_no_room_for_is_refused(plan):
    model = network()
    with pytest.raises(OptionError, match=r"optimizer state and AdamW takes .* Make the plan with this"):
        squeezebox.attach(model, plan=plan, optimizer=torch.optim.AdamW(model.parameters()))
    for make in (torch.optim.SGD, lambda parameters: torch.optim.SGD(parameters, momentum=0.9)):
        session = squeezebox.attach(model, plan=plan, optimizer=make(model.parameters()))
        session.detach()


def test_an_optimizer_that_holds_more_than_anybody_knew_warns(plan):
    class Hoarder(torch.optim.SGD):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter] = {number: torch.zeros_like(parameter) for number in "123"}
            return super().step(closure)

    model = network()
    optimizer = Hoarder(model.parameters())
    session = squeezebox.attach(model, plan=plan, optimizer=optimizer)
    with pytest.warns(MemoryGrowthWarning, match=r"the budget of .*the optimizer's state takes .*planned"):
        for _ in range(2):
            train(model, 64, optimizer)
            session.report()
    session.detach()


def test_inputs_that_no_plan_covers_warn_where_they_exceed_the_budget(plan):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = squeezebox.attach(model, plan=plan, optimizer=optimizer, on_mismatch="replan")
    for _ in range(2):
        train(model, 64, optimizer)
    assert session.report().peak_bytes <= plan.budget_bytes
    train(model, 512, optimizer)
    with pytest.warns(MemoryGrowthWarning, match="its inputs are larger than the plan's sample"):
        report = session.report()
    assert report.peak_bytes > plan.budget_bytes
    session.detach()


def test_batches_that_are_views_of_all_data_count_as_batches():
    model, data = network(), torch.randn(64 * 100, 128)
    peaks = []
    for split in (lambda: data.split(64), lambda: [each.clone() for each in data.split(64)]):
        session = squeezebox.attach(model, exact=True)
        for x in split()[:2]:
            model.zero_grad()
            F.cross_entropy(model(x), torch.arange(64) % 10).backward()
        peaks.append(session.report().peak_bytes)
        session.detach()
    assert abs(peaks[0] - peaks[1]) < 8192


def test_a_batch_that_a_step_is_given_is_held_as_it_is_and_counts_once():
    model, x, y = network(), torch.randn(64, 128), torch.arange(64) % 10

    def in_parts(x):
        for layer in model:
            x = layer(x)
        return x

    reports = []
    for batch, forward in (((), model), ((x, y), model), ((x, y), in_parts)):
        session = squeezebox.attach(model, exact=True)
        for _ in range(2):
            model.zero_grad()
            with session.step(batch):
                loss = F.cross_entropy(forward(x), y)
            loss.backward()
        reports.append(session.report())
        session.detach()
    packed = [each.packed_bytes for each in reports]
    assert packed[0] - y.nbytes == packed[1] == packed[2]
    peaks = [each.peak_bytes for each in reports]
    assert max(peaks) - min(peaks) < 8192


def test_the_state_of_an_optimizer_that_steps_late_is_in_the_peak():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    session = squeezebox.attach(model, optimizer=optimizer, exact=True)
    for number in range(12):
        F.cross_entropy(model(torch.randn(8, 128)), torch.arange(8) % 10).backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    assert session.report().peak_bytes > 4 * sum(each.nbytes for each in model.parameters())
    session.detach()
