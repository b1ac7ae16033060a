"""Plans as they are on a device: blocks in one arena, tensors moved to the host on streams of their own."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import squeezebox
from squeezebox.capture import DeviceBlocks
from squeezebox.codecs import _blocks
from squeezebox.memory import Staging
from squeezebox.profiling import StepProfiler
from squeezebox.schema import Action, Option
from squeezebox.session._engine import Engine
from tests.memory.test_staging import Threads
from tests.planning.test_plan import Block, regular, step


@pytest.fixture
def task():
    torch.manual_seed(2)
    stem = nn.Conv2d(3, 8, 3, padding=1)
    model = nn.Sequential(stem, *[Block(8) for _ in range(4)], nn.Flatten(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer, (torch.randn(8, 3, 8, 8), torch.randint(10, (8,)))


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    """Sessions hold tensors as on a device, which here is the CPU."""
    own = Engine.__init__

    def init(self, *arguments, **named):
        own(self, *arguments, **named)
        self.policy.on_host = False
        self.store.blocks = DeviceBlocks(torch.device("cpu"))
        self.store.staging = Staging(Threads())

    monkeypatch.setattr(Engine, "__init__", init)


def planned(task, **how):
    model, optimizer, sample = task
    return squeezebox.plan(model, sample=sample, loss_fn=F.cross_entropy, optimizer=optimizer, **how)


def test_blocks_take_the_room_that_was_planned_for_the_whole_step(task):
    step(*task)
    plan = planned(task, noise=1e-2, offload=False, recompute=False)
    blocks = [tensor.option for tensor in plan.tensors if tensor.option.codec == "blocks"]
    assert len(blocks) > 5 and all(option.lasting for option in blocks)
    assert plan.predicted_noise <= 1e-2
    session = squeezebox.attach(task[0], optimizer=task[1], plan=plan)
    peak = regular(session, *task) + plan.lasting_bytes  # which is there before the step, and stays
    assert session.engine.store.blocks.arena.nbytes == pytest.approx(plan.lasting_bytes, abs=4)
    assert session.engine.store.blocks.settle().spilled_bytes == 0
    session.detach()
    # what a CPU's loops take for a moment is not planned: a device's take nothing
    assert 0.95 * plan.predicted_peak_bytes < peak <= 1.1 * plan.predicted_peak_bytes
    assert peak < 0.8 * plan.plain_peak_bytes


def test_exact_plans_that_move_tensors_leave_gradients_to_the_bit(task):
    model, optimizer, sample = task
    F.cross_entropy(model(sample[0]), sample[1]).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
    plan = planned(task, exact=True, recompute=False)  # its host's memory is what is measured, here
    moved = Option(action=Action.OFFLOAD, codec="host", held_bytes=0)
    tensors = tuple(dataclasses.replace(tensor, option=moved) for tensor in plan.tensors)
    plan = dataclasses.replace(plan, tensors=tensors)
    session = squeezebox.attach(model, plan=plan)
    model.zero_grad()
    F.cross_entropy(model(sample[0]), sample[1]).backward()
    report = session.report()
    session.detach()
    assert {tensor.codec for tensor in report.tensors} == {"offload"}
    assert all(torch.equal(a, p.grad) for a, p in zip(expected, model.parameters(), strict=True))


@pytest.mark.slow
def test_the_profiled_step_packs_into_arenas_as_any_other(task, monkeypatch):
    """Its trials too: memory of their own, as large as the tensor, and waiting would be no part of a step."""
    running, alone = [False], []

    def watched(method, runs):
        def call(*arguments, **named):
            running[0] = runs
            return method(*arguments, **named)

        return call

    for name, runs in (("start", True), ("stop", False)):
        monkeypatch.setattr(StepProfiler, name, watched(getattr(StepProfiler, name), runs))
    most = _blocks._most_bytes
    monkeypatch.setattr(_blocks, "_most_bytes", lambda flat: alone.append(running[0]) or most(flat))
    plan = planned(task, noise=1e-2, offload=False, recompute=False)
    assert any(tensor.option.codec == "blocks" for tensor in plan.tensors)
    assert False in alone and True not in alone
