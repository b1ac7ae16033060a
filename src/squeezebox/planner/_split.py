"""Where to cut blocks into stages, by dynamic programming: PipeDream's partition, and ours under memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import NamedTuple

import numpy as np

from squeezebox.planner._stages import Place, Runs, held_by, memory
from squeezebox.planner._table import Floats
from squeezebox.schedules import FLOWS, PUBLISHED, Passes, Pipe, make, sharing
from squeezebox.schema import Block, Link, OptionError, PipelinePlan, StagePlan

# By j and m: A(j, m), and its last stage's first block and replicas m'.
Best = dict[tuple[int, int], tuple[float, int, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicatedStage:
    """Blocks ``first`` up to ``end`` on ``replicas`` workers, which take microbatches in turn."""

    first: int
    end: int
    replicas: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicatedSplit:
    """Stages in their order; ``seconds`` is the time from one microbatch's end to the next one's."""

    stages: tuple[ReplicatedStage, ...]
    seconds: float

    @property
    def warmups(self) -> int:
        """Microbatches that a worker of the first stage takes in before its first backward (NOAM)."""
        return -(-sum(stage.replicas for stage in self.stages) // self.stages[0].replicas)


def pipedream_split(blocks: Sequence[Block], workers: int, link: Link) -> ReplicatedSplit:
    """The split over exactly ``workers`` whose slowest stage is the fastest (arXiv:1806.03377, section 3.2).

    A(j, m) = min over i < j, m' < m of max{A(i, m - m'), 2 C_i, T(i -> j, m')}, where C_i is what block
    i's output takes over the link, and T(i -> j, m) = max{forward and backward, all-reduce} / m of blocks
    i + 1 to j. An all-reduce moves 2 (m - 1) / m of the parameters; the paper's 4 (m - 1) / m is both ways
    of a parameter server. Blocks keep what they save. O(blocks^2 workers^2).

    Raises:
        OptionError: there are no workers or no blocks, or a block that cannot keep what it saves.
    """
    if workers < 1 or not blocks:
        raise OptionError(
            f"{len(blocks)} blocks cannot be split over {workers} workers; give 1 or more of each."
        )
    search = _Search(blocks, link)
    best: Best = {}
    for end in range(1, len(blocks) + 1):
        for count in range(1, workers + 1):
            best[end, count] = min(search.endings(best, end, count))
    return ReplicatedSplit(stages=_stages(best, len(blocks), workers), seconds=best[len(blocks), workers][0])


class _Search:
    """Sums of seconds and of parameters up to each block, and the link between."""

    def __init__(self, blocks: Sequence[Block], link: Link) -> None:
        self.link = link
        self.both_ways = [2 * link.seconds(block.output_bytes) for block in blocks]
        self.seconds = [0.0, *accumulate(map(_kept_seconds, blocks))]
        self.parameters = [0, *accumulate(block.parameter_bytes for block in blocks)]

    def endings(self, best: Best, end: int, workers: int) -> Iterator[tuple[float, int, int]]:
        """All ways to append a last stage to the best of what is before it."""
        yield self.stage(0, end, workers), 0, workers
        for replicas, first in product(range(1, workers), range(1, end)):
            before = max(best[first, workers - replicas][0], self.both_ways[first - 1])
            yield max(before, self.stage(first, end, replicas)), first, replicas

    def stage(self, first: int, end: int, replicas: int) -> float:
        """T(i -> j, m)."""
        nbytes = self.parameters[end] - self.parameters[first]
        work = self.seconds[end] - self.seconds[first]
        return max(work, all_reduce_seconds(nbytes, replicas, self.link)) / replicas


def _stages(best: Best, end: int, workers: int) -> tuple[ReplicatedStage, ...]:
    _, first, replicas = best[end, workers]
    last = ReplicatedStage(first=first, end=end, replicas=replicas)
    return (*(_stages(best, first, workers - replicas) if first else ()), last)


def all_reduce_seconds(nbytes: int, replicas: int, link: Link) -> float:
    """How long a ring of replicas takes for ``nbytes``: 2 (m - 1) / m of them pass each link."""
    return link.seconds(2 * (replicas - 1) * nbytes // replicas) if replicas > 1 else 0.0


def _kept_seconds(block: Block) -> float:
    kept = block.holding("keep")
    if kept is None:
        raise OptionError(f"block '{block.name}' was not measured with policy 'keep'; profile it so.")
    return kept.forward_seconds + kept.backward_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A schedule on ``replicas`` equal pipelines, which may ``shard``: keep a part of the weights each."""

    schedule: str
    pipe: Pipe
    replicas: int
    shard: bool = False


class Found(NamedTuple):
    """A plan, and what its fullest rank holds."""

    plan: PipelinePlan
    peak_bytes: int


class Way(NamedTuple):
    """A policy for each of a rank's stages: their seconds in all, and the rank's peak."""

    seconds: float
    peak_bytes: int
    policies: tuple[int, ...]


Choose = Callable[[Sequence[Way]], Way | None]


def fastest(runs: Runs, shape: Shape, memory_bytes: int, link: Link) -> Found | None:
    """The plan whose slowest stage is the fastest, if one fits.

    With one stage a rank that is exact. Where a rank's stages share its memory, splits are tried in which
    each stage alone keeps to the whole of it, a half, a third and so on, and the one that needs the least.
    """
    held = [runs.held(place) for place in _places(shape)]
    seconds = runs.seconds + (runs.transfer if FLOWS[shape.schedule].waits else 0.0)
    splits = {
        _split([np.where(each <= memory_bytes // parts, seconds, np.inf).min(0) for each in held])
        for parts in range(1, shape.pipe.loops + 1)
    }
    if shape.pipe.loops > 1:
        splits.add(_smallest_split(runs, shape))

    def choose(ways: Sequence[Way]) -> Way | None:
        return min((way for way in ways if way.peak_bytes <= memory_bytes), default=None)

    found = [_planned(runs, shape, ends, choose, link) for ends in splits if ends]
    return min((each for each in found if each), key=lambda each: each.plan.seconds, default=None)


def smallest(runs: Runs, shape: Shape, link: Link) -> Found | None:
    """The plan whose fullest stage holds the least; None where no policy is known for all blocks."""

    def choose(ways: Sequence[Way]) -> Way | None:
        return min(ways, key=lambda way: way.peak_bytes, default=None)

    ends = _smallest_split(runs, shape)
    return _planned(runs, shape, ends, choose, link) if ends else None


def _places(shape: Shape) -> list[Place]:
    stages = range(shape.pipe.ranks * shape.pipe.loops)
    parts = shape.replicas if shape.shard else 1
    return [Place.of(shape.schedule, shape.pipe, stage, parts) for stage in stages]


def _smallest_split(runs: Runs, shape: Shape) -> tuple[int, ...]:
    known = np.isfinite(runs.seconds)
    return _split([np.where(known, runs.held(place), np.inf).min(0) for place in _places(shape)])


def _split(costs: Sequence[Floats]) -> tuple[int, ...]:
    """Ends of the stages whose largest cost is the least, and of those the least in all; empty if none.

    A(s, j) = min over i < j of max{A(s - 1, i), cost of blocks i up to j as stage s}: O(blocks^2 stages).
    """
    largest, _ = _chain(costs, np.maximum)
    if not np.isfinite(largest):
        return ()
    return _chain([np.where(cost <= largest, cost, np.inf) for cost in costs], np.add)[1]


def _chain(costs: Sequence[Floats], join: np.ufunc) -> tuple[float, tuple[int, ...]]:
    """The least cost of all stages joined, and where they end."""
    best = np.full(len(costs[0]), np.inf)
    best[0] = 0.0
    cuts = []
    for cost in costs:
        joined = join(best[:, None], cost)
        cuts.append(joined.argmin(0))
        best = joined.min(0)
    ends = [len(best) - 1]
    for cut in cuts[:0:-1]:
        ends.append(int(cut[ends[-1]]))
    return float(best[-1]), tuple(ends[::-1])


def _planned(runs: Runs, shape: Shape, ends: tuple[int, ...], choose: Choose, link: Link) -> Found | None:
    """The plan with these stages, if for each rank there is something to choose."""
    stages = [*pairwise((0, *ends))]
    chosen = [choose(_ways(runs, shape, rank, stages)) for rank in range(shape.pipe.ranks)]
    ways = [way for way in chosen if way]
    if len(ways) < len(chosen):
        return None
    policies = {
        stage: runs.policies[policy]
        for rank, way in enumerate(ways)
        for stage, policy in zip(FLOWS[shape.schedule].stages(shape.pipe, rank), way.policies, strict=True)
    }
    peaks = [way.peak_bytes for way in ways]
    plan = _plan(runs, shape, stages, [policies[stage] for stage in range(len(stages))], link, peaks)
    return Found(plan, max(plan.rank_peak_bytes))


def _ways(runs: Runs, shape: Shape, rank: int, stages: Sequence[tuple[int, int]]) -> list[Way]:
    """All choices of policies for a rank's stages; together they hold no more than at its fullest moment."""
    flow = FLOWS[shape.schedule]
    own = flow.stages(shape.pipe, rank)
    first, end = np.array([stages[stage] for stage in own]).T
    places = _places(shape)
    fixed = sum(int(runs.lasting(places[stage])[stages[stage]]) for stage in own)
    fixed += max(places[stage].whole * int(runs.parameters[stages[stage]]) for stage in own)
    received = np.array([places[stage].arrives for stage in own]) * runs.received[first, end]
    saved, working = runs.saved[:, first, end] + received, runs.working[:, first, end]
    seconds, pending = runs.seconds[:, first, end], runs.pending[:, first, end]
    in_flight, waiting = flow.in_flight(shape.pipe, rank), flow.pending(shape.pipe, rank)
    loops = np.arange(len(own))

    def way(policies: tuple[int, ...]) -> Way:
        activations = (in_flight @ saved[policies, loops] + waiting @ pending[policies, loops]).max()
        peak = fixed + int(activations) + int(working[policies, loops].max())
        return Way(float(seconds[policies, loops].sum()), peak, policies)

    ways = map(way, product(range(len(runs.policies)), repeat=len(own)))
    return [each for each in ways if np.isfinite(each.seconds)]


def _plan(
    runs: Runs,
    shape: Shape,
    stages: Sequence[tuple[int, int]],
    policies: Sequence[str],
    link: Link,
    peaks: Sequence[int],
) -> PipelinePlan:
    chosen = zip(stages, policies, _places(shape), strict=True)
    planned = tuple(planned_stage(runs, *blocks, policy, place) for blocks, policy, place in chosen)
    return PipelinePlan(
        schedule=shape.schedule,
        ranks=shape.pipe.ranks,
        replicas=shape.replicas,
        microbatch=runs.profile.microbatch,
        microbatches=shape.pipe.microbatches,
        stages=planned,
        seconds=_batch_seconds(runs, shape, planned, link),
        rank_peak_bytes=tuple(peaks),
        shard=shape.shard,
    )


def planned_stage(runs: Runs, first: int, end: int, policy: str, place: Place) -> StagePlan:
    """Blocks ``first`` up to ``end`` there."""
    holdings = held_by(runs.profile.blocks[first:end], policy)
    return StagePlan(
        first=first,
        end=end,
        policy=policy,
        forward_seconds=sum(each.forward_seconds for each in holdings),
        backward_seconds=sum(each.backward_seconds for each in holdings),
        peak_bytes=memory(runs.profile.blocks, first, end, policy, place).total_bytes,
    )


def _batch_seconds(runs: Runs, shape: Shape, stages: Sequence[StagePlan], link: Link) -> float:
    """A batch's passes, then its exchange; meanwhile, where a schedule goes on with the next batch."""
    blocks, flow, ranks = runs.profile.blocks, FLOWS[shape.schedule], shape.pipe.ranks
    crossing = [link.seconds(blocks[stage.end - 1].output_bytes) for stage in stages[:-1]]
    passes = Passes(
        forward=[stage.forward_seconds for stage in stages],
        backward=[stage.backward_seconds for stage in stages],
        transfers=crossing if ranks > 1 else [0.0] * len(crossing),
    )
    seconds = flow.seconds(shape.pipe, passes)
    parameters = [int(runs.parameters[stage.first, stage.end]) for stage in stages]
    exchanged = max(_exchange_seconds(shape, parameters, rank, link) for rank in range(ranks))
    return seconds + exchanged if PUBLISHED[shape.schedule].flushes else max(seconds, exchanged)


def _exchange_seconds(shape: Shape, parameters: Sequence[int], rank: int, link: Link) -> float:
    """A rank's all-reduce; or all its gathers and scatters, where replicas keep a part each."""
    pipe = shape.pipe
    if not shape.shard:
        own = FLOWS[shape.schedule].stages(pipe, rank)
        return all_reduce_seconds(sum(parameters[stage] for stage in own), shape.replicas, link)
    order = make(shape.schedule, pipe.ranks, pipe.microbatches, loops=pipe.loops)
    found = sharing(order, rank, [others_bytes(nbytes, shape.replicas) for nbytes in parameters])
    calls = found.gathers + found.reductions
    return calls * link.latency_seconds + (found.gathered_bytes + found.reduced_bytes) / link.bytes_per_second


def others_bytes(nbytes: int, replicas: int) -> int:
    """Of a stage's weights, those that other replicas keep: so much passes each link to have it whole."""
    return (replicas - 1) * -(-nbytes // replicas)
