"""What stages hold and how long they take: one by one, and as arrays over all runs of blocks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from squeezebox.planner._table import Floats, Integers
from squeezebox.schedules import FLOWS, Flow, Pipe
from squeezebox.schema import Block, Holding, Link, OptionError, PipelinePlan, PipelineProfile, StageMemory


def stage_memory(profile: PipelineProfile, plan: PipelinePlan, stage: int) -> StageMemory:
    """What stage number ``stage`` of the plan holds at its peak.

    2BW's 2 |W| / d + d A / d + d A_input (arXiv:2006.09503, section 3.2) with measured bytes: versions of
    parameters, gradients (two sets in 2BW), optimizer state, what each microbatch in flight was given and
    has saved, buffers for what comes and goes, and what the blocks work with.

    Args:
        profile: of microbatches as large as the plan's.
        plan: from :func:`plan_pipeline`.
        stage: from 0.

    Raises:
        OptionError: the plan has no such stage, or is of other blocks.
    """
    if not 0 <= stage < len(plan.stages) or plan.stages[-1].end != len(profile.blocks):
        raise OptionError(
            f"there is no stage {stage} of {len(profile.blocks)} blocks in a plan of {len(plan.stages)} "
            f"stages and {plan.stages[-1].end} blocks; give the profile it was made of, and a stage from 0."
        )
    own = plan.stages[stage]
    if plan.stage_replicas:
        place = Place.replicated(plan.schedule, plan.stage_replicas, stage)
    else:
        loops = len(plan.stages) // plan.ranks
        pipe = Pipe(ranks=plan.ranks, loops=loops, microbatches=plan.microbatches)
        place = Place.of(plan.schedule, pipe, stage, parts=plan.replicas if plan.shard else 1)
    return memory(profile.blocks, own.first, own.end, own.policy, place)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What a schedule asks of a stage: microbatches in flight, versions of weights, sets of gradients.

    ``moments`` are its fullest ones: microbatches in flight, and how many of them are pending. ``returned``
    are gradients from the stage after, ``sent`` those on their way to the one before. What the rank's own
    stage hands on is there once: then nothing ``arrives``, and no more gradients return than are used.
    Replicas keep one of ``parts`` each, and have the stage's weights and gradients whole as they work at it.
    """

    moments: tuple[tuple[int, int], ...]
    versions: int
    gradients: int
    returned: int = 2
    sent: int = 1
    arrives: bool = True
    parts: int = 1

    @staticmethod
    def of(schedule: str, pipe: Pipe, stage: int, parts: int = 1) -> Place:
        """That of stage number ``stage``."""
        flow = FLOWS[schedule]
        ranks = flow.placement(pipe)
        rank = ranks[stage]
        in_flight, pending = _moments(flow, pipe, stage)
        returns = ranks[stage + 1 : stage + 2] != (rank,)
        return Place(
            moments=tuple(zip(in_flight.tolist(), pending.tolist(), strict=True)),
            versions=flow.versions(pipe, rank),
            gradients=flow.gradients,
            returned=max(int(pending.max()), 1) + returns,
            arrives=stage == 0 or ranks[stage - 1] != rank,
            sent=int(_moments(flow, pipe, stage - 1)[0].max()) if pipe.loops > 1 and stage else 1,
            parts=parts,
        )

    @staticmethod
    def replicated(schedule: str, replicas: Sequence[int], stage: int) -> Place:
        """That of each replica of stage number ``stage``, which take microbatches in turn."""
        in_flight = -(-sum(replicas[stage:]) // replicas[stage])
        return Place(
            moments=((in_flight, 0),),
            versions=min(in_flight, 2) if schedule == "2bw" else in_flight,
            gradients=FLOWS[schedule].gradients,
        )

    @property
    def whole(self) -> int:
        """The stage's weights and gradients that are there besides what the rank keeps."""
        return 2 if self.parts > 1 else 0

    def fullest(self, saved: Any, pending: Any) -> Any:
        """The most bytes: ``saved`` for each microbatch in flight and ``pending`` for each pending one."""
        moments = [in_flight * saved + waiting * pending for in_flight, waiting in self.moments]
        return functools.reduce(np.maximum, moments)


def _moments(flow: Flow, pipe: Pipe, stage: int) -> tuple[Integers, Integers]:
    rank = flow.placement(pipe)[stage]
    loop = flow.stages(pipe, rank).index(stage)
    in_flight, pending = np.broadcast_arrays(flow.in_flight(pipe, rank), flow.pending(pipe, rank))
    return in_flight[:, loop], pending[:, loop]


def memory(blocks: Sequence[Block], first: int, end: int, policy: str, place: Place) -> StageMemory:
    """What a stage of these blocks holds there."""
    own = blocks[first:end]
    holdings = held_by(own, policy)
    parameters = sum(block.parameter_bytes for block in own)
    received = blocks[first - 1].output_bytes if first and place.arrives else 0
    returned = blocks[end - 1].output_bytes if end < len(blocks) else 0
    return StageMemory(
        weights_bytes=place.versions * -(-parameters // place.parts) + sum(each.frozen_bytes for each in own),
        gradient_bytes=place.gradients * -(-parameters // place.parts),
        state_bytes=-(-sum(block.state_bytes for block in own) // place.parts),
        activation_bytes=int(
            place.fullest(
                received + sum(each.saved_bytes for each in holdings),
                sum(each.pending_bytes for each in holdings),
            )
        ),
        buffer_bytes=(1 + place.sent) * received + place.returned * returned,
        working_bytes=_working(holdings),
        gathered_bytes=place.whole * parameters,
    )


def _working(holdings: Sequence[Holding]) -> int:
    """The most on top of what all have saved: later blocks have given theirs back when a block runs."""
    later = [*accumulate((each.saved_bytes for each in reversed(holdings)), initial=0)]
    return max(each.working_bytes - saved for each, saved in zip(reversed(holdings), later, strict=False))


def held_by(blocks: Sequence[Block], policy: str) -> list[Holding]:
    """Each block's holding by that policy.

    Raises:
        OptionError: a block has none.
    """
    holdings = [block.holding(policy) for block in blocks]
    found = [each for each in holdings if each is not None]
    if len(found) < len(blocks):
        name = blocks[holdings.index(None)].name
        raise OptionError(
            f"block '{name}' was not measured with policy '{policy}'; profile it, or take another."
        )
    return found


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Runs:
    """Every run of blocks as a stage, by [first, end]; by [policy, first, end] where it depends on that.

    ``seconds`` are of forward and backward, infinite where a block
    lacks the policy or there is no block; ``transfer`` are those of both boundaries, one way each.
    """

    profile: PipelineProfile
    policies: tuple[str, ...]
    parameters: Integers
    state: Integers
    frozen: Integers
    received: Integers
    returned: Integers
    saved: Integers
    pending: Integers
    working: Integers
    seconds: Floats
    transfer: Floats

    def held(self, place: Place) -> Integers:
        """Bytes of each run, there."""
        fullest: Integers = place.fullest(self.saved + place.arrives * self.received, self.pending)
        return self.lasting(place) + fullest + self.working + place.whole * self.parameters

    def lasting(self, place: Place) -> Integers:
        """Those that are there whatever is in flight."""
        weights = (place.versions + place.gradients) * -(-self.parameters // place.parts) + self.frozen
        buffers = place.arrives * (1 + place.sent) * self.received + place.returned * self.returned
        return weights - (-self.state // place.parts) + buffers


def runs(profile: PipelineProfile, policies: Sequence[str], link: Link) -> Runs:
    """All runs of a profile's blocks."""
    blocks = profile.blocks
    outputs = np.array([0, *(block.output_bytes for block in blocks[:-1]), 0])
    crossing = np.array([0.0, *(link.seconds(block.output_bytes) for block in blocks[:-1]), 0.0])
    by_policy = [[block.holding(policy) for block in blocks] for policy in policies]
    return Runs(
        profile=profile,
        policies=tuple(policies),
        parameters=_sums([block.parameter_bytes for block in blocks]),
        state=_sums([block.state_bytes for block in blocks]),
        frozen=_sums([block.frozen_bytes for block in blocks]),
        received=outputs[:, None] + 0 * outputs[None, :],
        returned=outputs[None, :] + 0 * outputs[:, None],
        saved=np.stack([_saved(own, "saved_bytes") for own in by_policy]),
        pending=np.stack([_saved(own, "pending_bytes") for own in by_policy]),
        working=np.stack([_most_working(own) for own in by_policy]),
        seconds=np.stack([_seconds(own) for own in by_policy]),
        transfer=crossing[:, None] + crossing[None, :],
    )


def _sums(values: Sequence[int]) -> Integers:
    upto = np.array([0, *accumulate(values)], np.int64)
    table: Integers = np.maximum(upto[None, :] - upto[:, None], 0)
    return table


def _saved(holdings: Sequence[Holding | None], what: str) -> Integers:
    upto = _upto(holdings, what)
    table: Integers = np.triu(upto[None, :] - upto[:, None])
    return table


def _most_working(holdings: Sequence[Holding | None]) -> Integers:
    """:func:`_working` of each run."""
    upto = _upto(holdings)
    peaks = np.array([each.working_bytes if each else 0 for each in holdings], np.int64) + upto[1:]
    table = np.zeros((len(upto), len(upto)), np.int64)
    for first in range(len(holdings)):
        table[first, first + 1 :] = np.maximum.accumulate(peaks[first:]) - upto[first + 1 :]
    return table


def _upto(holdings: Sequence[Holding | None], what: str = "saved_bytes") -> Integers:
    values = (getattr(each, what) if each else 0 for each in holdings)
    return np.array([0, *accumulate(values)], np.int64)


def _seconds(holdings: Sequence[Holding | None]) -> Floats:
    table = np.full((len(holdings) + 1, len(holdings) + 1), np.inf)
    each = [one.forward_seconds + one.backward_seconds if one else np.inf for one in holdings]
    for first in range(len(holdings)):
        table[first, first + 1 :] = np.cumsum(each[first:])
    return table
