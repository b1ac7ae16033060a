"""What ``squeezebox pipeline simulate`` does: a schedule, its timeline, the drawing. Loads no torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from squeezebox.cli._values import parse_seconds, per_stage, require_apart, require_delay
from squeezebox.reports import (
    ChartKind,
    ChartSpan,
    PipelineChart,
    PipelineRank,
    PipelineReport,
    draw_svg,
    parse_size,
    require_writable,
    trace_events,
    write_whole,
)
from squeezebox.schedules import (
    Costs,
    Schedule,
    Span,
    Timeline,
    gathers,
    make,
    published,
    simulate,
)
from squeezebox.schema import OptionError

_ACTIONS = 10_000_000  # a million held 0.37 GB


@dataclass(frozen=True)
class Request:
    """A schedule as the command line names it."""

    schedule: str
    ranks: int
    microbatches: int
    loops: int | None
    batches: int

    def make(self) -> Schedule:
        """The schedule.

        Raises:
            OptionError: there is none of that name or for those numbers.
        """
        loops = self.loops if self.loops is not None else 2 if published(self.schedule).loops else 1
        self._require_size(loops)
        return make(self.schedule, self.ranks, self.microbatches, loops=loops, batches=self.batches)

    def _require_size(self, loops: int) -> None:
        counts = (self.ranks, self.microbatches, loops, self.batches)
        for name, count in zip(("--ranks", "--microbatches", "--loops", "--batches"), counts, strict=True):
            if count < 1:
                raise OptionError(f"{name} {count} is below 1; give at least 1.")
        actions = 2 * math.prod(counts)
        if actions > _ACTIONS:
            raise OptionError(
                f"{actions} actions (forward and backward of {counts[1]} microbatches at {counts[0]} ranks, "
                f"{counts[2]} times, in {counts[3]} batches) are more than the {_ACTIONS} of a run; "
                "take fewer microbatches or batches."
            )


def run(
    request: Request,
    *,
    forward: str,
    backward: str,
    transfer: float,
    activation: str | None,
    out: Path,
    trace: Path | None,
    csv: Path | None,
) -> PipelineReport:
    """Simulate, draw to ``out``, and write trace events to ``trace`` and the order to ``csv`` if given.

    Raises:
        OptionError: an argument is out of range or names nothing.
        PlanError: the order is wanted, and the schedule does not flush after each batch.
        OutputError: a file cannot be written.
    """
    schedule = request.make()
    sizes = (
        None if activation is None else per_stage("--activation", activation, schedule.num_stages, parse_size)
    )
    costs = Costs(
        forward=per_stage("--forward", forward, schedule.num_stages, parse_seconds),
        backward=per_stage("--backward", backward, schedule.num_stages, parse_seconds),
        transfer=require_delay("--transfer", transfer),
        activation_bytes=sizes,
    )
    require_apart({"--out": out, "--trace": trace, "--csv": csv})
    order = schedule.to_csv() if csv is not None else ""
    for path in (out, trace, csv):
        if path is not None:
            require_writable(path)
    timeline = simulate(schedule, costs)
    result = _report(timeline, request, sizes is not None)
    chart = _chart(timeline, result, sizes)
    write_whole(out, draw_svg(chart))
    if trace is not None:
        write_whole(trace, json.dumps(trace_events(chart), separators=(",", ":")) + "\n")
    if csv is not None:
        write_whole(csv, order)
    return result


def _report(timeline: Timeline, request: Request, with_bytes: bool) -> PipelineReport:
    schedule = timeline.schedule
    ranks = tuple(
        PipelineRank(
            rank=rank,
            busy_seconds=timeline.busy(rank),
            live_microbatches=timeline.live[rank],
            live_bytes=timeline.live_bytes[rank] if with_bytes else None,
            weight_versions=max(
                versions
                for versions, owner in zip(timeline.versions, schedule.placement, strict=True)
                if owner == rank
            ),
            transfers=timeline.transfers[rank],
            gathers=gathers(schedule, rank),
        )
        for rank in range(schedule.num_ranks)
    )
    return PipelineReport(
        schedule=request.schedule,
        stages=schedule.num_stages,
        microbatches=request.microbatches,
        batches=request.batches,
        seconds=timeline.seconds,
        bubble=timeline.bubble,
        ranks=ranks,
    )


def _chart(timeline: Timeline, result: PipelineReport, sizes: tuple[int, ...] | None) -> PipelineChart:
    return PipelineChart(
        title=result.title(),
        notes=(result.summary(), result.holdings()),
        rows=tuple(tuple(_drawn(span, timeline.schedule) for span in spans) for spans in timeline.spans),
        activation_bytes=sizes,
    )


def _drawn(span: Span, schedule: Schedule) -> ChartSpan:
    action, batch = span.action, schedule.batch_of(span.action)
    kind = ChartKind[action.kind.name]
    return ChartSpan(kind, action.stage, action.microbatch, batch, span.start, span.end)
