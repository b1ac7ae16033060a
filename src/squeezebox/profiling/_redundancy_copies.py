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

    The same of a cast back, after one that lost nothing, and of that one too if nothing else read it.
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
            for view in event.reads:
                self._readers[view.storage].append(event)
            if event.operator in _COPIES:
                self._made |= {view.storage: event for view in event.fresh}

    def judge(self, event: Event) -> Iterator[Event]:
        """The copy, if it is needless, and with it the cast before."""
        copy, source = event.fresh[0], event.reads[0]
        if not self._readers[copy.storage]:
            return  # a dead store
        if _lies_alike(copy, source):
            if self._is_like(copy, source, event.time):
                yield event
            return
        cast = self._made.get(source.storage)
        if cast is None or cast.step != event.step or cast.traits & _UNSURE:
            return
        origin = cast.reads[0]
        if not _is_round_trip(origin, source, copy) or self._writes[source.storage]:
            return
        if cast.fresh[0] == source and self._is_like(copy, origin, cast.time):
            if all(reader is event for reader in self._readers[source.storage]):
                yield cast
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


def _is_round_trip(origin: View, between: View, copy: View) -> bool:
    """Whether casting back gave what there was: the dtype between holds every value of the first."""
    same = _lies_alike(copy, origin) and between.sizes == origin.sizes
    return same and _holds(between.dtype, origin.dtype)


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    if narrow is torch.bool:
        return True
    if wide.is_floating_point != narrow.is_floating_point or wide.is_complex != narrow.is_complex:
        return False
    known = wide.itemsize > narrow.itemsize >= 1 and "float8" not in f"{wide}{narrow}"
    return known and torch.promote_types(wide, narrow) is wide
