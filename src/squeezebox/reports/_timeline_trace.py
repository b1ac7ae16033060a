"""A profiled step as trace events, for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from squeezebox.schema import Activity, Span, StepTimeline

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
