"""Results that nobody reads: dead stores, as in compilers, backwards from what outlives the step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from squeezebox.profiling._redundancy_events import Event, StepEvents, Trait, View

_NEEDED = Trait.EFFECT | Trait.RANDOM | Trait.OPAQUE | Trait.OWN


def find_dead_stores(record: StepEvents) -> Iterator[Event]:
    """Operators of the first step, the last one first, that might as well not have run.

    Whatever is there when the step is over has readers. An operator is dead if all it writes is overwritten
    or freed before an operator that is not dead reads it. Random ones are not: without them others draw
    other numbers. Where autograd may have kept a result, only a later backward tells that it was not read.
    """
    live = _Live(record)
    backward = False  # whether one comes later
    for event in reversed(record.of_step(0)):
        kept = not backward and _may_be_saved(event)
        backward = backward or event.phase == "backward"
        if not event.fresh and not event.writes and Trait.EFFECT not in event.traits:
            continue  # a view
        if kept or event.traits & _NEEDED or live.wants(event):
            live.read(event)
        elif not event.traits & (Trait.UNINITIALISED | Trait.RECOMPUTED) and event.written_bytes:
            yield event


def _may_be_saved(event: Event) -> bool:
    """Whether it has a derivative for which autograd could keep its results."""
    if Trait.DIFFERENTIATED not in event.traits:
        return False
    dtypes = {view.dtype for view in (*event.fresh, *event.writes)}
    return not dtypes or any(each.is_floating_point or each.is_complex for each in dtypes)


class _Live:
    """Which storages somebody still reads, seen from the end."""

    def __init__(self, record: StepEvents) -> None:
        self._record = record
        end = record.ends[0]
        self._read = {
            number
            for number, life in enumerate(record.lives)
            if life.died is None or life.died >= end or life.escaped
        }
        self._overwritten: dict[int, list[View]] = defaultdict(list)  # before anybody reads them

    def wants(self, event: Event) -> bool:
        """Whether any of what it writes is read."""
        return any(self._is_read(view) for view in (*event.fresh, *event.writes))

    def read(self, event: Event) -> None:
        """It is needed, and so is all that it reads."""
        if Trait.OVERWRITES in event.traits:
            for view in event.writes:
                self._overwrite(view)
        for view in event.reads:
            self._read.add(view.storage)
            self._overwritten.pop(view.storage, None)

    def _is_read(self, view: View) -> bool:
        if view.storage not in self._read:
            return False
        return view not in self._overwritten[view.storage] and not self._all_overwritten(view.storage)

    def _overwrite(self, view: View) -> None:
        if not self._record.lives[view.storage].escaped:
            self._overwritten[view.storage].append(view)

    def _all_overwritten(self, storage: int) -> bool:
        return any(self._record.covers(view) for view in self._overwritten[storage])
