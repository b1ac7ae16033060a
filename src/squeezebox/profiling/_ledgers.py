"""What takes down a step's allocations, and the marks between them that running code sets."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._pytree import tree_leaves

from squeezebox.memory import Recording, parts_of
from squeezebox.profiling._workspace import Workspace, as_on_cpu, measured, workspace_of
from squeezebox.schema import CaptureError, OptionError


def now(device: torch.device) -> float:
    """Seconds, after waiting for the device, which need not be the current one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


_MARK = "squeezebox.mark."

Mark = Callable[[int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """Bytes at each mark beyond those before the first; the most from it, and seconds, to the next one."""

    live: list[int]
    highest: list[int]
    seconds: list[float]


def measure_marks(
    run: Callable[[Mark], None], last: int, device: torch.device, repeats: int, *, warm: bool = False
) -> Marks:
    """Run once to begin with, once for bytes, and ``repeats`` times for seconds, of which medians count.

    Args:
        run: calls what it is given with 0 to ``last``. A mark may be left out: nothing is there then.
        last: the last mark.
        device: where the run's tensors are.
        repeats: from 1.
        warm: the run was made before, and need not be to begin with.

    Raises:
        CaptureError: another profiler is running.
    """
    if not warm:
        run(lambda number: None)  # what first calls allocate stays
    live, highest = (_on_device if device.type == "cuda" else _on_host)(run, device)
    for number in range(1, last + 1):
        live.setdefault(number, live[number - 1])
    timed = [_seconds(run, device) for _ in range(repeats)]
    return Marks(
        live=[live[number] for number in range(last + 1)],
        highest=[highest.get(number, 0) for number in range(last + 1)],
        seconds=[statistics.median(times.get(number, 0.0) for times in timed) for number in range(last)],
    )


def _seconds(run: Callable[[Mark], None], device: torch.device) -> dict[int, float]:
    """Seconds from each mark to the next one that comes."""
    times: dict[int, float] = {}
    run(lambda number: times.update({number: now(device)}))
    return {number: times[after] - times[number] for number, after in pairwise(sorted(times))}


def _on_host(run: Callable[[Mark], None], device: torch.device) -> tuple[dict[int, int], dict[int, int]]:
    recording = Recording(device)
    if not recording.start():
        raise CaptureError("another profiler is running, so memory cannot be measured. End it first.")

    def mark(number: int) -> None:
        recording.mark(f"{_MARK}{number}")

    try:
        run(mark)
    finally:
        recording.close()
    live, highest = dict[int, int](), dict[int, int]()
    allocated: dict[int, int] = {}
    total, number = 0, 0
    for name, address, nbytes in recording.events():
        if name.startswith(_MARK):
            number = int(name.removeprefix(_MARK))
            live[number] = highest[number] = total
        elif nbytes > 0:
            total += nbytes - allocated.pop(address, 0)
            allocated[address] = nbytes
            highest[number] = max(highest.get(number, total), total)
        elif nbytes < 0:
            total -= allocated.pop(address, 0)
    return live, highest


def _on_device(run: Callable[[Mark], None], device: torch.device) -> tuple[dict[int, int], dict[int, int]]:
    live, highest, last = dict[int, int](), dict[int, int](), [0]
    base = torch.cuda.memory_allocated(device)

    def mark(number: int) -> None:
        highest[last[0]] = torch.cuda.max_memory_allocated(device) - base
        torch.cuda.reset_peak_memory_stats(device)
        live[number] = torch.cuda.memory_allocated(device) - base
        last[0] = number

    run(mark)
    return live, highest


ALLOCATION, FREE, CALL, PHASE, KIND = "allocation", "free", "call", "phase", "kind"
GONE, END = "gone", "end"
_PREFIX = "squeezebox trace "


class Event(NamedTuple):
    """``number`` is the address of an allocation or a free, else that of what is marked."""

    what: str
    number: int
    nbytes: int = 0
    nanoseconds: int = 0


class Ledger(Protocol):
    """Events in their order; while a storage lives, its address is its own."""

    def address(self, storage: torch.UntypedStorage) -> int:
        """Its name in the events."""

    def mark(self, what: str, number: int) -> None:
        """Something begins."""

    def returned(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """An operator has returned this, or what it would have."""

    def events(self) -> list[Event]:
        """End, and give all."""

    def close(self) -> None:
        """End; safe to call twice."""


class RealLedger:
    """The allocator's events on one device.

    Raises:
        OptionError: another profiler is active.
    """

    def __init__(self, device: torch.device) -> None:
        self._recording = Recording(device)
        if not self._recording.start():
            raise OptionError(
                "a step cannot be recorded while another profiler is running; end that one first."
            )

    def address(self, storage: torch.UntypedStorage) -> int:
        """Where it is."""
        return storage.data_ptr()

    def mark(self, what: str, number: int) -> None:
        """See :class:`Ledger`."""
        self._recording.mark(f"{_PREFIX}{what} {number}")

    def returned(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """The allocator tells."""
        return out

    def events(self) -> list[Event]:
        """See :class:`Ledger`."""
        found = []
        for when, name, address, nbytes in self._recording.timed_events():
            if name.startswith(_PREFIX):
                what, number = name.removeprefix(_PREFIX).split()
                found.append(Event(what, int(number), 0, when))
            elif nbytes:
                found.append(Event(ALLOCATION if nbytes > 0 else FREE, address, abs(nbytes), when))
        return found

    def close(self) -> None:
        """See :class:`Ledger`."""
        self._recording.close()


class FakeLedger:
    """Storages that operators return, until each is gone, and the temporaries of those known to have some."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        self._events: list[Event | Workspace] = []
        self._living = {tensor.untyped_storage()._cdata for tensor in known}

    def address(self, storage: torch.UntypedStorage) -> int:
        """Of what torch holds for it."""
        return int(storage._cdata)

    def mark(self, what: str, number: int) -> None:
        """See :class:`Ledger`."""
        self._events.append(Event(what, number))

    def returned(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """Note its results, and its temporaries where it is on a CPU; put in what the fake leaves out."""
        on_host = any(leaf.device.type == "cpu" for leaf in tree_leaves(out) if _has_storage(leaf))
        if on_host:
            out = as_on_cpu(func, args, out)
        for leaf in tree_leaves(out):
            for part in parts_of(leaf) if isinstance(leaf, torch.Tensor) else ():
                if _has_storage(part):
                    self._add(part.untyped_storage())
        workspace = workspace_of(func, args, kwargs) if on_host else None
        if workspace is not None:
            self._events.append(workspace)
        return out

    def events(self) -> list[Event]:
        """See :class:`Ledger`."""
        workspaces = measured(event for event in self._events if isinstance(event, Workspace))
        found: list[Event] = []
        for event in self._events:
            if isinstance(event, Event):
                found.append(event)
            elif workspaces[event]:
                found += [Event(ALLOCATION, -1, workspaces[event]), Event(FREE, -1)]
        return found

    def close(self) -> None:
        """See :class:`Ledger`."""

    def _add(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address not in self._living and storage.nbytes():
            self._living.add(address)
            self._events.append(Event(ALLOCATION, address, storage.nbytes()))
            weakref.finalize(storage, self._remove, address).atexit = False

    def _remove(self, address: int) -> None:
        self._living.remove(address)
        self._events.append(Event(FREE, address))


def _has_storage(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
