"""What passes hand on is kept, filed or recomputed by cost, and the step is the same whatever was chosen."""

import copy
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from squeezebox.memory import DiskFolder, DiskSpeed, PeakMeter
from squeezebox.schema import CaptureError, OutputError
from squeezebox.streaming import StreamedStep
from squeezebox.streaming._choice import Search
from squeezebox.streaming._rates import Rates, measured_rates
from tests.streaming.test_exact import TOLERANCE, worst
from tests.streaming.test_memory import tensors_alone  # noqa: F401, a fixture
from tests.streaming.test_spool import Residual

PLANNER, STEP = "squeezebox.streaming._planner", "squeezebox.streaming._step"


@pytest.fixture(autouse=True)
def even_rates(monkeypatch):
    """Every element takes as long in every operator, whatever this machine does meanwhile."""

    def even(prepared, height):
        found = measured_rates(prepared, height)
        ahead, back = dict.fromkeys(found.ahead, (1e-6, 1e-8)), dict.fromkeys(found.back, (1e-6, 2e-8))
        return Rates(ahead=ahead, back=back, copying=1e-10)

    monkeypatch.setattr(f"{PLANNER}.measured_rates", even)


torch.manual_seed(0)
MODEL = Residual(width=8).double()
IMAGE, CLASSES = torch.randn(1, 3, 96, 24, dtype=torch.float64), torch.randint(0, 2, (1, 96, 24))
TENSORS = 3 * 2 * 8 * 8 * 96 * 24  # bytes of those with gradients; a mask crosses too


def streamed(model=None, **options):
    return StreamedStep(
        copy.deepcopy(MODEL) if model is None else model,
        nn.CrossEntropyLoss(),
        **({"memory": "1MiB"} | options),
    )


def at_speed(seconds_per_byte):
    """The disk's, whatever a free one would save."""
    speed = DiskSpeed(
        writing=seconds_per_byte,
        reading=seconds_per_byte,
        leaving=0.0,
        returning=0.0,
        slowing=0.0,
        direct=True,
    )
    return mock.patch.multiple(PLANNER, disk_speed=lambda folder: speed, _WORTH=10.0, _WORTH_SECONDS=-10.0)


def choosing(choose):
    """Plans that choose by ``choose(nodes)`` and by nothing else."""
    return mock.patch.object(Search, "cheapest", lambda search: choose([*search.nbytes]))


@settings(max_examples=8, phases=[Phase.explicit, Phase.generate])
@given(places=st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_gradients_are_the_whole_images_whatever_is_chosen(places):
    def choose(nodes):
        assert len(nodes) == 4
        return tuple(
            frozenset(node for node, place in zip(nodes, places, strict=True) if place == number)
            for number in (1, 2)
        )

    model, whole = copy.deepcopy(MODEL), copy.deepcopy(MODEL)
    expected = nn.functional.cross_entropy(whole(IMAGE), CLASSES)
    expected.backward()
    with choosing(choose), at_speed(0.0):
        step = streamed(model, memory="3MiB")
        plan = step.plan(IMAGE, CLASSES)
        loss = step(IMAGE, CLASSES)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    assert worst(whole, model) < TOLERANCE
    assert bool(plan.kept_bytes) == (1 in places) and bool(plan.disk_bytes) == (2 in places)
    assert torch.equal(model.norms[1].num_batches_tracked, whole.norms[1].num_batches_tracked)


@pytest.mark.usefixtures("tensors_alone")
@pytest.mark.parametrize("memory", [700_000, 1 << 20, 1 << 21, 1 << 23])
def test_a_planned_step_stays_within_the_memory(memory):
    step, meter = streamed(memory=memory), PeakMeter(torch.device("cpu"))
    plan = step.plan(IMAGE, CLASSES)
    assert meter.start()
    step(IMAGE, CLASSES)
    assert plan.kept_bytes < meter.stop(()).total_bytes < memory


def test_a_quick_disk_is_used_and_a_slow_one_is_not():
    with at_speed(1e-15):
        quick = streamed().plan(IMAGE, CLASSES)
    with at_speed(1.0):
        slow = streamed().plan(IMAGE, CLASSES)
    assert quick.disk_bytes > 0 == slow.disk_bytes
    with at_speed(1e-15):
        assert streamed(spool=False).plan(IMAGE, CLASSES).disk_bytes == 0
        assert streamed(memory="64MiB").plan(IMAGE, CLASSES).disk_bytes == 0  # memory is quicker


def test_the_plan_says_what_is_handed_on():
    def choose(nodes):
        return frozenset(nodes[:1]), frozenset(nodes[2:3])

    with choosing(choose), at_speed(1e-15):
        plan = streamed().plan(IMAGE, CLASSES)
    ahead = [stage for stage in plan.stages if stage.reduces]
    assert sum(stage.kept_bytes for stage in ahead) == plan.kept_bytes == 2 * 8 * 8 * 96 * 24
    assert sum(stage.disk_bytes for stage in ahead) == plan.disk_bytes == 2 * 8 * 8 * 96 * 24
    assert sum(stage.recomputed_bytes for stage in ahead) > 0
    assert plan.seconds == sum(stage.seconds for stage in plan.stages) > 0
    for words in ("288.00 KiB kept", "288.00 KiB on disk", "recomputed", "predicted: "):
        assert words in str(plan)


@pytest.mark.parametrize("free", [0, 1024])
def test_a_disk_without_room_is_not_used(monkeypatch, free):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda folder: namedtuple("usage", "total used free")(1, 1, free)
    )
    with at_speed(1e-15):
        assert streamed().plan(IMAGE, CLASSES).disk_bytes == 0


def test_a_disk_that_fails_or_fills_up_leads_to_recomputing():
    def failing(folder):
        raise CaptureError("full")

    with at_speed(1e-15), mock.patch(f"{PLANNER}.disk_speed", failing):
        assert streamed().plan(IMAGE, CLASSES).disk_bytes == 0
    model, whole = copy.deepcopy(MODEL), copy.deepcopy(MODEL)
    nn.functional.cross_entropy(whole(IMAGE), CLASSES).backward()
    with at_speed(1e-15), mock.patch(f"{STEP}.nameless_file", side_effect=OutputError("full")) as opened:
        step = streamed(model)
        assert step.plan(IMAGE, CLASSES).disk_bytes > 0
        step(IMAGE, CLASSES)
        with pytest.raises(OutputError, match="full"):
            streamed(spool=True)(IMAGE, CLASSES)
    assert opened.call_count == 2 and step.plan(IMAGE, CLASSES).disk_bytes == 0
    assert worst(whole, model) < TOLERANCE


def test_a_checkpoint_in_memory_has_no_file_beside_it(tmp_path):
    with at_speed(1e-15):
        plan = streamed(checkpoint=tmp_path / "step").plan(IMAGE, CLASSES)
        assert plan.disk_bytes > 0 == plan.kept_bytes and not plan.note
        if not DiskFolder("/dev/shm", "").frees_memory:
            plan = streamed(checkpoint=Path("/dev/shm/step")).plan(IMAGE, CLASSES)
            assert plan.disk_bytes == plan.kept_bytes == 0
            assert "a file in /dev/shm would free no memory, so none is made" in str(plan)


@pytest.mark.parametrize("seconds", [(1e-15, 1.0), (1.0, 1e-15)])
@pytest.mark.parametrize("strips", [0.3, 0.8])
def test_a_step_resumes_with_what_it_had_chosen(tmp_path, seconds, strips):
    def stop(progress):
        if progress.done >= strips * progress.total:
            raise KeyboardInterrupt

    path, seen, model, whole = tmp_path / "step", [], copy.deepcopy(MODEL), copy.deepcopy(MODEL)
    options = {"checkpoint": path, "checkpoint_seconds": 0.0, "memory": 400_000}
    with at_speed(seconds[0]):
        interrupted = streamed(model, progress=stop, **options)
        with pytest.raises(KeyboardInterrupt):
            interrupted(IMAGE, CLASSES)
        assert bool(interrupted.plan(IMAGE, CLASSES).disk_bytes) == (seconds[0] < 1.0)
    assert (tmp_path / "step.spool").exists() == (seconds[0] < 1.0)
    with at_speed(seconds[1]):
        loss = streamed(model, progress=seen.append, **options)(IMAGE, CLASSES)
    assert seen[0].done > 2 and not [*tmp_path.iterdir()]

    def same(planner, prepared):
        ((ways, plan),) = interrupted._plans.values()
        names = {node.name for node in ways.layout.filed}
        filed = frozenset(node for node in prepared.streamed.rows if node.name in names)
        return planner.ways(prepared, (frozenset(), filed)), plan

    with mock.patch(f"{PLANNER}.Planner.plan", same):
        assert torch.equal(loss, streamed(whole, memory=400_000)(IMAGE, CLASSES))
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


COSTS = st.lists(
    st.tuples(st.integers(1, 9), st.floats(0.1, 9.0), st.floats(0.0, 9.0), st.integers(1, 3)),
    min_size=1,
    max_size=4,
)


@given(tensors=COSTS, most_kept=st.integers(0, 20), most_filed=st.integers(0, 20))
def test_the_search_keeps_to_its_bounds_and_finds_what_single_tensors_cost(tensors, most_kept, most_filed):
    """Seconds add up here, so with room for all the best place of each tensor is the best choice."""
    nodes = range(len(tensors))
    level = {node: tensors[node][3] for node in nodes}

    def seconds(choice, kept_bytes):
        kept, filed = choice
        assert kept_bytes == sum(tensors[node][0] for node in kept) <= most_kept and not kept & filed
        places = [0.0 if node in kept else tensors[node][2 if node in filed else 1] for node in nodes]
        return 1.0 + sum(places)

    costs = SimpleNamespace(seconds=seconds, prepared=SimpleNamespace(streamed=SimpleNamespace(level=level)))
    nbytes = {node: tensors[node][0] for node in nodes}
    search = Search(costs=costs, nbytes=nbytes, most_kept=most_kept, most_filed=most_filed)
    found = search.seconds(search.cheapest())
    for simple in ((frozenset(), frozenset()), (frozenset(), frozenset(nodes))):
        assert found <= search.seconds(simple) / 0.9**2
    if most_kept >= sum(nbytes.values()):
        assert found <= 1.0 / 0.9**2


def test_what_has_room_is_kept_but_not_beside_a_checkpoint(tmp_path):
    plan = streamed(memory="64MiB").plan(IMAGE, CLASSES)
    assert plan.kept_bytes >= TENSORS and "kept in memory from one pass to the next: " in str(plan)
    assert streamed(memory="64MiB", checkpoint=tmp_path / "step").plan(IMAGE, CLASSES).kept_bytes == 0
    assert streamed(memory=None, height=8).plan(IMAGE, CLASSES).kept_bytes == 0


def test_planning_leaves_random_numbers_as_they_are():
    class Drawn(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(self.body(x).relu().mean((2, 3)))

    step = streamed(Drawn().double())
    before = torch.get_rng_state()
    assert step.plan(IMAGE, torch.tensor([1])).seconds is not None
    assert torch.equal(torch.get_rng_state(), before)
