"""A pipeline's drawing as trace events, for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from squeezebox.reports._chart import ChartSpan, PipelineChart

_MICROSECONDS = 1e6
_PROCESS = 0


def trace_events(chart: PipelineChart) -> dict[str, Any]:
    """The chart in Chrome's trace event format: a thread a rank, an event an action, microseconds.

    Each rank's live microbatches are a counter, and their bytes another one where the chart knows them.
    """
    events = [_named("process_name", 0, name=chart.title)]
    for rank in range(len(chart.rows)):
        events.append(_named("thread_name", rank, name=f"rank {rank}"))
        events.append(_named("thread_sort_index", rank, sort_index=rank))
        events.extend(_event(span, rank) for span in chart.rows[rank])
        events.extend(_counters(chart, rank))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, rank: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": rank, "args": args}


def _event(span: ChartSpan, rank: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": f"{span.kind.value} {span.microbatch}",
        "cat": span.kind.value,
        "pid": _PROCESS,
        "tid": rank,
        "ts": span.start * _MICROSECONDS,
        "dur": (span.end - span.start) * _MICROSECONDS,
        "args": {"stage": span.stage, "microbatch": span.microbatch, "batch": span.batch},
    }


def _counters(chart: PipelineChart, rank: int) -> Iterator[dict[str, Any]]:
    for seconds, count, held in chart.live(rank):
        values = {"microbatches": count} | ({} if chart.activation_bytes is None else {"bytes": held})
        for unit, value in values.items():
            yield {
                "ph": "C",
                "name": f"rank {rank}: live {unit}",
                "pid": _PROCESS,
                "tid": rank,
                "ts": seconds * _MICROSECONDS,
                "args": {unit: value},
            }
