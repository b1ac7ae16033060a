"""Several plans for one step: results are plain PyTorch's, and a disk that becomes slow is avoided."""

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import squeezebox
from squeezebox.memory import Area, Elsewhere, disk_folder
from squeezebox.schema import Action, Option, OptionError


class Throttled(Elsewhere):
    """A disk's folder that waits before it writes or reads."""

    kind, most_bytes = "file", None
    frees_memory = keeps_state = True

    def __init__(self):
        self.folder, self.pause = disk_folder(), 0.0
        self.path, self.filesystem, self.advice = self.folder.path, self.folder.filesystem, self.folder.advice

    def free_bytes(self):
        return self.folder.free_bytes()

    def open(self):
        return ThrottledFile(self)


class ThrottledFile(Area):
    fills_anything = False

    def __init__(self, place):
        self.place, self.file, self.thread = place, place.folder.open(), ThreadPoolExecutor(1)
        self.direct = self.file.direct

    def reserve(self, offset, nbytes):
        self.file.reserve(offset, nbytes)

    def begin_write(self, data, offset):
        return self.thread.submit(self._late, self.file.write, data, offset)

    def begin_read(self, data, offset):
        return self.thread.submit(self._late, self.file.read, data, offset)

    def _late(self, move, data, offset):
        time.sleep(self.place.pause)
        move(data, offset)

    def finish(self, *, wait):
        self.thread.shutdown(wait=wait)
        self.file.finish(wait=wait)

    def close(self):
        self.file.close()


def network(width=32):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(12)])


def batch(step, width=32):
    x = torch.randn(256, width, generator=torch.Generator().manual_seed(step))
    return x, x.flip(0)


def train(model, steps, after=lambda step: None):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after(step)
    return losses


@pytest.fixture(scope="module")
def plans():
    """All in a file, and all kept."""
    options = {"exact": True, "recompute": False}
    moving = squeezebox.plan(network(), sample=batch(0), loss_fn=nn.functional.mse_loss, **options)
    moving = dataclasses.replace(moving, budget_bytes=moving.plain_peak_bytes)
    kept = dataclasses.replace(moving, tensors=tuple(map(_kept, moving.tensors)))
    return [moving, dataclasses.replace(kept, predicted_seconds=2 * moving.predicted_seconds)]


def _kept(tensor):
    return dataclasses.replace(
        tensor, option=Option(action=Action.KEEP, codec="keep", held_bytes=tensor.saved_bytes)
    )


def test_a_file_that_becomes_slow_is_left_for_the_other_plan_with_the_same_results(plans):
    place, model, in_force = Throttled(), network(), []
    session = squeezebox.attach(model, plan=plans, offload=place)

    def after(step):
        in_force.append(session.engine.plan is plans[1])
        if step == 20:
            place.pause = 0.02

    losses = train(model, 60, after)
    notes = session.report().record.notes
    session.detach()
    assert losses == train(network(), 60)
    assert not in_force[0]
    assert sum(in_force[-25:]) >= 20
    assert any(note.startswith("plan 2 of 2 is in force since step") for note in notes)


def test_plans_that_cannot_take_turns_are_refused(plans):
    low = dataclasses.replace(plans[1], budget_bytes=1 << 20, predicted_peak_bytes=1)
    high = dataclasses.replace(plans[0], predicted_peak_bytes=1 << 21, budget_bytes=1 << 22)
    for given, options, said in (
        ([low, high], {}, "one reaches 2.00 MiB, and another one has to stay below 1.00 MiB.* same budget"),
        ([plans[0]], {}, "is no choice of plans; give one, or two or more"),
        (plans, {"arena": True}, "take turns without arena=True"),
        ([plans[0], dataclasses.replace(plans[1], model="Other")], {}, "for different models"),
    ):
        with pytest.raises(OptionError, match=said):
            squeezebox.attach(network(), plan=given, **options)
