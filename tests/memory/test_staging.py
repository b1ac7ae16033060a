"""Tensors moved beside the computation come back to the bit, with copies that are as late as may be.

Streams are threads here: a copy is made when somebody waits for it, or after a moment, so that a tensor that
is let go or handed out too early shows.
"""

import itertools
import random
import threading

import pytest
import torch

from squeezebox.memory import Staging
from squeezebox.schema import CaptureError


class Threads:
    """As CudaStreams. What the test itself does is the current stream."""

    device = torch.device("cpu")

    def __init__(self, lazy=False):
        self.lazy = lazy  # copies are made only when somebody waits
        self.abandoned = []
        self.waits = 0
        self.copies = []

    def pinned(self, like):
        return torch.empty_like(like, device="cpu")

    def leave(self, host, flat):
        return self._copy(host, flat, None)

    def arrive(self, flat, host, left):
        return self._copy(flat, host, left)

    def wait(self, event):
        self.waits += 1
        event.set()

    def happened(self, event):
        return event.done.is_set()

    def finish(self, event):
        event.set()

    def abandon(self, flat):
        self.abandoned.append(flat)

    def _copy(self, to, source, after):
        event = Copy(self.lazy, after, to, source.detach())
        self.copies.append(event)
        return event


class Copy:
    def __init__(self, lazy, after, to, source):
        self.done, self.lock = threading.Event(), threading.Lock()
        self.after, self.to, self.source = after, to, source
        if not lazy:
            threading.Timer(random.uniform(0.0, 0.004), self.set).start()

    def set(self):
        with self.lock:
            if not self.done.is_set():
                if self.after is not None:
                    self.after.set()
                self.to.copy_(self.source)
                self.done.set()


def tensors(count, numel=1000):
    return [torch.randn(numel) for _ in range(count)]


@pytest.mark.parametrize("lazy", (False, True))
@pytest.mark.parametrize("room", (0, 4000, 10_000, 1 << 20))
@pytest.mark.parametrize("host_room", (0, 4000, 20_000, None))
def test_what_is_moved_comes_back_to_the_bit(lazy, room, host_room):
    streams, saved = Threads(lazy), tensors(12)
    expected = [flat.clone() for flat in saved]
    staging = Staging(streams, most_bytes=room, host_bytes=host_room)
    slots = []
    while saved:
        flat = saved.pop(0)
        slots.append(staging.write(flat))
        held = [slot.source for slot in slots]
        assert sum(source.nbytes for source in held if source is not None) <= max(room, flat.nbytes)
        hosted = sum(slot.like.nbytes for slot in slots if slot.host is not None)
        assert host_room is None or hosted <= max(host_room, flat.nbytes)
        if all(source is not flat for source in held):
            flat.fill_(torch.nan)  # its memory goes to others
    while slots:
        slot = slots.pop()
        found = staging.read(slot)
        assert torch.equal(found, expected.pop())
    staging.clear()


@pytest.mark.parametrize("planned", [False, True])
def test_with_an_arena_it_has_its_places_there(planned):
    staging = Staging(Threads(lazy=True), most_bytes=0)
    reserve = staging.use_arena()
    if planned:
        staging.plan([4000] * 5)
    for number in range(8):
        reserve.start_step()
        staging.clear()
        slots = []
        for value in range(5):
            slots.append(staging.write(torch.full((1000,), float(10 * number + value))))
        for value in reversed(range(5)):
            assert bool((staging.read(slots.pop()) == 10 * number + value).all())
        staging._streams.copies.clear()
        assert reserve.record.tensors == (5 if planned or number else 0)
    assert (reserve.record.spills, reserve.record.layouts, reserve.record.nbytes) == (0, 1, 5 * 4032)
    reserve.start_step()
    staging.clear()
    slots = [staging.write(torch.zeros(1000)) for _ in range(5)]
    starts = sorted(slot.host.data_ptr() for slot in slots)
    assert {second - first for first, second in itertools.pairwise(starts)} == {4032}


def test_in_reverse_everything_is_fetched_one_ahead():
    streams = Threads(lazy=True)
    staging = Staging(streams, most_bytes=4000)
    slots = [staging.write(flat) for flat in tensors(6)]
    staging._let_go(0)
    left = len(streams.copies)
    assert left == 6
    for number, slot in enumerate(reversed(slots)):
        staging.read(slot)
        assert len(streams.copies) == left + min(number + 2, 6)
    assert not streams.abandoned


def test_what_was_fetched_in_vain_is_abandoned():
    streams = Threads()
    staging = Staging(streams, most_bytes=4000)
    expected = tensors(5)
    slots = [staging.write(flat.clone()) for flat in expected]
    staging._let_go(0)
    for number in (3, 0, 4, 1, 2):
        assert torch.equal(staging.read(slots[number]), expected[number])
    assert streams.abandoned
    staging.clear()


def test_without_room_nothing_waits_on_the_device():
    streams = Threads(lazy=True)
    staging = Staging(streams, most_bytes=3999)
    slots = [staging.write(flat) for flat in tensors(4)]
    assert all(slot.source is None for slot in slots)
    for number, slot in enumerate(reversed(slots)):
        staging.read(slot)
        assert len(streams.copies) == 4 + number + 1


def test_the_latest_are_handed_out_themselves():
    staging = Staging(Threads(lazy=True))
    flat = torch.randn(100)
    assert staging.read(staging.write(flat)) is flat


@pytest.mark.parametrize("how", ("read", "write", "clear"))
def test_a_change_in_place_on_the_way_is_an_error(how):
    staging = Staging(Threads(lazy=True), most_bytes=4000)
    flat = torch.randn(1000)
    slot = staging.write(flat)
    flat.add_(1.0)
    with pytest.raises(CaptureError, match="4000 bytes was changed in place while it was being moved"):
        {"read": lambda: staging.read(slot), "write": lambda: staging.write(flat), "clear": staging.clear}[
            how
        ]()


def test_steps_share_the_host_s_memory_and_only_what_passes_it_goes_to_the_file():
    staging = Staging(Threads(), host_bytes=16_000)
    for _ in range(3):
        slots = [staging.write(flat) for flat in tensors(6)]
        assert [slot.host is None for slot in slots] == [True, True, False, False, False, False]
        staging.clear()
        del slots
    assert staging._spill._living == 0
    assert staging._spill.record.file_bytes == 8192


def test_a_full_disk_is_an_error_and_what_is_in_memory_stays(monkeypatch):
    staging = Staging(Threads(), host_bytes=4000)
    expected = torch.randn(1000)
    slot = staging.write(expected.clone())
    staging.clear()
    monkeypatch.setattr("squeezebox.memory.DiskFile.reserve", full)
    with pytest.raises(CaptureError, match="4000 bytes could not be offloaded"):
        staging.write(torch.randn(1000))
    assert torch.equal(staging.read(slot), expected)


def full(*_):
    raise OSError(28, "No space left on device")


def test_slots_that_are_gone_hold_nothing():
    staging = Staging(Threads(lazy=True))
    flat = torch.randn(1000)
    slot = staging.write(flat)
    staging.write(torch.randn(10))
    del slot
    staging.clear()
    assert not staging._leaving
