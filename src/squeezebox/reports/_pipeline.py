"""A pipeline's plan, and what its batch takes: as text, as JSON and as trace events."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from squeezebox.reports._saved import Saved
from squeezebox.reports._svg import ChartSpan, PipelineChart
from squeezebox.schema import (
    PipelinePlan,
    StageMemory,
    StagePlan,
    checked,
    human_bytes,
    plain_fields,
)

_ROWS = 16  # as many ranks are shown one by one
_PER_BATCH = ("seconds_per_batch", "ideal_seconds_per_batch")


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineRank:
    """What one rank does, holds and sends.

    ``live_microbatches`` counts those of one stage whose activations are there at once, at most, the rank's
    stages together; ``live_bytes`` are theirs, None where nobody said how many a microbatch leaves.
    ``weight_versions`` are the most that one of its stages holds. ``gathers`` counts how often weights are
    gathered if FSDP leaves one stage whole at a time.
    """

    rank: int
    busy_seconds: float
    live_microbatches: int
    live_bytes: int | None
    weight_versions: int
    transfers: int
    gathers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineReport(Saved):
    """A schedule as simulated. ``str()`` is a table: of many ranks, the first, the last and the worst.

    ``bubble`` is the share of all ranks' time in which they wait. The ideal is the busiest rank's work: no
    order of the same actions takes less.
    """

    KIND, AGAIN = "pipeline report", "its save(path)"

    schedule: str
    stages: int
    microbatches: int
    batches: int
    seconds: float
    bubble: float
    ranks: tuple[PipelineRank, ...]

    @property
    def seconds_per_batch(self) -> float:
        """All seconds, shared by the batches."""
        return self.seconds / self.batches

    @property
    def ideal_seconds_per_batch(self) -> float:
        """What it would be if the busiest rank never waited."""
        return max(rank.busy_seconds for rank in self.ranks) / self.batches

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written by :meth:`save`."""
        return plain_fields(self) | {name: getattr(self, name) for name in _PER_BATCH}

    @classmethod
    def from_dict(cls, values: Any, where: str = "") -> PipelineReport:
        """The result of such values; FormatError names the field that is wrong."""
        return cls(**checked(cls, values, where, besides=_PER_BATCH))

    def title(self) -> str:
        """What was simulated."""
        counts = ((len(self.ranks), "rank"), (self.stages, "stage"), (self.microbatches, "microbatch"))
        parts = ", ".join(_counted(number, noun) for number, noun in counts)
        return f"{self.schedule}: {parts}" + (f", {self.batches} batches" if self.batches > 1 else "")

    def summary(self) -> str:
        """Seconds a batch, the ideal, and the bubble."""
        return (
            f"{self.seconds_per_batch:.6g} s a batch; ideal {self.ideal_seconds_per_batch:.6g} s; "
            f"bubble {self.bubble:.1%}"
        )

    def holdings(self) -> str:
        """The most that any rank holds."""
        live = max(rank.live_microbatches for rank in self.ranks)
        nbytes = max(rank.live_bytes or 0 for rank in self.ranks)
        versions = max(rank.weight_versions for rank in self.ranks)
        size = f" ({human_bytes(nbytes)})" if nbytes else ""
        return (
            f"at most {_counted(live, 'live microbatch')}{size} a rank, "
            f"{_counted(versions, 'version')} of the weights"
        )

    def __str__(self) -> str:
        shown = self._shown()
        lines = [self.title(), self.summary(), "", *_table([self.ranks[rank] for rank in shown])]
        if len(shown) < len(self.ranks):
            lines.append(
                f"of {len(self.ranks)} ranks: the first, the last, and the first with the most of each"
            )
        return "\n".join(lines)

    def _shown(self) -> list[int]:
        """All ranks if they are few; else the first, the last, and the highest of each column."""
        numbers = range(len(self.ranks))
        if len(numbers) <= _ROWS:
            return list(numbers)
        names = [item.name for item in dataclasses.fields(PipelineRank)][1:]
        worst = {max(numbers, key=lambda rank: getattr(self.ranks[rank], name) or 0) for name in names}  # noqa: B023
        return sorted({0, len(numbers) - 1} | worst)


def _table(ranks: list[PipelineRank]) -> list[str]:
    with_bytes = any(rank.live_bytes is not None for rank in ranks)
    header = ["rank", "busy", "live", *(["bytes"] if with_bytes else []), "versions", "sends", "gathers"]
    rows = [header, *(_row(rank, with_bytes) for rank in ranks)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _row(rank: PipelineRank, with_bytes: bool) -> list[str]:
    return [
        str(rank.rank),
        f"{rank.busy_seconds:.6g} s",
        str(rank.live_microbatches),
        *([human_bytes(rank.live_bytes or 0)] if with_bytes else []),
        str(rank.weight_versions),
        str(rank.transfers),
        str(rank.gathers),
    ]


def _counted(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def load_pipeline_plan(path: str | os.PathLike[str]) -> PipelinePlan:
    """The plan that :meth:`squeezebox.schema.PipelinePlan.save` wrote.

    Raises:
        FormatError: the file is missing, damaged, or of another version.
    """
    return PipelinePlan.load(path)


def pipeline_plan_text(plan: PipelinePlan, memories: Sequence[StageMemory] = ()) -> str:
    """What a plan says, a line a stage; with what its memory is made of, if that is given."""
    replicas = f" x {plan.replicas} replicas" if plan.replicas > 1 else ""
    replicas += " that keep a part each" if plan.shard else ""
    lines = [
        f"{plan.schedule}, {plan.ranks} ranks{replicas}, {plan.microbatches} microbatches of "
        f"{plan.microbatch} samples: {_seconds(plan.seconds)} a batch",
        "",
        f"{'stage':>5} {'rank':>4}  {'blocks':<40} {'policy':<9} {'forward':>9} {'backward':>9} {'peak':>10}",
    ]
    for number, stage in enumerate(plan.stages):
        lines.append(
            f"{number:>5} {_span(plan.ranks_of(number)):>4}  {_blocks(plan, stage):<40} {stage.policy:<9} "
            f"{_seconds(stage.forward_seconds):>9} {_seconds(stage.backward_seconds):>9} "
            f"{human_bytes(stage.peak_bytes):>10}"
        )
    if len(plan.stages) > plan.ranks:
        peaks = ", ".join(human_bytes(nbytes) for nbytes in plan.rank_peak_bytes)
        lines.append(f"peaks of the ranks, stages together: {peaks}")
    if plan.devices:
        ranks = zip(plan.devices, plan.processes, strict=True)
        places = [f"rank {rank} on {name} (process {own})" for rank, (name, own) in enumerate(ranks)]
        lines.append(", ".join(places))
    for number, memory in enumerate(memories):
        parts = [
            f"{name.removesuffix('_bytes').replace('_', ' ')} {human_bytes(value)}"
            for name, value in dataclasses.asdict(memory).items()
        ]
        lines.append(f"stage {number}: {', '.join(parts)}")
    return "\n".join(lines)


def pipeline_plan_line(plan: PipelinePlan) -> str:
    """A plan in one line, to compare it with others."""
    policies = sorted({stage.policy for stage in plan.stages})
    replicas = "-".join(map(str, plan.stage_replicas)) or f"{plan.replicas}{' parts' * plan.shard}"
    peak = max(plan.rank_peak_bytes, default=0)
    return (
        f"{_seconds(plan.seconds):>9}  {human_bytes(peak):>10}  {plan.schedule}, {plan.ranks} ranks x "
        f"{replicas}, {plan.microbatches} x {plan.microbatch} samples, {', '.join(policies)}"
    )


def _span(ranks: range) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _blocks(plan: PipelinePlan, stage: StagePlan) -> str:
    names = plan.blocks[stage.first : stage.end] or (f"{stage.first} to {stage.end - 1}",)
    text = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"
    return text if len(text) <= 40 else f"{text[:19]} .. {text[-17:]}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1.0 else f"{value * 1e3:.3g} ms"


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
