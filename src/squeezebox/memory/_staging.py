"""Tensors of a device in pinned host memory, copied both ways on streams of their own."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

from squeezebox.schema import CaptureError

_MOST_BYTES = 1 << 28
Event = Any  # of the streams' own kind


class Streams(Protocol):
    """Copies beside what the current stream does. Nothing here makes the host wait."""

    device: torch.device

    def pinned(self, flat: torch.Tensor) -> torch.Tensor:
        """Host memory for the flat tensor's like."""

    def leave(self, host: torch.Tensor, flat: torch.Tensor) -> Event:
        """Copy to the host, after all that the current stream was asked for until now."""

    def arrive(self, flat: torch.Tensor, host: torch.Tensor, left: Event) -> Event:
        """Copy back, after that and after ``left``."""

    def wait(self, event: Event) -> None:
        """What the current stream is asked for from now on comes after the event."""

    def happened(self, event: Event) -> bool:
        """Whether it has."""

    def abandon(self, flat: torch.Tensor) -> None:
        """The tensor goes, and may still be written to by :meth:`arrive`."""


class HostSlot:
    """A tensor's place in host memory; free again when the slot is gone."""

    __slots__ = ("__weakref__", "before", "host", "left", "source", "version")

    def __init__(self, host: torch.Tensor, left: Event, source: torch.Tensor, before: Before) -> None:
        self.host = host
        self.left = left
        self.source: torch.Tensor | None = source  # until the copy is made
        self.version = source._version
        self.before = before  # the slot written before this one, while it lives


Before = Callable[[], HostSlot | None]


class Staging:
    """Takes flat tensors of a device and gives them back, from host memory where that is needed.

    A tensor is held until its copy has been made. Where copies lag behind by more than ``most_bytes``, the
    device waits for the oldest, so that its memory does not fill with tensors on their way. With each tensor
    that is read, the one written before it is fetched: backward asks in reverse.
    """

    def __init__(self, streams: Streams, most_bytes: int = _MOST_BYTES) -> None:
        self._streams = streams
        self._most_bytes = most_bytes
        self._leaving: deque[weakref.ref[HostSlot]] = deque()
        self._last: Before = lambda: None
        self._ahead: tuple[weakref.ref[HostSlot], torch.Tensor, Event] | None = None

    def write(self, flat: torch.Tensor) -> HostSlot:
        """Have a flat tensor moved.

        Raises:
            CaptureError: one that was still on its way has been changed in place.
        """
        self._let_go(self._most_bytes - flat.nbytes)
        host = self._streams.pinned(flat)
        slot = HostSlot(host, self._streams.leave(host, flat), flat, self._last)
        self._last = weakref.ref(slot)
        self._leaving.append(self._last)
        return slot

    def read(self, slot: HostSlot) -> torch.Tensor:
        """The flat tensor; itself if it is still there.

        Raises:
            CaptureError: it was changed in place while it was on its way.
        """
        whole = _unchanged(slot) if slot.source is not None else self._fetched(slot)
        following = slot.before()
        if following is not None and following.source is None:
            self._fetch(following)
        return whole

    def clear(self) -> None:
        """Forget what was fetched ahead, and hold nothing that has left."""
        self._let_go(0)
        self._drop_ahead()

    def _let_go(self, most_bytes: int) -> None:
        """Let tensors go that have left, and wait for as many as it takes."""
        waiting = [slot for ref in self._leaving if (slot := ref()) is not None]
        held = sum(slot.host.nbytes for slot in waiting)
        for slot in waiting:
            if not self._streams.happened(slot.left):
                if held <= max(most_bytes, 0):
                    break
                self._streams.wait(slot.left)
            _unchanged(slot)
            slot.source = None
            held -= slot.host.nbytes
        self._leaving = deque(weakref.ref(slot) for slot in waiting if slot.source is not None)

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
        flat = torch.empty_like(slot.host, device=self._streams.device)
        self._ahead = (weakref.ref(slot), flat, self._streams.arrive(flat, slot.host, slot.left))

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._streams.abandon(self._ahead[1])
            self._ahead = None


def _unchanged(slot: HostSlot) -> torch.Tensor:
    assert slot.source is not None
    if slot.source._version != slot.version:
        raise CaptureError(
            f"a saved tensor of {slot.host.nbytes} bytes was changed in place while it was being moved to "
            f"host memory (version {slot.version}, now {slot.source._version}), so what arrives there may be "
            "either. Replace the in-place operation by one that makes a new tensor, or make the plan with "
            "offload=False."
        )
    return slot.source
