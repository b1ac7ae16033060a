"""What pipelines are planned for: ranks that are alike, or devices that are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from squeezebox import pipeline, planner
from squeezebox.schedules import PUBLISHED, Costs, simulate
from squeezebox.schema import Block, Devices, Link, PipelinePlan, PipelineProfile

_UNLIMITED = 2**62


@dataclass(frozen=True, slots=True)
class Equal:
    """Ranks that may hold as much each, with the same link between any two."""

    ranks: int
    memory_bytes: int
    link: Link

    @property
    def memory(self) -> str:
        """What there is, in words."""
        return f"{self.memory_bytes} bytes a rank"

    def plans(
        self, profiles: Sequence[PipelineProfile], *, share: float, **options: Any
    ) -> list[PipelinePlan]:
        """Those that fit ``share`` of the memory, the fastest first; BudgetError if there are none."""
        limit = int(share * self.memory_bytes)
        return planner.plan_pipeline(
            profiles, ranks=self.ranks, memory_bytes=limit, link=self.link, **options
        )

    def again(self, plan: PipelinePlan, profile: PipelineProfile) -> PipelinePlan:
        """The plan as simulated, whatever it holds, with a block in place of each stage."""
        if plan.stage_replicas:
            stages = [
                planner.ReplicatedStage(first=number, end=number + 1, replicas=replicas)
                for number, replicas in enumerate(plan.stage_replicas)
            ]
            found = planner.with_replicas(profile, stages, plan.schedule, plan.microbatches, self.link)
        else:
            (found,) = planner.plan_pipeline(
                [profile],
                ranks=plan.replicas * plan.ranks,
                memory_bytes=_UNLIMITED,
                link=self.link,
                loops=[len(plan.stages) // plan.ranks],
                shards=[plan.shard],
                **_same(plan),
            )
        return _simulated(found, profile.blocks, self.link)

    def filled(self, plan: PipelinePlan) -> float:
        """What its fullest rank holds, of what it may."""
        return max(plan.rank_peak_bytes) / self.memory_bytes


@dataclass(frozen=True, slots=True)
class Unequal:
    """Devices, and how fast the one is on which blocks are measured."""

    devices: Devices
    speed: float

    @property
    def memory(self) -> str:
        """What there is, in words."""
        return "these devices"

    def plans(
        self, profiles: Sequence[PipelineProfile], *, share: float, **options: Any
    ) -> list[PipelinePlan]:
        """Those that fit ``share`` of the memory, the fastest first; BudgetError if there are none."""
        devices = self._with_memory([int(share * each.memory_bytes) for each in self.devices.devices])
        return planner.plan_on_devices(profiles, devices=devices, speed=self.speed, **options)

    def again(self, plan: PipelinePlan, profile: PipelineProfile) -> PipelinePlan:
        """The plan as simulated, whatever it holds, with a block in place of each stage."""
        devices = self._with_memory([_UNLIMITED] * len(self.devices.devices))
        (found,) = planner.plan_on_devices(
            [profile],
            devices=devices.chosen(self._order(plan)),
            speed=self.speed,
            in_order=True,
            **_same(plan),
        )
        return dataclasses.replace(found, processes=plan.processes)

    def filled(self, plan: PipelinePlan) -> float:
        """What its fullest rank holds, of what it may."""
        own = [self.devices.devices[number].memory_bytes for number in self._order(plan)]
        return max(peak / nbytes for peak, nbytes in zip(plan.rank_peak_bytes, own, strict=True))

    def _order(self, plan: PipelinePlan) -> list[int]:
        names = [each.name for each in self.devices.devices]
        return [names.index(name) for name in plan.devices]

    def _with_memory(self, nbytes: Sequence[int]) -> Devices:
        each = zip(self.devices.devices, nbytes, strict=True)
        devices = tuple(dataclasses.replace(device, memory_bytes=max(own, 1)) for device, own in each)
        return dataclasses.replace(self.devices, devices=devices)


def _same(plan: PipelinePlan) -> dict[str, Any]:
    return {
        "batch": plan.replicas * plan.microbatches * plan.microbatch,
        "schedules": [plan.schedule],
        "policies": sorted({stage.policy for stage in plan.stages}),
        "depths": [plan.ranks],
    }


def _simulated(plan: PipelinePlan, blocks: Sequence[Block], link: Link) -> PipelinePlan:
    """The plan with the seconds of its schedule run on paper, its uneven stages included.

    Schedules without a flush keep theirs, which are those of the slowest stage.

    Args:
        plan: of stages with a block each.
        blocks: these.
        link: between ranks.
    """
    if not PUBLISHED[plan.schedule].flushes:
        return plan
    parameters = [block.parameter_bytes for block in blocks]
    others = [link.seconds(planner.others_bytes(nbytes, plan.replicas)) for nbytes in parameters]
    costs = Costs(
        forward=tuple(stage.forward_seconds for stage in plan.stages),
        backward=tuple(stage.backward_seconds for stage in plan.stages),
        transfer=max((link.seconds(block.output_bytes) for block in blocks[:-1]), default=0.0),
        gather=tuple(others) if plan.shard else None,
        scatter=tuple(others) if plan.shard else None,
    )
    schedule = pipeline.schedule_of(plan)
    ends = [spans[-1].end for spans in simulate(schedule, costs).spans]
    if not plan.shard:
        own = [sum(parameters[stage] for stage in schedule.stages_of(rank)) for rank in range(plan.ranks)]
        ends = [
            end + planner.all_reduce_seconds(nbytes, plan.replicas, link)
            for end, nbytes in zip(ends, own, strict=True)
        ]
    return dataclasses.replace(plan, seconds=max(ends))
