"""Operators that computed what had been computed already."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass

from squeezebox.profiling._redundancy_events import Event, StepEvents, Trait, View

_UNSURE = Trait.RANDOM | Trait.OPAQUE | Trait.OWN | Trait.UNINITIALISED
_COPIES = ("aten.clone.default", "aten.detach.default")


@dataclass(frozen=True, slots=True)
class Repeat:
    """``event`` has the results of ``first``; ``first`` is itself where the next step computes them again.

    ``from_data``: of tensors that are neither parameters nor buffers, nor made in the step.
    """

    event: Event
    first: Event
    from_data: bool


def find_repeats(record: StepEvents, besides: Collection[int] = ()) -> Iterator[Repeat]:
    """Calls of the first step whose results were there already, or are the same in the second step.

    Tensors have numbers for what is in them: those that one operator makes of equal numbers and equal
    arguments are equal (value numbering, as compilers do within a block). Whatever is written in place gets
    a new number. A result counts only if nothing wrote to it later, to the end of its life, or to the one
    made before; and neither is it one of ``besides``, the times of operators that are to go anyway.
    """
    written = {view.storage for event in record.events for view in event.writes}
    groups: dict[int, list[Event]] = defaultdict(list)
    values = _Values(record)
    for event in record.events:
        value = values.after(event)
        if value is not None and event.time not in besides and _is_sure(record, event, written):
            groups[value].append(event)
    for value, events in groups.items():
        yield from _of_group(record, events, value in values.from_data)


def _of_group(record: StepEvents, events: Sequence[Event], from_data: bool) -> Iterator[Repeat]:
    first = events[0]
    own = [event for event in events if event.step == 0]
    yield from (Repeat(event, first, from_data) for event in own[1:] if _has_ended(record, event))
    again = any(event.step > 0 and event.place == first.place for event in events)
    if own and again and _has_ended(record, first):
        yield Repeat(first, first, from_data)


def _has_ended(record: StepEvents, event: Event) -> bool:
    """Whether all is known of its results: nobody can write to them any more."""
    return all(record.lives[view.storage].died is not None for view in event.fresh)


def _is_sure(record: StepEvents, event: Event, written: set[int]) -> bool:
    if event.traits & (Trait.RECOMPUTED | Trait.EFFECT) or event.operator in _COPIES:
        return False
    return not any(view.storage in written for view in event.fresh) and not record.escaped(event.fresh)


class _Values:
    """What is in each storage, by number."""

    def __init__(self, record: StepEvents) -> None:
        self.from_data: set[int] = set()  # numbers of what depends on the step's data
        self._record = record
        self._numbers: dict[Hashable, int] = {}
        self._of_storage: dict[int, int] = {}

    def after(self, event: Event) -> int | None:
        """The number of an operator's results; None where it makes none, or nothing is sure of them."""
        for view in event.writes:
            self._of_storage[view.storage] = self._new()
        if not event.fresh or event.writes:
            for view in event.fresh:
                self._of_storage[view.storage] = self._new()
            return None
        reads = [self._value(view) for view in event.reads]
        unsure = event.traits & _UNSURE or event.arguments is None or self._record.escaped(event.reads)
        key: Hashable = ("unsure", event.time) if unsure else (event.operator, event.arguments, *reads)
        value = self._number(key, any(number in self.from_data for number, *_ in reads))
        for position, view in enumerate(event.fresh):
            self._of_storage[view.storage] = self._number((value, position), value in self.from_data)
        return None if unsure else value

    def _value(self, view: View) -> tuple[Hashable, ...]:
        if view.storage not in self._of_storage:
            data = not self._record.lives[view.storage].owned
            self._of_storage[view.storage] = self._number(("there", view.storage), data)
        return (self._of_storage[view.storage], *view[1:])

    def _number(self, key: Hashable, from_data: bool) -> int:
        number = self._numbers.setdefault(key, len(self._numbers))
        if from_data:
            self.from_data.add(number)
        return number

    def _new(self) -> int:
        return self._number(("new", len(self._numbers)), False)
