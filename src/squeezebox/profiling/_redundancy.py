"""What a training step computes, stores, copies or waits for needlessly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from squeezebox.profiling._redundancy_copies import find_copies
from squeezebox.profiling._redundancy_events import Event, Place, StepEvents, Trait
from squeezebox.profiling._redundancy_record import record_redundancy
from squeezebox.profiling._redundancy_repeats import find_repeats
from squeezebox.profiling._redundancy_stores import find_dead_stores
from squeezebox.schema import CheckedStep, Redundancy, Waste

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
