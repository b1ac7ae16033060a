"""A profiled step: what is recorded of it, brought together by phase and module."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from squeezebox.capture import Onlooker, Row
from squeezebox.profiling import StepMarks, now, record_closure
from squeezebox.reports import StepPlan
from squeezebox.schema import (
    Activity,
    BoundRecord,
    Call,
    Forecast,
    Kind,
    LiveSample,
    Span,
    StepRecord,
    StepTimeline,
    StepTrace,
    TimelineCell,
)
from squeezebox.session._engine import Engine
from squeezebox.steps import device_of

BEFORE = "before"  # the phase of what was there when the step began
_BUCKETS = 240  # of a step's samples, of which two each are kept
_KINDS = tuple(Kind)
_Place = tuple[str, str]  # phase and module
_SECONDS = {
    Activity.PACKING: "packing_seconds",
    Activity.UNPACKING: "unpacking_seconds",
    Activity.RECOMPUTING: "recomputing_seconds",
    Activity.WAITING: "waiting_seconds",
}


def take_timeline(engine: Engine, closure: Callable[[], object]) -> StepTimeline:
    """Run ``closure`` twice, without statistics, the second time recorded."""
    device = device_of(engine.model)
    with engine.uncounted_step():
        began = now(device)
        closure()
        unprofiled = now(device) - began
    notes = _Notes()

    @contextlib.contextmanager
    def around(marks: StepMarks) -> Iterator[None]:
        notes.marks = marks
        with engine.store.shown_to(notes.onlooker), engine.uncounted_step():
            yield

    trace = record_closure(engine.model, closure, optimizer=engine.optimizer, around=around)
    record = engine.records.now(max(engine.step, 0), engine.plan)()  # -1 before the first
    frozen = replace(record, peak_bytes=trace.peak().nbytes, activation_peak_bytes=None, split_bytes=None)
    return _timeline(engine, trace, notes, frozen, unprofiled)


@dataclass(slots=True)
class _Notes:
    """What capture reported; its marks are the recording's."""

    marks: Any = None
    phases: dict[str, str] = field(default_factory=dict)  # in which each tensor was held first
    small_bytes: Counter[_Place] = field(default_factory=Counter)
    recomputed_bytes: Counter[_Place] = field(default_factory=Counter)

    @property
    def onlooker(self) -> Onlooker:
        return Onlooker(
            given=functools.partial(self.marks.note, Kind.INPUT),
            saved=self._saved,
            small=self._small,
            spending=self._spending,
            spent=self.marks.end,
        )

    def _saved(self, row: Row) -> None:
        self.phases.setdefault(row.key, self.marks.phase)

    def _small(self, nbytes: int) -> None:
        self.small_bytes[self.marks.phase, self.marks.module] += nbytes

    def _spending(self, activity: Activity, row: Row) -> None:
        self.marks.begin(activity)
        if activity is Activity.RECOMPUTING:
            self.recomputed_bytes[self.marks.phase, row.module] += row.saved_bytes


def _timeline(
    engine: Engine, trace: StepTrace, notes: _Notes, record: StepRecord, unprofiled: float
) -> StepTimeline:
    spans, samples = _spans(trace), list(_samples(trace))
    lossy = {tensor.key: tensor.bound for tensor in record.tensors if tensor.bound > 0.0}
    plan = engine.plan
    return StepTimeline(
        model=type(engine.model).__name__,
        record=record,
        seconds=trace.seconds,
        unprofiled_seconds=unprofiled,
        spans=tuple(spans),
        cells=_cells(trace, spans, samples, notes, record),
        kinds=_KINDS,
        samples=tuple(_thinned(samples)),
        peak=max(samples, key=_total),
        trace=trace,
        history=(*engine.records.history, BoundRecord(step=record.step, bounds=lossy)),
        forecasts=tuple(_forecasts(plan, record, unprofiled)),
        planned_bytes={each.key: each.option.held_bytes for each in plan.tensors} if plan else None,
    )


def _spans(trace: StepTrace) -> list[Span]:
    """Neighbours of one module, phase and activity are one span."""
    ends = [*(call.began_seconds for call in trace.calls[1:]), trace.seconds]
    spans = []
    pairs = zip(trace.calls, ends, strict=True)
    for (phase, module, activity), group in itertools.groupby(pairs, key=lambda pair: _doing(pair[0])):
        first, *rest = group
        began, end = first[0].began_seconds, (rest[-1] if rest else first)[1]
        spans.append(
            Span(began_seconds=began, seconds=end - began, phase=phase, module=module, activity=activity)
        )
    return spans


def _doing(call: Call) -> tuple[str, str, Activity]:
    return call.phase, call.module, call.activity


def _samples(trace: StepTrace) -> Iterator[LiveSample]:
    """The highest moment of every operator."""
    changes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for storage in trace.storages:
        kind = _KINDS.index(storage.kind)
        changes[storage.allocated_at].append((kind, storage.nbytes))
        changes[storage.freed_at].append((kind, -storage.nbytes))
    live, time = [0] * len(_KINDS), 0
    ends = [*(call.began_at for call in trace.calls[1:]), trace.end]
    for call, end in zip(trace.calls, ends, strict=True):
        highest = tuple(live)
        while time < end:
            for kind, nbytes in changes[time]:
                live[kind] += nbytes
            time += 1
            highest = max(highest, tuple(live), key=sum)
        yield LiveSample(
            seconds=call.began_seconds,
            phase=call.phase,
            module=call.module,
            operator=call.operator,
            nbytes=highest,
        )


def _total(sample: LiveSample) -> int:
    return sum(sample.nbytes)


def _thinned(samples: Sequence[LiveSample]) -> Iterator[LiveSample]:
    """The highest and the lowest of each group of neighbours."""
    size = -(-len(samples) // _BUCKETS)
    if size <= 2:
        yield from samples
        return
    for start in range(0, len(samples), size):
        bucket = samples[start : start + size]
        ends = {id(chosen) for chosen in (min(bucket, key=_total), max(bucket, key=_total))}
        yield from (sample for sample in bucket if id(sample) in ends)


def _cells(
    trace: StepTrace,
    spans: Iterable[Span],
    samples: Iterable[LiveSample],
    notes: _Notes,
    record: StepRecord,
) -> tuple[TimelineCell, ...]:
    figures: dict[_Place, Counter[str]] = defaultdict(Counter)
    for span in spans:
        cell = figures[span.phase, span.module]
        cell["seconds"] += span.seconds  # type: ignore[assignment]
        if span.activity in _SECONDS:
            cell[_SECONDS[span.activity]] += span.seconds  # type: ignore[assignment]
    for sample in samples:
        cell = figures[sample.phase, sample.module]
        cell["highest_bytes"] = max(cell["highest_bytes"], _total(sample))
    for storage in trace.living(trace.peak().time):
        maker = None if storage.call is None else trace.calls[storage.call]
        place = (BEFORE, "") if maker is None else (maker.phase, maker.module)
        figures[place]["peak_bytes"] += storage.nbytes
    for place, nbytes in notes.small_bytes.items():
        figures[place].update(saved_bytes=nbytes, packed_bytes=nbytes)
    for place, nbytes in notes.recomputed_bytes.items():
        figures[place].update(recomputed_bytes=nbytes)
    for tensor in record.tensors:
        offloaded = tensor.saved_bytes if "offload" in tensor.codec.split("+") else 0
        figures[notes.phases[tensor.key], tensor.module].update(
            saved_bytes=tensor.saved_bytes, packed_bytes=tensor.packed_bytes, offloaded_bytes=offloaded
        )
    cells: dict[_Place, Any] = dict(figures)
    return tuple(TimelineCell(phase=phase, module=module, **cells[phase, module]) for phase, module in cells)


def _forecasts(plan: StepPlan | None, record: StepRecord, seconds: float) -> Iterator[Forecast]:
    if plan is not None:
        held = {tensor.key: tensor.packed_bytes for tensor in record.tensors}
        known = [tensor for tensor in plan.tensors if tensor.key in held]
        pairs = {
            ("peak", "bytes"): (plan.predicted_peak_bytes, record.peak_bytes),
            ("held for backward", "bytes"): (
                sum(tensor.option.held_bytes for tensor in known),
                sum(held[tensor.key] for tensor in known),
            ),
            ("step", "seconds"): (plan.predicted_seconds, seconds),
        }
        for (name, unit), (estimated, measured) in pairs.items():
            yield Forecast(name=name, unit=unit, estimated=float(estimated), measured=float(measured or 0))
    if record.noise is not None and record.predicted_noise is not None:
        yield Forecast(
            name="gradient noise", unit="", estimated=record.predicted_noise, measured=record.noise
        )
