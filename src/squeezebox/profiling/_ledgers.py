"""What takes down a step's allocations: torch's profiler, or for fake tensors the ends of their storages."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.profiler import record_function
from torch.utils._pytree import tree_leaves

from squeezebox.memory import Recording, parts_of
from squeezebox.profiling._workspace import as_on_cpu, measured, workspace_of
from squeezebox.profiling._workspace_rules import Workspace
from squeezebox.schema import OptionError

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
        with record_function(f"{_PREFIX}{what} {number}"):
            pass

    def returned(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """The allocator tells."""
        return out

    def events(self) -> list[Event]:
        """See :class:`Ledger`."""
        found = []
        for time, name, address, nbytes in self._recording.timed_events():
            if name.startswith(_PREFIX):
                what, number = name.removeprefix(_PREFIX).split()
                found.append(Event(what, int(number), 0, time))
            elif nbytes:
                found.append(Event(ALLOCATION if nbytes > 0 else FREE, address, abs(nbytes), time))
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
