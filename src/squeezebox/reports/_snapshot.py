"""A recorded step as torch's memory snapshot, which pytorch.org/memory_viz draws."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import Any

from squeezebox.schema import StepTrace, Storage

_FIRST_ADDRESS = 1 << 32  # none of the readers takes it for "no address"
_STREAM = 0
_MICROSECONDS = 1e6

Frames = list[dict[str, Any]]


def snapshot(trace: StepTrace) -> dict[str, Any]:
    """In the form of ``torch.cuda.memory._snapshot()``: plain dictionaries, lists, text and numbers.

    One segment holds what there is at the step's end; the events lead there from what was there before.
    Readers go back through them. Addresses are made up: each storage lies in the lowest gap that has room.
    A storage's frames are the operator and module that made it, and under them its kind and phase.
    """
    heap, events = _Heap(), []
    begun = [call.began_at for call in trace.calls]
    living: dict[int, tuple[int, Frames]] = {}  # address and frames of a storage, by its number
    for time, number in _turns(trace):
        storage, call = trace.storages[number], bisect_right(begun, time) - 1
        if time == storage.allocated_at:
            address, frames = living[number] = heap.take(storage.nbytes), _frames(trace, storage)
            actions: tuple[str, ...] = ("alloc",) if time else ()
        else:
            address, frames = living.pop(number)
            heap.give(address, storage.nbytes)
            actions = ("free_requested", "free_completed")
        when = int(trace.calls[call].began_seconds * _MICROSECONDS) if call >= 0 else 0
        events += [_event(action, storage, address, when, frames) for action in actions]
    return {"segments": [_segment(trace, living, heap.highest)], "device_traces": [events]}


def _turns(trace: StepTrace) -> list[tuple[int, int]]:
    """Times at which a storage, by its number, comes or goes, in their order; what is left does not go."""
    turns = [(each.allocated_at, number) for number, each in enumerate(trace.storages)]
    turns += [
        (each.freed_at, number) for number, each in enumerate(trace.storages) if each.freed_at < trace.end
    ]
    return sorted(turns)


@dataclass(slots=True)
class _Heap:
    """Which addresses are free: (start, end) of every gap, in order."""

    highest: int = _FIRST_ADDRESS
    gaps: list[tuple[float, float]] = field(default_factory=lambda: [(_FIRST_ADDRESS, math.inf)])

    def take(self, nbytes: int) -> int:
        number = next(n for n, (start, end) in enumerate(self.gaps) if end - start >= nbytes)
        start, end = self.gaps[number]
        self.gaps[number : number + 1] = [(start + nbytes, end)] if end - start > nbytes else []
        self.highest = max(self.highest, int(start) + nbytes)
        return int(start)

    def give(self, address: int, nbytes: int) -> None:
        start, end = float(address), float(address + nbytes)
        number = bisect_left(self.gaps, (start, end))
        if number < len(self.gaps) and self.gaps[number][0] == end:
            end = self.gaps.pop(number)[1]
        if number and self.gaps[number - 1][1] == start:
            number -= 1
            start = self.gaps.pop(number)[0]
        self.gaps.insert(number, (start, end))


def _event(action: str, storage: Storage, address: int, microseconds: int, frames: Frames) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": storage.nbytes,
        "stream": _STREAM,
        "time_us": microseconds,
        "frames": frames,
    }


def _frames(trace: StepTrace, storage: Storage) -> Frames:
    """As a stack, innermost first; readers show a file's name before the function's."""
    if storage.call is None:
        return [_frame("before the step", storage.kind.value)]
    call = trace.calls[storage.call]
    return [_frame(call.module or "the model itself", call.operator), _frame(call.phase, storage.kind.value)]


def _frame(place: str, name: str) -> dict[str, Any]:
    return {"filename": place, "line": 0, "name": name}


def _segment(trace: StepTrace, living: dict[int, tuple[int, Frames]], end: int) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    until, held = _FIRST_ADDRESS, 0
    for number, (address, frames) in sorted(living.items(), key=lambda item: item[1][0]):
        nbytes = trace.storages[number].nbytes
        blocks += _gap(until, address)
        blocks.append(_block(address, nbytes, "active_allocated", frames))
        until, held = address + nbytes, held + nbytes
    return {
        "device": 0,
        "address": _FIRST_ADDRESS,
        "total_size": end - _FIRST_ADDRESS,
        "allocated_size": held,
        "active_size": held,
        "requested_size": held,
        "stream": _STREAM,
        "segment_type": "large",
        "blocks": [*blocks, *_gap(until, end)],
        "frames": [],
    }


def _gap(start: int, end: int) -> list[dict[str, Any]]:
    return [_block(start, end - start, "inactive", [])] if end > start else []


def _block(address: int, nbytes: int, state: str, frames: Frames) -> dict[str, Any]:
    return {"address": address, "size": nbytes, "requested_size": nbytes, "state": state, "frames": frames}
