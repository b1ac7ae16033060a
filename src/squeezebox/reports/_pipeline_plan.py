"""A pipeline's plan as text."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from squeezebox.reports._report import human_bytes
from squeezebox.schema import PipelinePlan, StageMemory, StagePlan


def load_pipeline_plan(path: str | os.PathLike[str]) -> PipelinePlan:
    """The plan that :meth:`squeezebox.schema.PipelinePlan.save` wrote.

    Raises:
        FormatError: the file is missing, damaged, or of another version.
    """
    return PipelinePlan.load(path)


def pipeline_plan_text(plan: PipelinePlan, memories: Sequence[StageMemory] = ()) -> str:
    """What a plan says, a line a stage; with what its memory is made of, if that is given."""
    replicas = f" x {plan.replicas} replicas" if plan.replicas > 1 else ""
    lines = [
        f"{plan.schedule}, {plan.ranks} ranks{replicas}, {plan.microbatches} microbatches of "
        f"{plan.microbatch} samples: {_seconds(plan.seconds)} a batch",
        "",
        f"{'stage':>5} {'rank':>4}  {'blocks':<40} {'policy':<9} {'forward':>9} {'backward':>9} {'peak':>10}",
    ]
    for number, stage in enumerate(plan.stages):
        lines.append(
            f"{number:>5} {number % plan.ranks:>4}  {_blocks(plan, stage):<40} {stage.policy:<9} "
            f"{_seconds(stage.forward_seconds):>9} {_seconds(stage.backward_seconds):>9} "
            f"{human_bytes(stage.peak_bytes):>10}"
        )
    if len(plan.stages) > plan.ranks:
        peaks = ", ".join(human_bytes(nbytes) for nbytes in plan.rank_peak_bytes)
        lines.append(f"peaks of the ranks, stages together: {peaks}")
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
    peak = max(plan.rank_peak_bytes, default=0)
    return (
        f"{_seconds(plan.seconds):>9}  {human_bytes(peak):>10}  {plan.schedule}, {plan.ranks} ranks x "
        f"{plan.replicas}, {plan.microbatches} x {plan.microbatch} samples, {', '.join(policies)}"
    )


def _blocks(plan: PipelinePlan, stage: StagePlan) -> str:
    names = plan.blocks[stage.first : stage.end] or (f"{stage.first} to {stage.end - 1}",)
    text = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"
    return text if len(text) <= 40 else f"{text[:19]} .. {text[-17:]}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1.0 else f"{value * 1e3:.3g} ms"
