"""Blocks in an arena of a device, here the CPU: sizes are known a step late, and nothing is lost."""

import pytest
import torch

import squeezebox
from squeezebox.capture import DeviceBlocks
from squeezebox.memory import Staging
from squeezebox.schema import Action, Option
from tests.capture.nets import images, loss_of, resnet
from tests.memory.test_staging import Threads


class Still:
    """One bound for ever."""

    def due(self, step):
        return False

    def bound(self, state, key, role, rms):
        return 0.05

    def update(self, state, statistics):
        return state


@pytest.fixture
def session():
    """Of a network whose tensors are packed as on a device; its bounds are fixed."""
    torch.manual_seed(0)
    model = resnet(8, 1)
    session = squeezebox.attach(model, controller=Still())
    session.engine.policy.on_host = False
    session.engine.store.blocks = DeviceBlocks(torch.device("cpu"))
    yield session
    session.detach()


def step(session, x):
    session.engine.model.zero_grad()
    loss_of(session.engine.model(x)).backward()
    return [parameter.grad.clone() for parameter in session.engine.model.parameters()]


def larger_than_expected(blocks, times):
    """As if the same tensors had packed so much better until now."""
    blocks._rates = {slot: rate / times for slot, rate in blocks._rates.items()}
    blocks._recent.append(max(int(blocks._recent.pop() / times), 1))


def test_later_steps_use_one_arena(session):
    x = images()
    first, arenas = step(session, x), []
    for _ in range(3):
        found = step(session, x)
        arenas.append(session.engine.store.blocks.arena)
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))
    assert arenas[0] is not None and arenas[0] is arenas[1] is arenas[2]
    report = session.report()
    blocks = [row for row in report.tensors if "blocks" in row.codec]
    assert blocks and all(0 < row.packed_bytes < row.saved_bytes for row in blocks)


def test_what_finds_no_room_is_kept_elsewhere(session):
    x = images()
    first = step(session, x)
    session.engine.close_step()
    larger_than_expected(session.engine.store.blocks, 1.5)
    second = step(session, x)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    use = session.engine.store.blocks.settle() if session.engine.close_step() is None else None
    assert use.spilled_bytes > 0 and use.lost == 0
    third = step(session, x)  # in an arena that is large enough again
    session.engine.close_step()
    assert session.engine.store.blocks.settle().spilled_bytes == 0
    assert all(torch.equal(a, b) for a, b in zip(first, third, strict=True))


def test_lost_blocks_are_an_error(session):
    x = images()
    step(session, x)
    session.engine.close_step()
    larger_than_expected(session.engine.store.blocks, 1 << 20)
    assert any(bool(gradient.isnan().any()) for gradient in step(session, x))
    with pytest.raises(squeezebox.CaptureError, match="found no room"):
        step(session, x)
    assert not any(bool(gradient.isnan().any()) for gradient in step(session, x))


def test_two_forwards_before_their_backwards_have_arenas_of_their_own(session):
    x, y = images(), images().flip(0)
    expected = [a + b for a, b in zip(step(session, x), step(session, y), strict=True)]
    step(session, x)
    session.engine.model.zero_grad()
    one, two = session.engine.model(x), session.engine.model(y)
    (loss_of(one) + loss_of(two)).backward()
    for parameter, gradient in zip(session.engine.model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def moved(key):
    """A plan that moves every tensor."""
    return Option(action=Action.OFFLOAD, held_bytes=0)


@pytest.mark.parametrize("lazy", (False, True))
@pytest.mark.parametrize("room", (0, 1 << 16, 1 << 28))
def test_what_is_moved_to_the_host_comes_back_to_the_bit(lazy, room):
    torch.manual_seed(0)
    model, x = resnet(8, 1), images()
    plain = squeezebox.attach(model, exact=True)
    first = step(plain, x)
    plain.detach()
    session = squeezebox.attach(model, exact=True)
    session.engine.store.planned = moved
    session.engine.store.staging = Staging(Threads(lazy), most_bytes=room)
    for _ in range(2):
        found = step(session, x)
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))
    assert sum(row.codec == "offload" for row in session.report().tensors) > 5
    session.detach()


def test_a_tensor_changed_while_it_is_moved_is_an_error():
    class Late(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

        def forward(self, x):
            x = torch.tanh(self.first(x))
            y = self.second(x)
            with torch.no_grad():
                x.add_(1.0)
            return y

    model = Late()
    session = squeezebox.attach(model, exact=True)
    session.engine.store.planned = moved
    session.engine.store.staging = Staging(Threads(lazy=True))
    with pytest.raises(squeezebox.CaptureError, match="was changed in place while it was being moved"):
        model(torch.randn(64, 64)).sum().backward()
    session.detach()


def test_a_step_that_begins_before_the_last_one_s_backward_has_ended_leaves_its_blocks(session, monkeypatch):
    """Two forwards, one backward, another forward, the other backward."""
    monkeypatch.setattr("squeezebox.capture._device._SPARE", 100.0)  # the arena stays as it is
    x, y, z = images(), images().flip(0), images().flip(1)
    expected = step(session, x)
    step(session, y)
    for _ in range(2):  # the second time the arena is large enough for both
        one, two = loss_of(session.engine.model(x)), loss_of(session.engine.model(y))
        two.backward()
        third = loss_of(session.engine.model(z))
        session.engine.model.zero_grad()
        one.backward()
    for parameter, gradient in zip(session.engine.model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    del third


class Late:
    """An event that has happened only for those who wait."""

    def __init__(self):
        self.over = False

    def synchronize(self):
        self.over = True

    def query(self):
        return self.over


def test_what_a_late_device_took_is_known_a_step_later(session, monkeypatch):
    monkeypatch.setattr("squeezebox.capture._device._Now", Late)
    x = images()
    step(session, x)
    session.engine.close_step()
    larger_than_expected(session.engine.store.blocks, 1 << 20)
    step(session, x)
    with pytest.raises(squeezebox.CaptureError, match="found no room"):
        for _ in range(2):
            step(session, x)


def test_measured_steps_hold_no_idle_arena(session):
    blocks = session.engine.store.blocks
    for _ in range(2):
        step(session, images())
    assert blocks._kept is not None
    session.engine.close_step()
    blocks.start_step(measured=True, in_use=False)
    assert blocks._kept is None


def test_what_a_device_would_have_to_be_asked_about_is_kept():
    class Odd(torch.nn.Module):
        def forward(self, x):
            picked = torch.gather(x, 1, x.detach().argsort(1))
            return torch.nn.functional.dropout(picked * picked, 0.5)

    model = Odd()
    session = squeezebox.attach(model, controller=Still())
    session.engine.policy.on_host = False
    session.engine.store.blocks = DeviceBlocks(torch.device("cpu"))
    x = torch.randn(64, 64, requires_grad=True)
    model(x).sum().backward()
    codecs = {row.role.value: row.codec for row in session.report().tensors}
    session.detach()
    assert codecs["integer"] == codecs["dropout mask"] == "keep"


def test_batches_of_any_size_lose_nothing(session):
    """Small ones leave the arena as it is; what is too large for it goes into memory of its own."""
    x, small = images(), images()[:1]
    expected = {len(batch): step(session, batch) for batch in (small, x)}
    for batch in (small, small, x, small, x, small, x):
        found = step(session, batch)
        assert all(torch.equal(a, b) for a, b in zip(expected[len(batch)], found, strict=True))
    session.engine.close_step()
    assert session.engine.store.blocks.settle().lost == 0


def test_an_arena_is_made_smaller_once_nothing_large_has_come_for_a_while(session):
    blocks = session.engine.store.blocks
    for _ in range(2):
        step(session, images())
    large = blocks.arena.nbytes
    for number in range(12):
        step(session, images()[:1])
        assert number > 2 or blocks.arena.nbytes == large
    assert blocks.arena.nbytes < large / 2


def test_a_plan_s_arena_stays_whatever_its_size(session):
    blocks = session.engine.store.blocks
    for _ in range(2):
        step(session, images())
    for more in range(1, 8):
        session.engine.store.room = 2 * blocks._recent[-1] + more
        step(session, images())
        step(session, images())  # with less pinned memory, once its sizes are known
        arena = blocks.arena
        step(session, images())
        assert blocks.arena is arena


def test_pinned_memory_is_a_share_of_the_arena_and_grows_with_what_went_there(session):
    blocks = session.engine.store.blocks
    for _ in range(2):
        step(session, images())
    room = blocks.arena.nbytes
    assert 0.2 * room < blocks.arena.spill.nbytes < 0.3 * room
    session.engine.close_step()
    session.engine.store.room = int(0.85 * blocks.settle().nbytes)  # a plan's: packed better
    step(session, images())
    assert blocks.arena.spill.nbytes > 0.99 * blocks.arena.nbytes  # nothing is known yet
    assert session.engine.close_step() is None and blocks.settle().spilled_bytes > 0.1 * blocks.arena.nbytes
    assert any("went to pinned memory" in note for note in session.report().record.notes)
    spilled = blocks.use.spilled_bytes
    step(session, images())
    assert 2 * spilled <= blocks.arena.spill.nbytes < 0.9 * blocks.arena.nbytes


def test_steps_outside_the_count_leave_no_sizes_behind(session):
    blocks = session.engine.store.blocks
    step(session, images())
    session.engine.close_step()
    needed = blocks._recent[-1]
    session.measure_noise(lambda: loss_of(session.engine.model(images())).backward())
    session.engine.policy.controller.due = lambda step: True
    step(session, images())
    session.engine.close_step()
    assert blocks._recent[-1] == pytest.approx(needed, rel=0.01)


def test_tensors_of_another_device_are_no_business_of_the_arena(session):
    for _ in range(2):
        step(session, images())
    session.engine.store.blocks.device = torch.device("meta")
    found = step(session, images())
    assert all(bool(gradient.isfinite().all()) for gradient in found)
    session.engine.close_step()
    assert session.engine.store.blocks.settle().nbytes == 0


class OnMeta(Threads):
    """Streams of a device on which nothing of the model lies."""

    device = torch.device("meta")


def test_tensors_of_another_device_are_moved_to_the_file_or_kept():
    model, x = resnet(8, 1), images()
    first = exact_steps(model, x, None)
    found = exact_steps(
        model, x, Staging(OnMeta(), most_bytes=0)
    )  # the model's tensors lie on the host all the same
    assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))


def exact_steps(model, x, staging):
    """Gradients with every tensor moved."""
    session = squeezebox.attach(model, exact=True)
    session.engine.store.planned, session.engine.store.staging = moved, staging
    found = step(session, x)
    session.detach()
    return found
