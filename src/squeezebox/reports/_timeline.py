"""A profiled step as text, as JSON, as trace events for ui.perfetto.dev, and as a snapshot for memory_viz."""

from __future__ import annotations

import itertools
import json
import os
import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from squeezebox.reports._notebook import page_frame
from squeezebox.reports._page import PHASES, UNITS, owner, timeline_html
from squeezebox.reports._saved import SavedFigures
from squeezebox.reports._snapshot import snapshot
from squeezebox.schema import (
    Activity,
    FormatError,
    Span,
    StepTimeline,
    decoded,
    human_bytes,
    plain_fields,
    write_whole,
)

_MICROSECONDS = 1e6
_PROCESS = 1
_PHASE, _MODULE, _ACTIVITY = 1, 2, 3  # a thread each


def timeline_events(timeline: StepTimeline) -> dict[str, Any]:
    """The timeline in Chrome's trace event format, in microseconds.

    A thread each shows phases, modules, and what they spend on packing, unpacking, recomputing and waiting.
    Counters show live bytes by kind, their sum, and the budget where there is one.
    """
    events = [
        _named("process_name", 0, timeline.model),
        *(_named("thread_name", number, name) for number, name in _THREADS.items()),
        *_slices(timeline),
        *_counters(timeline),
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


_THREADS = {_PHASE: "phase", _MODULE: "module", _ACTIVITY: "holding saved tensors"}


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": thread, "args": {"name": name}}


def _slices(timeline: StepTimeline) -> Iterator[dict[str, Any]]:
    for phase, spans in itertools.groupby(timeline.spans, key=lambda span: span.phase):
        yield _slice(phase, _PHASE, list(spans))
    for (phase, module), spans in itertools.groupby(
        timeline.spans, key=lambda span: (span.phase, span.module)
    ):
        yield _slice(module or f"({phase})", _MODULE, list(spans), phase=phase)
    for span in timeline.spans:
        if span.activity is not Activity.COMPUTING:
            yield _slice(span.activity.value, _ACTIVITY, [span], phase=span.phase, module=span.module)


def _slice(name: str, thread: int, spans: list[Span], **args: str) -> dict[str, Any]:
    end = spans[-1].began_seconds + spans[-1].seconds
    return {
        "ph": "X",
        "name": name,
        "pid": _PROCESS,
        "tid": thread,
        "ts": spans[0].began_seconds * _MICROSECONDS,
        "dur": (end - spans[0].began_seconds) * _MICROSECONDS,
        "args": args,
    }


def _counters(timeline: StepTimeline) -> Iterator[dict[str, Any]]:
    budget = timeline.record.budget_bytes
    for sample in timeline.samples:
        kinds = {kind.value: nbytes for kind, nbytes in zip(timeline.kinds, sample.nbytes, strict=True)}
        yield _counter("live bytes by kind", sample.seconds, kinds)
        yield _counter("live bytes", sample.seconds, {"bytes": sum(sample.nbytes)})
    for seconds in (0.0, timeline.seconds) if budget is not None else ():
        yield _counter("budget", seconds, {"bytes": budget or 0})


def _counter(name: str, seconds: float, values: dict[str, int]) -> dict[str, Any]:
    return {
        "ph": "C",
        "name": name,
        "pid": _PROCESS,
        "ts": seconds * _MICROSECONDS,
        "args": values,
    }


TIMELINE_VERSION = 2
_PICKLE = 4  # the newest that memory_viz reads
_ROWS = 16  # the slowest cells that text shows; JSON has all


@dataclass(frozen=True, slots=True)
class Timeline(SavedFigures):
    """Where one step's time and memory went, phase by module. ``str()`` is a table."""

    KIND, AGAIN = "timeline", "session.timeline(step).save(path)"
    FIGURES = StepTimeline

    figures: StepTimeline

    def _repr_html_(self) -> str:
        """What a notebook shows: the page of :meth:`to_html`."""
        return page_frame(timeline_html(self.figures))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written by :meth:`save`."""
        return {"version": TIMELINE_VERSION, **plain_fields(self.figures)}

    @classmethod
    def from_dict(cls, values: Any, where: str = "") -> Timeline:
        """The result of such values; FormatError names the field that is wrong."""
        version = values.pop("version", None) if isinstance(values, dict) else None
        if version != TIMELINE_VERSION:
            raise FormatError(f"version is {version}, and this Squeezebox reads {TIMELINE_VERSION}")
        figures = decoded(StepTimeline, values, where)
        _check(figures)
        return cls(figures)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it whole or not at all, for ``squeezebox report``; OutputError if it cannot be."""
        write_whole(path, json.dumps(self.to_dict(), allow_nan=False) + "\n")

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that needs nothing but a browser; OutputError if the path cannot be written."""
        write_whole(path, timeline_html(self.figures))

    def to_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace for ui.perfetto.dev; OutputError if the path cannot be written."""
        write_whole(path, json.dumps(timeline_events(self.figures), allow_nan=False) + "\n")

    def to_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Write a snapshot for pytorch.org/memory_viz; OutputError if the path cannot be written."""
        write_whole(path, pickle.dumps(snapshot(self.figures.trace), protocol=_PICKLE))

    def __str__(self) -> str:
        figures, record = self.figures, self.figures.record
        limit = f" of {human_bytes(record.budget_bytes)}" if record.budget_bytes is not None else ""
        phases: Counter[str] = Counter()
        for cell in figures.cells:
            phases[cell.phase] += cell.seconds  # type: ignore[assignment]
        slowest = sorted(figures.cells, key=lambda cell: -cell.seconds)[:_ROWS]
        width = max((len(cell.module) for cell in slowest), default=0)
        return "\n".join(
            [
                f"{figures.model}: {figures.unprofiled_seconds:.3f} s, profiled {figures.seconds:.3f} s",
                f"peak   {owner(figures.peak)}{limit}",
                f"saved  {human_bytes(record.saved_bytes)}, held {human_bytes(record.packed_bytes)}",
                "time   "
                + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in phases.items() if seconds),
                "",
                *(
                    f"{cell.seconds * 1e3:9.2f} ms  {cell.phase:<9}  {cell.module:<{width}}  "
                    f"{human_bytes(cell.saved_bytes):>10} saved  {human_bytes(cell.packed_bytes):>10} held"
                    for cell in slowest
                ),
            ]
        )


def _check(figures: StepTimeline) -> None:
    for cell in figures.cells:
        if cell.phase not in PHASES:
            raise FormatError(f"a cell's phase is {cell.phase!r}, none of {', '.join(PHASES)}")
    for forecast in figures.forecasts:
        if forecast.unit not in UNITS:
            raise FormatError(f"{forecast.name} has the unit {forecast.unit!r}, none of {', '.join(UNITS)}")
    for sample in (*figures.samples, figures.peak):
        if len(sample.nbytes) != len(figures.kinds):
            raise FormatError(
                f"a sample has {len(sample.nbytes)} numbers of bytes for {len(figures.kinds)} kinds"
            )
