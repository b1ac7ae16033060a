"""Copies in whose place the original would have done."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator

import torch

from squeezebox.profiling._redundancy_events import Event, StepEvents, Trait, View

_COPIES = {"aten.clone.default", "aten._to_copy.default"}
_UNSURE = Trait.OPAQUE | Trait.OWN | Trait.RECOMPUTED


def find_copies(record: StepEvents) -> Iterator[Event]:
    """Copies of the first step that lie as their originals do, while neither was written to.

    The same of a copy back: of another layout, another device, or a dtype that lost nothing; and of the
    copy there too if nothing else read it.
    Only copies whose end was seen count; and where the original went first, only copies of all of it.
    """
    finder = _Finder(record)
    for event in record.of_step(0):
        if event.operator not in _COPIES or event.traits & _UNSURE or not event.fresh:
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
            if event.operator in _COPIES:
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
