"""Tensors of a device in pinned host memory, copied both ways on streams of their own; a file behind that."""

from __future__ import annotations

import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from squeezebox.memory._reserve import Reserve
from squeezebox.memory._spill import Slot, Spill
from squeezebox.schema import CaptureError


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is recorded there, during which nothing may be asked or waited for."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # torch asks the current device's current stream
        return torch.cuda.is_current_stream_capturing()


class CudaStreams:
    """As :class:`squeezebox.memory.Streams`: one stream for each direction, ordered by events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._leaving = torch.cuda.Stream(device)
        self._arriving = torch.cuda.Stream(device)

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        """From torch's cache of pinned memory, which heeds the streams that a block was copied on."""
        return torch.empty_like(like, device="cpu", pin_memory=True)

    def leave(self, host: torch.Tensor, flat: torch.Tensor) -> torch.cuda.Event:
        """Copy to the host, after all that the current stream was asked for until now."""
        return self._copy(self._leaving, host, flat, self._now())

    def arrive(self, flat: torch.Tensor, host: torch.Tensor, left: torch.cuda.Event) -> torch.cuda.Event:
        """Copy back, after that and after ``left``."""
        return self._copy(self._arriving, flat, host, self._now(), left)

    def wait(self, event: torch.cuda.Event) -> None:
        """What the current stream is asked for from now on comes after the event."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def happened(self, event: torch.cuda.Event) -> bool:
        """Whether it has; while a graph is captured nothing has."""
        return not is_capturing(self.device) and event.query()

    def finish(self, event: torch.cuda.Event) -> None:
        """The host waits for the event."""
        event.synchronize()

    def abandon(self, flat: torch.Tensor) -> None:
        """The allocator keeps the tensor's memory until the copy into it is over."""
        flat.record_stream(self._arriving)

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _copy(
        self, stream: torch.cuda.Stream, to: torch.Tensor, source: torch.Tensor, *after: torch.cuda.Event
    ) -> torch.cuda.Event:
        for event in after:
            stream.wait_event(event)
        with torch.cuda.stream(stream), torch.no_grad():
            to.copy_(source, non_blocking=True)
        done = torch.cuda.Event()
        done.record(stream)
        return done


_MOST_BYTES = 1 << 28
_HOST_SHARE = 0.5  # of the machine's memory
Event = Any  # of the streams' own kind


class Streams(Protocol):
    """Copies that run while the current stream computes. Only :meth:`finish` makes the host wait."""

    device: torch.device

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        """Host memory for a flat tensor like this one, on whatever device."""

    def leave(self, host: torch.Tensor, flat: torch.Tensor) -> Event:
        """Copy to the host, after all that the current stream was asked for until now."""

    def arrive(self, flat: torch.Tensor, host: torch.Tensor, left: Event) -> Event:
        """Copy back, after that and after ``left``."""

    def wait(self, event: Event) -> None:
        """What the current stream is asked for from now on comes after the event."""

    def happened(self, event: Event) -> bool:
        """Whether it has."""

    def finish(self, event: Event) -> None:
        """The host waits for the event."""

    def abandon(self, flat: torch.Tensor) -> None:
        """The tensor goes, and may still be written to by :meth:`arrive`."""


class HostSlot:
    """A tensor's place in host memory; free again when the slot is gone."""

    __slots__ = ("__weakref__", "before", "file", "host", "left", "like", "source", "version")

    def __init__(self, host: torch.Tensor, left: Event, source: torch.Tensor, before: Before) -> None:
        self.like = torch.empty_like(source, device="meta")
        self.host: torch.Tensor | None = host  # or else it is in the
        self.file: Slot | None = None
        self.left = left
        self.source: torch.Tensor | None = source  # until the copy is made
        self.version = source._version
        self.before = before  # the slot written before this one, while it lives


Before = Callable[[], HostSlot | None]


class Staging:
    """Takes flat tensors of a device and gives them back, from host memory where that is needed.

    A tensor is held until its copy has been made. Where copies lag behind by more than ``most_bytes``, the
    device waits for the oldest, so that its memory does not fill with tensors on their way. With each tensor
    that is read, the one written before it is fetched if that is no more either: backward asks in reverse.

    Beyond ``host_bytes`` (half of the machine's memory) the oldest, which backward wants last, go on to a
    file, the ``spill``; the host waits for those. With a ``reserve`` they have their places in its arena.
    """

    def __init__(
        self,
        streams: Streams,
        most_bytes: int = _MOST_BYTES,
        host_bytes: int | None = None,
        spill: Spill | None = None,
    ) -> None:
        self.reserve: Reserve | None = None
        self._written = 0  # since it was cleared
        self._streams = streams
        self.most_bytes = most_bytes
        self._host_bytes = _half_of_memory() if host_bytes is None else host_bytes
        self._hosted: list[weakref.ref[HostSlot]] = []  # the oldest first
        self._hosted_bytes = 0  # of those, at most
        self._spill = Spill() if spill is None else spill
        self._leaving: deque[weakref.ref[HostSlot]] = deque()
        self._last: Before = lambda: None
        self._ahead: tuple[weakref.ref[HostSlot], torch.Tensor, Event] | None = None

    @property
    def device(self) -> torch.device:
        """That whose tensors it takes."""
        return self._streams.device

    def use_arena(self) -> Reserve:
        """From now on what is written has its place in one block of pinned memory."""
        self.reserve = Reserve(self._pinned_bytes, lasting=True)
        return self.reserve

    def plan(self, sizes: Sequence[int]) -> None:
        """Lay the arena out for tensors of ``sizes`` bytes, in the order in which they will be written."""
        assert self.reserve is not None
        self.reserve.plan({_name(number): nbytes for number, nbytes in enumerate(sizes)})

    def write(self, flat: torch.Tensor) -> HostSlot:
        """Have a flat tensor moved.

        Raises:
            CaptureError: one that was still on its way has been changed in place, or there is no room left on
                the disk either.
        """
        if self._hosted_bytes + flat.nbytes > self._host_bytes:
            self._to_file(self._host_bytes - flat.nbytes)
        name, self._written = _name(self._written), self._written + 1
        room = self.reserve.claim(name) if self.reserve is not None else None
        place = room.take(flat.nbytes) if room is not None else None
        host = self._streams.pinned(flat) if place is None else place.view(flat.dtype)
        slot = HostSlot(host, self._streams.leave(host, flat), flat, self._last)
        if self.reserve is not None:
            self.reserve.note(name, [flat.nbytes], slot, placed=place is not None)
        self._last = weakref.ref(slot)
        self._leaving.append(self._last)
        self._hosted.append(self._last)
        self._hosted_bytes += flat.nbytes
        self._let_go(self.most_bytes)
        return slot

    def read(self, slot: HostSlot) -> torch.Tensor:
        """The flat tensor; itself if it is still there.

        Raises:
            CaptureError: it was changed in place while it was on its way.
        """
        whole = _unchanged(slot) if slot.source is not None else self._fetched(slot)
        following = slot.before()
        if following is not None and following.source is None:
            room = self.most_bytes - following.like.nbytes
            if room >= 0:
                self._let_go(room)
                self._fetch(following)
        return whole

    def _pinned_bytes(self, nbytes: int) -> torch.Tensor:
        return self._streams.pinned(torch.empty(nbytes, dtype=torch.uint8, device="meta"))

    def clear(self) -> None:
        """Forget what was fetched ahead, and hold nothing that has left: a step begins."""
        self._written = 0
        self._let_go(0)
        self._drop_ahead()

    def _let_go(self, most_bytes: int) -> None:
        """Let tensors go that have left, and wait for as many as it takes."""
        waiting = [slot for ref in self._leaving if (slot := ref()) is not None]
        held = sum(slot.like.nbytes for slot in waiting)
        for slot in waiting:
            if not self._streams.happened(slot.left):
                if held <= max(most_bytes, 0):
                    break
                self._streams.wait(slot.left)
            _unchanged(slot)
            slot.source = None
            held -= slot.like.nbytes
        self._leaving = deque(weakref.ref(slot) for slot in waiting if slot.source is not None)

    def _to_file(self, most_bytes: int) -> None:
        """Leave at most ``most_bytes`` in the host's memory."""
        living = [slot for ref in self._hosted if (slot := ref()) is not None]
        self._hosted_bytes = sum(slot.like.nbytes for slot in living)
        for slot in living:
            if self._hosted_bytes <= most_bytes:
                break
            assert slot.host is not None
            self._streams.finish(slot.left)
            slot.file, slot.host = self._spill.write(slot.host), None
            self._hosted_bytes -= slot.like.nbytes
        self._hosted = [weakref.ref(slot) for slot in living if slot.host is not None]

    def _in_memory(self, slot: HostSlot) -> torch.Tensor:
        """In the host's, where it does not stay if it was not there."""
        if slot.host is not None:
            return slot.host
        assert slot.file is not None
        host = self._streams.pinned(slot.like)
        self._spill.read(slot.file, host)
        return host

    def _fetched(self, slot: HostSlot) -> torch.Tensor:
        self._fetch(slot)
        assert self._ahead is not None
        _, flat, arrived = self._ahead
        self._ahead = None
        self._streams.wait(arrived)
        return flat

    def _fetch(self, slot: HostSlot) -> None:
        """Begin to fetch it, if that has not begun yet."""
        if self._ahead is not None and self._ahead[0]() is slot:
            return
        self._drop_ahead()
        flat = torch.empty_like(slot.like, device=self._streams.device)
        arrived = self._streams.arrive(flat, self._in_memory(slot), slot.left)
        self._ahead = (weakref.ref(slot), flat, arrived)

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            if self.reserve is not None:  # the place may go to another tensor
                self._streams.wait(self._ahead[2])
            self._streams.abandon(self._ahead[1])
            self._ahead = None


def _name(number: int) -> str:
    """The name of the tensor that is written after ``number`` others."""
    return f"offloaded {number}"


def _unchanged(slot: HostSlot) -> torch.Tensor:
    assert slot.source is not None
    if slot.source._version != slot.version:
        raise CaptureError(
            f"a saved tensor of {slot.like.nbytes} bytes was changed in place while it was being moved to "
            f"host memory (version {slot.version}, now {slot.source._version}), so what arrives there may be "
            "either. Replace the in-place operation by one that makes a new tensor, or make the plan with "
            "offload=False."
        )
    return slot.source


def _half_of_memory() -> int:
    if not hasattr(os, "sysconf"):  # Windows, where no plan moves anything
        return sys.maxsize
    return int(_HOST_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
