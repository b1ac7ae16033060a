"""With states=True a plan rules gradients and optimizer state too: exact, within the budget, as predicted."""

import copy
import dataclasses
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import squeezebox
from squeezebox import planner
from squeezebox.planning._states import _late, _Parameter
from squeezebox.profiling import ParameterNeeds, PeakMeter
from squeezebox.schema import (
    AttachError,
    BudgetError,
    CaptureError,
    Moment,
    OptionError,
    PlanError,
    Profile,
)
from squeezebox.steps import nbytes_of, persistent

WORDS, LENGTH = 2048, 32


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.rest = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        heads = [
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.inner(self.norms[0](x)).chunk(3, -1)
        ]
        x = x + self.outer(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.rest(self.norms[1](x))


class Language(nn.Module):
    """Its head is its embedding, of 3 MiB: several pieces of the file's buffers."""

    def __init__(self, width=384):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words):
        return self.head(self.blocks(self.embedding(words)))


def loss_fn(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def task(make=torch.optim.AdamW):
    torch.manual_seed(0)
    model = Language()
    words = torch.randint(WORDS, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return model, make(model.parameters(), lr=1e-3), (words[:, :-1], words[:, 1:])


def planned(model, optimizer, sample, **options):
    given = {"exact": True, "states": True, **options}
    return squeezebox.plan(model, optimizer=optimizer, sample=sample, loss_fn=loss_fn, **given)


def train(model, optimizer, sample, steps=4, *, clip=None, accumulate=1, meter=None):
    """Losses, and the peak of the last step but one."""
    losses, peak = [], 0
    for number in range(steps):
        metered = meter is not None and number == steps - 1
        optimizer.zero_grad()
        held = nbytes_of([*model.parameters(), *persistent(model, optimizer)])
        if metered:
            assert meter.start()
        for _ in range(accumulate):
            loss = loss_fn(model(sample[0]), sample[1])
            losses.append(loss.detach())
            loss.backward()
            del loss
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if metered:
            peak = held + meter.stop(()).total_bytes
    return losses, peak


WAYS = {"in backward": {}, "clipped": {"clip": 0.5}, "added up": {"accumulate": 2}}


@pytest.mark.every(3)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_peaks_are_as_predicted_and_training_is_the_same_to_the_bit(way):
    plain, optimizer, sample = task()
    wanted, peak = train(plain, optimizer, sample, meter=PeakMeter(torch.device("cpu")), **way)
    peaks, seconds = [], []
    for budget in (None, "60%", "75%", "90%"):
        model, optimizer, sample = task()
        plan = squeezebox.plan(
            model,
            optimizer=optimizer,
            sample=sample,
            loss_fn=loss_fn,
            budget=budget,
            exact=True,
            states=True,
            **way,
        )
        session = squeezebox.attach(model, optimizer=optimizer, plan=plan)
        losses, measured = train(model, optimizer, sample, meter=PeakMeter(torch.device("cpu")), **way)
        assert losses == wanted
        assert all(map(torch.equal, model.parameters(), plain.parameters()))
        assert measured == pytest.approx(plan.predicted_peak_bytes, rel=0.03)
        assert plan.budget_bytes is None or measured <= plan.budget_bytes
        assert plan.optimizer.in_backward == (not way)
        peaks.append(plan.predicted_peak_bytes)
        seconds.append(plan.predicted_seconds - plan.plain_seconds)
        session.detach()
    assert peaks == sorted(peaks)
    assert peaks[0] < 0.5 * peak
    assert plan.plain_peak_bytes == pytest.approx(peak, rel=0.03) or "clip" in way


def test_kept_gradients_are_there_until_the_last_update():
    needs, size = ParameterNeeds(state_bytes=2 << 20, update_bytes=0), 1 << 20
    found = [_Parameter(f"{number}", number, size, needs, in_pieces=False) for number in range(3)]
    sizes = [number * size for number in range(4)]
    moments = tuple(Moment(phase="backward", gradient_bytes=nbytes) for nbytes in sizes)
    profile = _late(Profile(base_bytes=tuple(sizes), tensors=(), moments=moments), found, 1.0, 1)
    chosen = {row.key: row.options[-1 if row.key == "state of 2" else 0] for row in profile.tensors}
    assert planner.peak(profile, chosen) == (3 + 2 * 2 + 2) * size


@pytest.mark.parametrize("budget", [None, "60%", "80%"])
def test_clipped_steps_in_16_bits_are_within_their_prediction(budget):
    model, _, sample = task()
    optimizer = torch.optim.AdamW(model.bfloat16().parameters(), lr=1e-3)
    plan = planned(model, optimizer, sample, clip=0.5, budget=budget)
    session = squeezebox.attach(model, optimizer=optimizer, plan=plan)
    _, measured = train(model, optimizer, sample, clip=0.5, meter=PeakMeter(torch.device("cpu")))
    session.detach()
    assert measured <= 1.03 * plan.predicted_peak_bytes


def test_the_first_step_which_makes_the_state_is_within_the_budget():
    def make(parameters, lr):
        return torch.optim.RMSprop(parameters, lr=lr, momentum=0.9, centered=True)

    model, optimizer, sample = task(make)
    plan = planned(model, optimizer, sample)
    session = squeezebox.attach(model, optimizer=optimizer, plan=plan)
    loss_fn(model(sample[0]), sample[1]).backward()
    optimizer.step()
    assert session.report().peak_bytes <= plan.predicted_peak_bytes
    session.detach()


def test_a_plan_is_written_and_read(tmp_path):
    model, optimizer, sample = task()
    plan = planned(model, optimizer, sample, clip=True)
    plan.save(tmp_path / "plan.json")
    assert squeezebox.load_plan(tmp_path / "plan.json") == plan
    assert "in optimizer.step()" in str(plan) and "in a file" in str(plan)
    assert plan.offload is not None and plan.optimizer.moved_bytes > 0
    without = dataclasses.replace(plan, optimizer=None).to_dict()
    assert without["optimizer"] is None


def test_without_offload_nothing_is_moved():
    model, optimizer, sample = task()
    plan = planned(model, optimizer, sample, offload=False)
    assert plan.optimizer.in_backward and not plan.optimizer.states
    assert plan.predicted_peak_bytes < 0.95 * plan.plain_peak_bytes
    session = squeezebox.attach(model, optimizer=optimizer, plan=plan)
    train(model, optimizer, sample, 2)
    session.detach()


def test_with_noise_it_is_measured_without_an_update():
    model, optimizer, sample = task()
    plan = planned(model, optimizer, sample, noise=1e-2, budget="45%", exact=False)
    session = squeezebox.attach(model, optimizer=optimizer, plan=plan)
    train(model, optimizer, sample, 2)
    assert session.report().peak_bytes <= plan.budget_bytes
    before = copy.deepcopy(model.state_dict())
    optimizer.zero_grad()
    noise = session.measure_noise(lambda: loss_fn(model(sample[0]), sample[1]).backward())
    assert 0.0 <= noise <= 2e-2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    train(model, optimizer, sample, 1)
    assert session.report().peak_bytes
    session.detach()


def test_clipping_without_having_said_so_is_refused_by_name():
    model, optimizer, sample = task()
    plan = planned(model, optimizer, sample)
    session = squeezebox.attach(model, optimizer=optimizer, plan=plan)
    with pytest.raises(CaptureError, match="clip=True"):
        train(model, optimizer, sample, clip=1.0)
    session.detach()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"optimizer": None}, "optimizer="),
        ({"clip": -1.0}, "clip"),
        ({"accumulate": 0}, "accumulate"),
        ({"accumulate": True}, "accumulate"),
        ({"clip": "1"}, "clip"),
        ({"states": "yes"}, "neither True nor False"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(options, match):
    model, optimizer, sample = task()
    given = {"optimizer": optimizer, **options}
    if given["optimizer"] is torch.optim.LBFGS:
        given["optimizer"] = torch.optim.LBFGS(model.parameters())
    with pytest.raises(OptionError, match=match):
        squeezebox.plan(model, sample=sample, loss_fn=loss_fn, **{"states": True, **given})


def test_clip_goes_with_states():
    model, optimizer, sample = task()
    with pytest.raises(OptionError, match="states=True"):
        squeezebox.plan(model, optimizer=optimizer, sample=sample, loss_fn=loss_fn, clip=1.0)


def test_attach_wants_the_plan_s_optimizer_and_parameters():
    model, optimizer, sample = task()
    plan = planned(model, optimizer, sample)
    with pytest.raises(OptionError, match=r"attach\(model, optimizer=optimizer"):
        squeezebox.attach(model, plan=plan)
    other = nn.Linear(3, 3)
    with pytest.raises(PlanError, match="made for Language"):
        squeezebox.attach(other, optimizer=torch.optim.SGD(other.parameters()), plan=plan)
    for wrong in (torch.optim.SGD(model.parameters()), torch.optim.AdamW(other.parameters())):
        with pytest.raises(PlanError, match="made for Language and its AdamW"):
            squeezebox.attach(model, optimizer=wrong, plan=plan)
    squeezebox.attach(model, optimizer=optimizer, plan=plan).detach()


def test_attach_refuses_more_state_than_the_budget_has_room_for():
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    sample, given = (torch.randn(16, 64), torch.randn(16, 64)), {"loss_fn": F.mse_loss, "exact": True}
    optimizer = torch.optim.AdamW(model.parameters())
    plan = squeezebox.plan(model, sample=sample, optimizer=optimizer, states=True, offload=False, **given)
    plan = dataclasses.replace(plan, budget_bytes=plan.predicted_peak_bytes)
    with pytest.raises(OptionError, match="of optimizer state and AdamW takes .* Make the plan with this"):
        squeezebox.attach(model, optimizer=torch.optim.AdamW(model.parameters(), amsgrad=True), plan=plan)
    session = squeezebox.attach(model, optimizer=optimizer, plan=plan)
    F.mse_loss(model(sample[0]), sample[1]).backward()
    optimizer.step()
    session.detach()
    held = nbytes_of([*persistent(model, optimizer)]) - nbytes_of([*persistent(model, None)])
    assert plan.peak.parts.state_bytes == plan.optimizer.state_bytes == held
    squeezebox.attach(model, optimizer=optimizer, plan=plan).detach()


def test_a_refused_budget_names_what_states_would_reach():
    model, optimizer, sample = task()
    with pytest.raises(BudgetError, match=r"states=True"):
        squeezebox.plan(model, optimizer=optimizer, sample=sample, loss_fn=loss_fn, exact=True, budget="45%")
    with pytest.raises(BudgetError):
        planned(model, optimizer, sample, budget="5%")


def test_without_offload_a_refusal_names_no_file_and_what_holds_without():
    model, optimizer, sample = task()
    given = {"optimizer": optimizer, "sample": sample, "loss_fn": loss_fn, "exact": True, "offload": False}
    with pytest.raises(BudgetError) as caught:
        squeezebox.plan(model, budget="45%", **given)
    text = str(caught.value)
    assert "With states=True, which updates in backward and keeps no gradients, a plan needs" in text
    assert "file" not in text
    least = int(re.search(r"needs at most [^(]*\((\d+) bytes\), still above it", text)[1])
    assert squeezebox.plan(model, states=True, budget=int(1.02 * least), **given).offload is None


def test_two_backward_passes_without_a_step_are_refused():
    model, optimizer, sample = task()
    plan = planned(model, optimizer, sample)
    session = squeezebox.attach(model, optimizer=optimizer, plan=plan)
    with pytest.raises((AttachError, CaptureError), match="accumulate="):
        train(model, optimizer, sample, accumulate=2)
    session.detach()


def test_packed_state_is_within_the_budget_and_its_noise_as_predicted(tmp_path):
    model, optimizer, sample = task()
    plan = planned(model, optimizer, sample, offload=False, update_noise=0.02, exact=False)
    assert set(plan.optimizer.packed.values()) == {8} and not plan.optimizer.states
    assert "in 8 bits" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert squeezebox.load_plan(tmp_path / "plan.json") == plan
    session = squeezebox.attach(model, optimizer=optimizer, plan=plan)
    losses, measured = train(model, optimizer, sample, 12, meter=PeakMeter(torch.device("cpu")))
    assert measured == pytest.approx(plan.predicted_peak_bytes, rel=0.03)
    assert losses[-1] < losses[0]
    report = session.report()
    assert 0.0 < report.update_noise < plan.optimizer.update_noise <= 0.02
    assert "update noise" in str(report)
    session.detach()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"update_noise": 2.0}, "between 0 and 1"),
        ({"update_noise": 0}, "between 0 and 1"),
        ({"update_noise": 0.02, "states": False}, "states=True"),
    ],
    ids=str,
)
def test_update_noise_that_means_nothing_is_refused(options, match):
    model, optimizer, sample = task()
    with pytest.raises(OptionError, match=match):
        squeezebox.plan(
            model, optimizer=optimizer, sample=sample, loss_fn=loss_fn, **{"states": True, **options}
        )


def test_attach_packs_state_without_a_plan():
    model, optimizer, sample = task()
    session = squeezebox.attach(model, optimizer=optimizer, exact=True, update_noise=0.02)
    losses, _ = train(model, optimizer, sample, 12, clip=1.0)
    assert losses[-1] < losses[0]
    held = nbytes_of([*persistent(model, optimizer)])
    gradients = nbytes_of([each.grad for each in model.parameters()])
    assert held - gradients < 0.27 * 2 * gradients
    assert 0.0 < session.report().update_noise < 0.02
    session.detach()
    train(model, optimizer, sample, 1)


def test_packed_state_goes_with_gradscaler_accumulation_and_a_step_that_is_left_out():
    model, optimizer, sample = task()
    session = squeezebox.attach(model, optimizer=optimizer, exact=True, update_noise=0.02)
    scaler, losses = torch.amp.GradScaler("cpu", init_scale=2.0**8), []
    for number in range(8):
        optimizer.zero_grad()
        for _ in range(2):
            with torch.autocast("cpu", torch.float16):
                loss = loss_fn(model(sample[0]).float(), sample[1]) / 2
            scaler.scale(loss).backward()
        before = [each.detach().clone() for each in model.parameters()]
        if number == 3:
            model.embedding.weight.grad[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert all(map(torch.equal, before, model.parameters())) == (number == 3)
        losses.append(float(loss.detach()))
    assert scaler.get_scale() == 2.0**7 and losses[-1] < losses[0]
    assert 0.0 < session.report().update_noise < 0.02
    session.detach()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"update_noise": 0.02}, "pass optimizer="),
        ({"update_noise": 1e-6, "optimizer": True}, "less than what AdamW"),
        ({"update_noise": 0.02, "optimizer": True, "budget": "50%"}, "states=True"),
    ],
    ids=str,
)
def test_attach_refuses_update_noise_that_means_nothing_and_leaves_the_model_alone(options, match):
    model, optimizer, sample = task()
    if "optimizer" in options:
        options = {**options, "optimizer": optimizer}
    with pytest.raises(OptionError, match=match):
        squeezebox.attach(model, **options)
    squeezebox.attach(model, exact=True).detach()
