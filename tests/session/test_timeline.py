"""One profiled step against what counts the same figures by other means."""

import dataclasses
import itertools
import json
import time
from collections import Counter

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

import squeezebox
from squeezebox.bounds import NoiseBudget
from squeezebox.cli._demo import Steered
from squeezebox.profiling import PeakMeter
from squeezebox.reports import PlannedTensor, StepPlan, Timeline, timeline_events
from squeezebox.schema import (
    Action,
    Activity,
    AttachError,
    FormatError,
    Kind,
    OptimizerPlan,
    Option,
    OptionError,
)

ACTIVE = ("packing_seconds", "recomputing_seconds", "waiting_seconds", "recomputed_bytes", "offloaded_bytes")


class Block(nn.Module):
    """A transformer's block, with causal attention."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


class Gpt(nn.Module):
    """A block between an embedding and a head."""

    def __init__(self, width=64):
        super().__init__()
        self.embed, self.position = nn.Embedding(50, width), nn.Parameter(torch.randn(64, width))
        self.blocks = nn.Sequential(Block(width))
        self.head = nn.Linear(width, 50)

    def forward(self, index):
        return self.head(self.blocks(self.embed(index) + self.position)).flatten(0, 1)


def cnn_subject():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3)]
    model = nn.Sequential(*layers, nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 13 * 13, 10))
    return model, torch.randn(12, 3, 32, 32), torch.arange(12) % 10


def gpt_subject():
    torch.manual_seed(0)
    tokens = torch.randint(50, (8, 65))
    return Gpt(), tokens[:, :-1].clone(), tokens[:, 1:].flatten()


def sliced_subject():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    more = [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, *more, nn.Flatten(), nn.Linear(16 * 36, 10))
    return model, torch.randn(12, 3, 24, 24), torch.arange(12) % 10


SUBJECTS = {"cnn": cnn_subject, "gpt": gpt_subject, "sliced": sliced_subject}


def handmade(model, x, y):
    """A plan that moves what would be kept to a file, and makes the first convolution's output again."""
    session = squeezebox.attach(model, exact=True)
    functional.cross_entropy(model(x), y).backward()
    tensors = session.report().tensors
    session.detach()

    def planned(tensor):
        again = tensor.key == "1:NativeBatchNorm.input"
        action = Action.RECOMPUTE if again else Action.OFFLOAD if tensor.codec == "keep" else Action.COMPRESS
        held = tensor.packed_bytes if action is Action.COMPRESS else 0
        option = Option(action=action, codec=tensor.codec, held_bytes=held)
        return PlannedTensor(key=tensor.key, saved_bytes=tensor.saved_bytes, option=option)

    return StepPlan(
        model=type(model).__name__,
        budget_bytes=8 << 20,
        noise=0.0,
        plain_peak_bytes=8 << 20,
        plain_seconds=0.1,
        predicted_peak_bytes=4 << 20,
        predicted_seconds=0.1,
        predicted_noise=0.0,
        late_values={},
        tensors=tuple(map(planned, tensors)),
    )


def in_slices(model, x, y):
    """As little memory as can be, which is with the first layers in slices."""
    plan = squeezebox.plan(model, sample=(x, y), loss_fn=functional.cross_entropy, noise=1e-2)
    assert plan.region is not None
    return plan


class Early(Steered):
    """Refreshes in the first two steps only."""

    def due(self, step):
        return step < 2


class Training:
    """A model under a session whose steps are all alike: nothing is learnt from one to the next."""

    def __init__(self, subject, **options):
        self.model, self.x, self.y = SUBJECTS[subject]()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0, momentum=0.9)
        self.seconds = []
        if options.pop("planned", False):
            make = in_slices if subject == "sliced" else handmade
            options["plan"] = make(self.model, self.x, self.y)
        self.plan = options.get("plan")
        if "noise" in options:
            options = {"controller": Early(NoiseBudget(noise=options["noise"]))}
        self.session = squeezebox.attach(self.model, optimizer=self.optimizer, **options)

    def step(self):
        began = time.perf_counter()
        torch.manual_seed(1)
        self.optimizer.zero_grad()
        functional.cross_entropy(self.model(self.x), self.y).backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - began)

    def plainly_saved(self):
        """Bytes that plain PyTorch saves in forward, of what model and caller do not own."""
        own = {
            t.untyped_storage().data_ptr() for t in [self.x, *self.model.parameters(), *self.model.buffers()]
        }
        held, model, x = [], self.model, self.x
        if self.plan is not None and self.plan.region is not None:  # it saves nothing
            with torch.no_grad():
                sliced = len(self.plan.region.modules)
                model, x = self.model[sliced:], self.model[:sliced](x)
        with saved_tensors_hooks(lambda tensor: held.append(tensor) or tensor, lambda tensor: tensor):
            output = model(x)
        found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
        del output
        return sum(nbytes for address, nbytes in found.items() if address not in own)

    def tracked_peak(self):
        """The peak of a step, from the meter."""
        self.session.report()  # ends a measurement that may be running
        self.optimizer.zero_grad()
        states = [each["momentum_buffer"] for each in self.optimizer.state.values()]
        held = [*self.model.parameters(), *self.model.buffers(), *states, self.x]
        before = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}.values())
        meter = PeakMeter(torch.device("cpu"))
        assert meter.start()
        self.step()
        return before + meter.stop([]).total_bytes


def taken(subject, steps=2, **options):
    training = Training(subject, **options)
    for _ in range(steps):
        training.step()
    return training, training.session.timeline(training.step)


OPTIONS = {
    "noise": {"noise": 1e-2},
    "plan": {"planned": True},
}


RUNS = [*itertools.product(("cnn", "gpt"), OPTIONS), ("sliced", "plan")]


@pytest.fixture(scope="module", params=RUNS, ids="-".join)
def run(request, tmp_path_factory):
    subject, name = request.param
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        torch.set_num_threads(1)  # as in every test: operators of more threads take more
        training, timeline = taken(subject, **OPTIONS[name])
    yield training, timeline.figures
    training.session.detach()
    torch.set_num_threads(threads)


def test_the_modules_times_add_up_to_the_step(run):
    training, figures = run
    assert sum(cell.seconds for cell in figures.cells) == pytest.approx(figures.seconds, rel=1e-9)
    assert sum(span.seconds for span in figures.spans) == pytest.approx(figures.seconds, rel=1e-9)
    # Something else may run between two clocks.
    assert figures.seconds == pytest.approx(training.seconds[-1], rel=0.02, abs=0.05)
    assert figures.unprofiled_seconds == pytest.approx(training.seconds[-2], rel=0.02, abs=0.05)


@pytest.mark.filterwarnings("ignore:squeezebox captured nothing")  # where hooks count what plain torch saves
def test_saved_bytes_are_the_hooks(run):
    training, figures = run
    record = figures.record
    assert sum(cell.saved_bytes for cell in figures.cells) == record.saved_bytes
    assert sum(cell.packed_bytes for cell in figures.cells) == record.packed_bytes
    training.step()
    report = training.session.report()
    assert (record.saved_bytes, record.packed_bytes) == (report.saved_bytes, report.packed_bytes)
    assert record.saved_bytes == training.plainly_saved()


def test_the_peak_is_the_trackers(run):
    training, figures = run
    peak = figures.record.peak_bytes
    assert max(sum(sample.nbytes) for sample in figures.samples) == peak == sum(figures.peak.nbytes)
    assert sum(cell.peak_bytes for cell in figures.cells) == peak
    assert max(cell.highest_bytes for cell in figures.cells) == peak
    assert peak == training.tracked_peak()


def test_activities_are_those_of_the_plan(run):
    training, figures = run
    sums = Counter()
    for cell in figures.cells:
        sums.update({name: getattr(cell, name) for name in ACTIVE})
    actions = {tensor.codec for tensor in figures.record.tensors}
    assert (sums["recomputing_seconds"] > 0) == (sums["recomputed_bytes"] > 0) == ("recompute" in actions)
    assert (sums["waiting_seconds"] > 0) == (sums["offloaded_bytes"] > 0) == ("offload" in actions)
    assert sums["packing_seconds"] > 0
    if training.plan is not None and training.plan.region is None:
        assert actions >= ({"recompute", "offload"} if type(training.model) is nn.Sequential else {"offload"})
        assert {forecast.name for forecast in figures.forecasts} >= {"peak", "held for backward", "step"}


def test_parts_lie_where_they_belong(run):
    training, figures = run
    assert {cell.phase for cell in figures.cells} == {"before", "forward", "loss", "backward", "optimizer"}
    modules = {name for name, _ in training.model.named_modules()}
    assert {cell.module for cell in figures.cells} <= modules
    saving = {cell.phase for cell in figures.cells if cell.saved_bytes}
    assert saving == {"forward"}
    assert all(cell.seconds >= 0 for cell in figures.cells)
    ends = [span.began_seconds + span.seconds for span in figures.spans]
    starts = [span.began_seconds for span in figures.spans]
    assert starts == sorted(starts) and ends[:-1] == pytest.approx(starts[1:])
    kinds = dict(zip(figures.kinds, figures.samples[0].nbytes, strict=True))
    parameters = sum(each.nbytes for each in training.model.parameters())
    assert kinds[Kind.PARAMETER] == parameters == kinds[Kind.STATE]
    assert kinds[Kind.INPUT] == training.x.nbytes


def test_it_is_written_and_read_back(run, tmp_path):
    _, figures = run
    timeline = Timeline(figures)
    timeline.save(tmp_path / "run.json")
    assert Timeline.load(tmp_path / "run.json") == timeline
    assert "peak" in str(timeline)


def test_the_trace_has_every_span_and_sample(run):
    _, figures = run
    events = timeline_events(figures)["traceEvents"]
    json.dumps(events)
    spent = Counter()
    for event in events:
        if event["ph"] == "X":
            spent[event["tid"]] += event["dur"]
    assert spent[1] == pytest.approx(figures.seconds * 1e6) == spent[2]
    other = [span.seconds for span in figures.spans if span.activity is not Activity.COMPUTING]
    assert spent[3] == pytest.approx(sum(other) * 1e6)
    counted = [event["args"] for event in events if event["ph"] == "C" and "kind" in event["name"]]
    assert [sum(values.values()) for values in counted] == [sum(each.nbytes) for each in figures.samples]


def test_history_has_the_refreshes_and_the_profiled_step():
    training, timeline = taken("cnn", noise=1e-2)
    training.session.detach()
    steps = [each.step for each in timeline.figures.history]
    assert steps == [0, 1, 1]
    lossy = {tensor.key: tensor.bound for tensor in timeline.figures.record.tensors if tensor.bound > 0}
    assert lossy and timeline.figures.history[-1].bounds == lossy


def test_one_taken_before_the_first_step_is_read_back(tmp_path):
    training, timeline = taken("cnn", steps=0, exact=True)
    training.session.detach()
    timeline.save(tmp_path / "run.json")
    assert Timeline.load(tmp_path / "run.json") == timeline
    assert timeline.figures.record.step == timeline.figures.history[-1].step == 0


def test_the_session_goes_on_as_before():
    training, other = Training("cnn", noise=1e-2), Training("cnn", noise=1e-2)
    for each in (training, other):
        each.step()
    training.session.timeline(training.step)
    for each in (training, other):
        each.step()
        each.session.detach()
    assert training.session.report().record.step == other.session.report().record.step == 1
    assert training.session.report().saved_bytes == other.session.report().saved_bytes
    assert training.session.state_dict()["step"] == other.session.state_dict()["step"]
    assert not [name for name in vars(training.session.engine.store) if name in ("_pack", "_decode", "leave")]


def test_a_plan_s_updates_are_made_as_in_any_other_step():
    model, x, y = cnn_subject()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    nothing = dict.fromkeys(("state_bytes", "gradient_bytes", "moved_bytes", "seconds"), 0)
    own = OptimizerPlan(name="SGD", in_backward=True, states=(), gradients=(), **nothing)
    plan = dataclasses.replace(handmade(model, x, y), optimizer=own)
    session, left = squeezebox.attach(model, optimizer=optimizer, plan=plan), []

    def step():
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        left.append([type(parameter.grad) for parameter in model.parameters()])
        optimizer.step()

    step()
    session.timeline(step)
    session.detach()
    assert left[0] == left[1] == left[2] and set(left[0]) > {torch.Tensor}


def test_what_raises_leaves_nothing_behind():
    training = Training("cnn", noise=1e-2)
    training.step()

    def failing():
        training.model(training.x)
        if len(training.seconds) > 1:
            raise KeyError("in the loss")
        training.step()

    with pytest.raises(KeyError):
        training.session.timeline(failing)
    training.step()
    assert training.session.timeline(training.step).figures.record.saved_bytes > 0
    with pytest.raises(AttachError, match="saw no backward"):
        training.session.timeline(lambda: training.model(training.x))
    with torch.autograd.profiler.profile(), pytest.raises(OptionError, match="another profiler"):
        training.session.timeline(training.step)
    training.session.detach()
    with pytest.raises(AttachError, match="detached"):
        training.session.timeline(training.step)


FAR = {"name": "way", "unit": "parsecs", "estimated": 1.0, "measured": 2.0}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda values: values.update(version=99), "version"),
        (lambda values: values["cells"][0].update(seconds="long"), r"cells\[0\].seconds"),
        (lambda values: values["samples"].append(3), "samples"),
        (lambda values: values.pop("spans"), "spans is missing"),
        (lambda values: values["peak"].update(nbytes=[-1]), "peak.nbytes"),
        (lambda values: values["peak"].update(nbytes=[1]), "1 numbers of bytes"),
        (lambda values: values["cells"][0].update(phase="warm-up"), "phase is 'warm-up'"),
        (lambda values: values.update(forecasts=[FAR]), "'parsecs'"),
    ],
)
def test_damaged_files_are_refused(change, named, run, tmp_path):
    values = Timeline(run[1]).to_dict()
    change(values)
    (tmp_path / "run.json").write_text(json.dumps(values))
    with pytest.raises(FormatError, match=named):
        Timeline.load(tmp_path / "run.json")
