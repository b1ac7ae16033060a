"""Plans in which a slow stage has several ranks: PipeDream's split as something to run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from squeezebox.planner._split import Found, ReplicatedStage, all_reduce_seconds, pipedream_split
from squeezebox.planner._stages import Place, held_by, memory
from squeezebox.schema import Link, PipelinePlan, PipelineProfile, StagePlan

_SCHEDULES = ("pipedream", "2bw")  # that have replicas of stages
_POLICY = "keep"  # PipeDream's search is for stages that keep what they save


def replicated(
    profiles: Sequence[PipelineProfile],
    schedules: Sequence[str],
    *,
    batch: int,
    ranks: int,
    link: Link,
) -> Iterator[tuple[Found, PipelineProfile]]:
    """PipeDream's split for each microbatch and schedule, if stages differ in replicas."""
    names = [name for name in schedules if name in _SCHEDULES]
    for profile in profiles if names else ():
        if any(block.holding(_POLICY) is None for block in profile.blocks):
            continue
        stages = pipedream_split(profile.blocks, ranks, link).stages
        least = math.lcm(*(stage.replicas for stage in stages))
        microbatches, rest = divmod(batch, profile.microbatch)
        if rest or microbatches % least or len({stage.replicas for stage in stages}) == 1:
            continue
        for schedule in names:
            if microbatches >= ranks if schedule == "2bw" else microbatches == least:
                plan = with_replicas(profile, stages, schedule, microbatches, link)
                yield Found(plan, max(plan.rank_peak_bytes)), profile


def with_replicas(
    profile: PipelineProfile,
    stages: Sequence[ReplicatedStage],
    schedule: str,
    microbatches: int,
    link: Link,
) -> PipelinePlan:
    """The plan of these stages, which keep what they save, on as many ranks as they have replicas."""
    replicas = [stage.replicas for stage in stages]
    planned = tuple(
        _stage(profile, stage, Place.replicated(schedule, replicas, number))
        for number, stage in enumerate(stages)
    )
    peaks = [stage.peak_bytes for stage in planned for _ in range(stage.replicas)]
    return PipelinePlan(
        schedule=schedule,
        ranks=sum(replicas),
        replicas=1,
        microbatch=profile.microbatch,
        microbatches=microbatches,
        stages=planned,
        seconds=_batch_seconds(profile, planned, schedule, microbatches, link),
        rank_peak_bytes=tuple(peaks),
    )


def _stage(profile: PipelineProfile, stage: ReplicatedStage, place: Place) -> StagePlan:
    holdings = held_by(profile.blocks[stage.first : stage.end], _POLICY)
    return StagePlan(
        first=stage.first,
        end=stage.end,
        policy=_POLICY,
        forward_seconds=sum(each.forward_seconds for each in holdings),
        backward_seconds=sum(each.backward_seconds for each in holdings),
        peak_bytes=memory(profile.blocks, stage.first, stage.end, _POLICY, place).total_bytes,
        replicas=stage.replicas,
    )


def _batch_seconds(
    profile: PipelineProfile, stages: Sequence[StagePlan], schedule: str, microbatches: int, link: Link
) -> float:
    """The slowest of stages, transfers there and back, and all-reduces, which go on meanwhile."""
    longest = 0.0
    for number, stage in enumerate(stages):
        own = profile.blocks[stage.first : stage.end]
        reduced = all_reduce_seconds(sum(block.parameter_bytes for block in own), stage.replicas, link)
        updates = 1 if schedule == "2bw" else microbatches // stage.replicas
        work = (stage.forward_seconds + stage.backward_seconds) * microbatches / stage.replicas
        crossing = 2 * link.seconds(own[-1].output_bytes) * microbatches if number + 1 < len(stages) else 0.0
        longest = max(longest, work, reduced * updates, crossing)
    return longest
