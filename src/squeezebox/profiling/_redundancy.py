"""What a training step computes, stores, copies or waits for needlessly."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from squeezebox.profiling._redundancy_events import Event, Place, StepEvents, Trait, View
from squeezebox.profiling._redundancy_record import record_redundancy
from squeezebox.schema import CheckedStep, Redundancy, Waste

_COPYING = {"aten.clone.default", "aten._to_copy.default"}
_UNSURE = Trait.OPAQUE | Trait.OWN | Trait.RECOMPUTED


def find_copies(record: StepEvents) -> Iterator[Event]:
    """Copies of the first step that lie as their originals do, while neither was written to.

    The same of a copy back: of another layout, another device, or a dtype that lost nothing; and of the
    copy there too if nothing else read it.
    Only copies whose end was seen count; and where the original went first, only copies of all of it.
    """
    finder = _Finder(record)
    for event in record.of_step(0):
        if event.operator not in _COPYING or event.traits & _UNSURE or not event.fresh:
            continue
        yield from finder.judge(event)


class _Finder:
    def __init__(self, record: StepEvents) -> None:
        self._record = record
        self._writes: dict[int, list[int]] = defaultdict(list)  # times, by storage
        self._readers: dict[int, list[Event]] = defaultdict(list)
        self._made: dict[int, Event] = {}
        self._originals: dict[int, int] = {}  # storages of needless copies, and what stands in for them
        for event in record.events:
            for view in event.writes:
                self._writes[view.storage].append(event.time)
            for view in event.reads if event.fresh or event.writes or Trait.EFFECT in event.traits else ():
                self._readers[view.storage].append(event)
            if event.operator in _COPYING:
                self._made |= {view.storage: event for view in event.fresh}

    def judge(self, event: Event) -> Iterator[Event]:
        """The copy, if it is needless, and with it the one before that only led there."""
        copy, source = event.fresh[0], event.reads[0]
        if not self._readers[copy.storage]:
            return  # a dead store
        if _lies_alike(copy, source):
            if self._is_like(copy, source, event.time):
                yield event
            return
        before = self._made.get(source.storage)
        if before is None or before.step != event.step or before.traits & _UNSURE:
            return
        origin = _seen_through(before, source)
        if self._writes[source.storage] or origin is None or not _lies_alike(copy, origin):
            return
        if self._is_like(copy, origin, before.time):
            if all(reader is event for reader in self._readers[source.storage]):
                yield before
            yield event

    def _is_like(self, copy: View, source: View, since: int) -> bool:
        """Whether the source, or what stands in for it, would have done as long as the copy lived."""
        original = self._originals.get(source.storage, source.storage)
        mine, theirs = self._record.lives[copy.storage], self._record.lives[original]
        if mine.died is None or mine.device != theirs.device or self._writes[copy.storage]:
            return False
        times = self._writes[original]
        written = bisect_right(times, mine.died) > bisect_right(times, since)
        outlived = theirs.died is not None and theirs.died < mine.died
        if written or mine.escaped or theirs.escaped or (outlived and mine.nbytes < theirs.nbytes):
            return False
        self._originals[copy.storage] = original
        return True


def _lies_alike(one: View, other: View) -> bool:
    """Whether elements have the same places, but for where the storage begins."""
    strides = [(a, b) for size, a, b in zip(one.sizes, one.strides, other.strides, strict=False) if size > 1]
    return one.sizes == other.sizes and one.dtype is other.dtype and all(a == b for a, b in strides)


def _seen_through(copied: Event, view: View) -> View | None:
    """The view of the original that shows what this one does of the copy; None if there is none.

    Dimensions are identified by their strides, which differ in a dense tensor.
    """
    copy, source = copied.fresh[0], copied.reads[0]
    strides = {
        (size, inner): outer
        for size, inner, outer in zip(copy.sizes, copy.strides, source.strides, strict=True)
        if size > 1
    }
    seen = [(size, stride) for size, stride in zip(view.sizes, view.strides, strict=True) if size > 1]
    if view.offset != copy.offset or sorted(seen) != sorted(strides) or not _holds(copy.dtype, source.dtype):
        return None
    found = tuple(strides.get(each, 1) for each in zip(view.sizes, view.strides, strict=True))
    return View(source.storage, source.offset, view.sizes, found, source.dtype)


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of the one dtype is one of the other's."""
    if narrow in (torch.bool, wide):
        return True
    if wide.is_floating_point != narrow.is_floating_point or wide.is_complex != narrow.is_complex:
        return False
    known = wide.itemsize > narrow.itemsize >= 1 and "float8" not in f"{wide}{narrow}"
    return known and torch.promote_types(wide, narrow) is wide


_UNCOMPARABLE = Trait.RANDOM | Trait.OPAQUE | Trait.OWN | Trait.UNINITIALISED
_NO_REPEATS = ("aten.clone.default", "aten.detach.default")


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
    if event.traits & (Trait.RECOMPUTED | Trait.EFFECT) or event.operator in _NO_REPEATS:
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
        unsure = event.traits & _UNCOMPARABLE or event.arguments is None or self._record.escaped(event.reads)
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


_OF_DATA = "if the step gets other data each time, this changes"


@dataclass(frozen=True, slots=True)
class _Found:
    waste: Waste
    event: Event
    nbytes: int
    first: Place | None = None
    note: str = ""


def check_redundancy(
    step: Callable[[], object], *, device: torch.device, as_device: bool = False
) -> CheckedStep:
    """Record two steps, and find what the first one does needlessly.

    Args:
        step: takes one training step; runs twice.
        device: on which it computes.
        as_device: tell syncs as if every tensor were on a device.
    """
    record = record_redundancy(step, device=device, as_device=as_device)
    first = record.of_step(0)
    return CheckedStep(
        device=str(device),
        as_device=as_device,
        operators=len(first),
        seconds=sum(event.seconds for event in first),
        repeated_on_purpose=sum(Trait.RECOMPUTED in event.traits for event in first),
        findings=tuple(_joined(_found(record))),
    )


def _found(record: StepEvents) -> Iterator[_Found]:
    """An operator is named once: a dead store's result is no copy and no repeat."""
    named = set[int]()
    for waste, find in ((Waste.DEAD, find_dead_stores), (Waste.COPY, find_copies)):
        for event in find(record):
            if event.time not in named and not event.is_trifle:
                yield _Found(waste, event, event.written_bytes)
            named.add(event.time)
    for repeat in find_repeats(record, named):
        event, constant = repeat.event, repeat.first is repeat.event
        if event.is_trifle:
            continue
        waste = Waste.CONSTANT if constant else Waste.REPEATED
        note = _OF_DATA if constant and repeat.from_data else ""
        yield _Found(waste, event, event.written_bytes, None if constant else repeat.first.place, note)
    for event in record.of_step(len(record.ends) - 1):
        if event.waited_bytes is not None and not event.traits & (Trait.OWN | Trait.RECOMPUTED):
            yield _Found(Waste.SYNC, event, event.waited_bytes)


def _joined(found: Iterable[_Found]) -> Iterator[Redundancy]:
    """One for each line and operator, the slowest first."""
    groups: dict[object, list[_Found]] = defaultdict(list)
    for each in found:
        place = each.event.place
        key = (each.waste, each.event.operator, place[:2], each.event.phase, each.first, each.note)
        groups[key].append(each)
    yield from sorted(map(_of_line, groups.values()), key=lambda each: -each.seconds)


def _of_line(found: list[_Found]) -> Redundancy:
    one = found[0]
    place, first = one.event.place, one.first
    return Redundancy(
        waste=one.waste,
        operator=one.event.operator.removesuffix(".default"),
        file=place.file,
        line=place.line,
        function=place.function,
        modules=tuple(sorted({each.event.place.module for each in found} - {""})),
        phase=one.event.phase,
        count=len(found),
        seconds=sum(each.event.seconds for each in found),
        nbytes=sum(each.nbytes for each in found),
        first=first and f"{first.file}:{first.line}" + (f" of {first.module}" if first.module else ""),
        note=one.note,
    )
