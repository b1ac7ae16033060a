"""Whether a schedule can be carried out, when every action happens, and what lives and crosses meanwhile."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from squeezebox.schedules._action import Action, Kind, Schedule
from squeezebox.schema import PlanError

_GRADIENT = (Kind.BACKWARD, Kind.INPUT)  # what the stage before waits for
_LAST = (Kind.BACKWARD, Kind.WEIGHT)  # after which a microbatch's activations are gone


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Seconds of every stage's actions for one microbatch, a number a stage, and of what crosses.

    ``input`` and ``weight`` are the parts of ``backward``, half of it each unless given. ``transfer`` is of
    one boundary between stages on two ranks, either way, and keeps neither of them busy; or it has a number
    for every boundary.
    ``activation_bytes`` are those that a microbatch leaves at a stage until its backward. Where replicas keep
    a part each, a rank takes ``gather`` seconds to have a stage's weights whole, and ``scatter`` to leave it
    with gradients; inputs may arrive meanwhile.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    input: tuple[float, ...] | None = None
    weight: tuple[float, ...] | None = None
    update: tuple[float, ...] | None = None
    transfer: float | tuple[float, ...] = 0.0
    activation_bytes: tuple[int, ...] | None = None
    gather: tuple[float, ...] | None = None
    scatter: tuple[float, ...] | None = None

    @staticmethod
    def even(stages: int, *, forward: float = 1.0, backward: float = 2.0, transfer: float = 0.0) -> Costs:
        """The same for all stages."""
        return Costs(forward=(forward,) * stages, backward=(backward,) * stages, transfer=transfer)

    def by_kind(self) -> Mapping[Kind, tuple[float, ...]]:
        """Seconds of every stage's action of each kind."""
        half = tuple(seconds / 2.0 for seconds in self.backward)
        return {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.INPUT: self.input or half,
            Kind.WEIGHT: self.weight or half,
            Kind.UPDATE: self.update or (0.0,) * len(self.forward),
        }


class Span(NamedTuple):
    """An action, and from when to when it runs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """A schedule as it would run.

    ``live`` counts, for each rank, the most microbatches of one stage whose activations are there at once,
    its stages together; ``live_bytes`` are theirs. ``versions`` counts each stage's weights, at most at once.
    ``transfers`` counts what each rank sends.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    live: tuple[int, ...]
    live_bytes: tuple[int, ...]
    versions: tuple[int, ...]
    transfers: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """From the start to the last action's end."""
        return max(span.end for spans in self.spans for span in spans)

    def busy(self, rank: int) -> float:
        """Seconds that a rank works."""
        return sum(span.end - span.start for span in self.spans[rank])

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they wait."""
        return 1.0 - sum(map(self.busy, range(len(self.spans)))) / (len(self.spans) * self.seconds)


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Run the schedule on paper: every rank in its order, each action as soon as what it needs is there.

    Raises:
        PlanError: ranks wait for each other without end, or a stage has no costs, or some below 0 or NaN.
    """
    if len(costs.forward) != schedule.num_stages or len(costs.backward) != schedule.num_stages:
        raise PlanError(
            f"the schedule has {schedule.num_stages} stages, and there are costs for {len(costs.forward)} "
            f"forwards and {len(costs.backward)} backwards; give one of each for every stage."
        )
    seconds = costs.by_kind()
    _require_seconds(costs, seconds)
    ahead = None if costs.gather is None else [_visiting(order, costs) for order in schedule.orders]
    spans = run(schedule, lambda action: seconds[action.kind][action.stage], costs.transfer, ahead)
    bytes_ = costs.activation_bytes or (0,) * schedule.num_stages
    lives = [_live(order, bytes_) for order in schedule.orders]
    return Timeline(
        schedule=schedule,
        spans=tuple(map(tuple, spans)),
        live=tuple(count for count, _ in lives),
        live_bytes=tuple(nbytes for _, nbytes in lives),
        versions=versions(schedule),
        transfers=tuple(_sent(schedule, rank) for rank in range(schedule.num_ranks)),
    )


def _require_seconds(costs: Costs, seconds: Mapping[Kind, tuple[float, ...]]) -> None:
    transfer = costs.transfer if isinstance(costs.transfer, tuple) else (costs.transfer,)
    named = {f"{kind.name.lower()}=": each for kind, each in seconds.items()}
    named |= {"transfer=": transfer, "gather=": costs.gather or (), "scatter=": costs.scatter or ()}
    for name, values in named.items():
        for each in values:
            if not (math.isfinite(each) and each >= 0.0):
                raise PlanError(
                    f"{name}{each} among the costs: give seconds that are finite and not below 0."
                )


def run(
    schedule: Schedule,
    seconds: Callable[[Action], float],
    transfer: float | tuple[float, ...] = 0.0,
    ahead: Sequence[Sequence[float]] | None = None,
) -> list[list[Span]]:
    """Every rank's spans; PlanError where they wait for each other.

    ``ahead`` has what each rank does before each of its actions, while it may wait for others.
    """
    events = _Events(schedule, transfer)
    spans: list[list[Span]] = [[] for _ in schedule.orders]
    ready = deque(range(schedule.num_ranks))
    while ready:
        rank = ready.popleft()
        own, order = spans[rank], schedule.orders[rank]
        now = own[-1].end if own else 0.0
        # As far as it comes; the rank that is waited for puts it back into ``ready``.
        for number, action in enumerate(order[len(own) :], len(own)):
            arrived = events.arrival(action, rank)
            if arrived is None:
                break
            start = max(now + (ahead[rank][number] if ahead else 0.0), arrived)
            now = start + seconds(action)
            own.append(Span(action, start, now))
            ready.extend(events.happened(action, now))
    _require_end(schedule, spans)
    return spans


class _Events:
    """When forwards and inputs' gradients were ready, and who waits for them."""

    def __init__(self, schedule: Schedule, transfer: float | tuple[float, ...]) -> None:
        pairs = [*pairwise(schedule.placement)]
        each = transfer if isinstance(transfer, tuple) else (transfer,) * len(pairs)
        crossing = [own if one != two else 0.0 for own, (one, two) in zip(each, pairs, strict=True)]
        self._from_before, self._from_after = [0.0, *crossing], [*crossing, 0.0]
        rows, columns = schedule.num_stages, schedule.batches * schedule.microbatches
        self._forwards: list[list[float | None]] = [[None] * columns for _ in range(rows)]
        self._inputs: list[list[float | None]] = [[None] * columns for _ in range(rows)]
        self._waiting: dict[tuple[bool, int, int], int] = {}
        self._reduced = _Reduced(schedule)

    def arrival(self, action: Action, rank: int) -> float | None:
        """From when on the action could begin; None, and the rank is remembered, if that is not known yet."""
        reduced, passed = self._reduced.arrival(action, rank), self._passed(action, rank)
        return None if reduced is None or passed is None else max(reduced, passed)

    def _passed(self, action: Action, rank: int) -> float | None:
        """From when on what other stages hand to it is there."""
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        if kind is Kind.UPDATE:
            return 0.0
        if kind is Kind.FORWARD:
            if stage == 0:
                return 0.0
            forwards, stage, later = True, stage - 1, self._from_before[stage]
        elif kind is Kind.WEIGHT or stage + 1 == len(self._inputs):
            forwards, later = kind is not Kind.WEIGHT, 0.0
        else:
            forwards, stage, later = False, stage + 1, self._from_after[stage]
        end = (self._forwards if forwards else self._inputs)[stage][microbatch]
        if end is None:
            self._waiting[forwards, stage, microbatch] = rank
            return None
        return end + later

    def happened(self, action: Action, end: float) -> list[int]:
        """Note when it ended, and say which ranks have waited for it."""
        if action.kind is Kind.UPDATE:
            return self._reduced.happened(action, end)
        if action.kind is Kind.WEIGHT:
            return []
        forwards = action.kind is Kind.FORWARD
        (self._forwards if forwards else self._inputs)[action.stage][action.microbatch] = end
        key = forwards, action.stage, action.microbatch
        return [self._waiting.pop(key)] if key in self._waiting else []


class _Reduced:
    """When the gradients of all of a stage's replicas were complete, and who waits for them."""

    def __init__(self, schedule: Schedule) -> None:
        self._replicas = schedule.replicas
        self._ends: dict[tuple[int, int], list[float]] = {}
        self._waiting: dict[tuple[int, int], list[int]] = {}

    def arrival(self, action: Action, rank: int) -> float | None:
        """From when on the version that is read can be made, as far as that depends on other ranks."""
        if not self._replicas or action.kind is Kind.UPDATE or not action.version:
            return 0.0
        key = action.stage, action.version - 1
        ends = self._ends.get(key, [])
        if len(ends) < self._replicas[action.stage]:
            self._waiting.setdefault(key, []).append(rank)
            return None
        return max(ends)

    def happened(self, action: Action, end: float) -> list[int]:
        """A rank's own gradients are complete: who has waited for all of them."""
        key = action.stage, action.microbatch
        ends = self._ends.setdefault(key, [])
        ends.append(end)
        whole = self._replicas and len(ends) == self._replicas[action.stage]
        return self._waiting.pop(key, []) if whole else []


def versions(schedule: Schedule) -> tuple[int, ...]:
    """Of each stage's weights, the most that must be held at once: from those still to be read to the newest.

    A version is made when it is first read, and no sooner: an update can wait until then, with its gradients.
    """
    most = [1] * schedule.num_stages
    for order in schedule.orders:
        passes = [action for action in order if action.kind is not Kind.UPDATE]
        oldest: dict[int, int] = {}  # version that a stage still reads
        needed = []
        # From the end, so that ``oldest`` is what the stage reads from here on.
        for action in reversed(passes):
            oldest[action.stage] = min(oldest.get(action.stage, action.version), action.version)
            needed.append(oldest[action.stage])
        newest: dict[int, int] = {}
        for action, still in zip(passes, reversed(needed), strict=True):
            stage = action.stage
            newest[stage] = max(newest.get(stage, 0), action.version)
            most[stage] = max(most[stage], newest[stage] - still + 1)
    return tuple(most)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """What a rank does where replicas keep a part of its stages each.

    ``gathers`` counts how often it has a stage's weights gathered, ``reductions`` how often a stage's
    gradients summed and scattered; the bytes are those of the other replicas' parts.
    """

    gathers: int
    gathered_bytes: int
    reductions: int
    reduced_bytes: int


def gathers(schedule: Schedule, rank: int, unsharded: int = 1) -> int:
    """How often a rank gathers a stage's weights if ``unsharded`` stages are whole at a time (FSDP)."""
    return sharing(schedule, rank, [0] * schedule.num_stages, unsharded).gathers


def sharing(schedule: Schedule, rank: int, part_bytes: Sequence[int], unsharded: int = 1) -> Sharing:
    """What a rank gathers and scatters if ``unsharded`` stages are whole at a time.

    Args:
        schedule: its orders are counted.
        rank: of a pipeline.
        part_bytes: of each stage, those of the parts that the rank does not keep.
        unsharded: stages that a rank has whole at once. An update lets go of a stage.
    """
    visits = [*_visits(schedule.orders[rank], unsharded)]
    gathered = [part_bytes[stage] for stages, _ in visits for stage in stages]
    reduced = [part_bytes[stage] for _, stages in visits for stage in stages]
    return Sharing(
        gathers=len(gathered),
        gathered_bytes=sum(gathered),
        reductions=len(reduced),
        reduced_bytes=sum(reduced),
    )


def _visits(order: Sequence[Action], unsharded: int) -> Iterator[tuple[list[int], list[int]]]:
    """Stages that a rank gathers for each action, and those that it leaves before, with gradients."""
    whole: dict[int, bool] = {}  # with whether there are gradients
    for action in order:
        gathered, left = list[int](), list[int]()
        if action.kind is Kind.UPDATE:
            left = [action.stage] if action.stage in whole else []
        else:
            gathered = [] if action.stage in whole else [action.stage]
            whole[action.stage] = whole.pop(action.stage, False) or action.kind is not Kind.FORWARD
            left = [*whole][:-unsharded]
        yield gathered, [stage for stage in left if whole.pop(stage)]


def _visiting(order: Sequence[Action], costs: Costs) -> list[float]:
    """Seconds before each action in which a rank scatters and gathers, with one stage whole at a time."""
    gather, scatter = costs.gather or (), costs.scatter or ()
    return [
        sum(gather[stage] for stage in gathered) + sum(scatter[stage] for stage in left)
        for gathered, left in _visits(order, 1)
    ]


def _require_end(schedule: Schedule, spans: list[list[Span]]) -> None:
    stuck = [
        f"rank {rank} at {order[len(own)]}"
        for rank, (own, order) in enumerate(zip(spans, schedule.orders, strict=True))
        if len(own) < len(order)
    ]
    if stuck:
        raise PlanError(
            f"schedule '{schedule.name}' never ends: {', '.join(stuck[:8])} wait for what no rank will do. "
            "Its orders contradict each other; change them there."
        )


def _live(order: tuple[Action, ...], nbytes: tuple[int, ...]) -> tuple[int, int]:
    """Most microbatches with activations at once, and most bytes of them."""
    count = most = held = highest = 0
    for action in order:
        change = (action.kind is Kind.FORWARD) - (action.kind in _LAST)
        count, held = count + change, held + change * nbytes[action.stage]
        most, highest = max(most, count), max(highest, held)
    return most, highest


def _sent(schedule: Schedule, rank: int) -> int:
    """How much of what a rank's actions make goes to another one."""
    places = schedule.placement
    after = {stage for stage, (own, other) in enumerate(pairwise(places)) if own != other}
    before = {stage + 1 for stage in after}
    return sum(
        action.stage in (after if action.kind is Kind.FORWARD else before)
        for action in schedule.orders[rank]
        if action.kind is Kind.FORWARD or action.kind in _GRADIENT
    )


def validate(schedule: Schedule) -> None:
    """Refuse a schedule that is not whole or cannot be carried out.

    Every microbatch must pass every stage forwards and backwards once, backward whole or in its two parts,
    with the same weights both ways; those must have been made by then; a batch's update comes once, after
    all its gradients; and no ranks may wait for each other without end.

    Raises:
        PlanError: names the rank, the action and what is wrong.
    """
    for problem in _problems(schedule):
        raise PlanError(f"schedule '{schedule.name}': {problem} Mend its orders, or take a published one.")
    run(schedule, lambda action: 1.0)


def _problems(schedule: Schedule) -> Iterator[str]:
    total = schedule.batches * schedule.microbatches
    for rank, order in enumerate(schedule.orders):
        for action in order:
            if not 0 <= action.stage < schedule.num_stages or rank not in schedule.ranks_of(action.stage):
                yield f"rank {rank} has {action}, of a stage that is not its own."
        for stage in schedule.stages_of(rank):
            own = [action for action in order if action.stage == stage]
            taken = [number for number in range(total) if schedule.rank_of(stage, number) == rank]
            yield from (f"rank {rank}: {problem}" for problem in _of_stage(own, stage, taken, schedule))


def _of_stage(own: list[Action], stage: int, taken: list[int], schedule: Schedule) -> Iterator[str]:
    times = Counter((action.kind, action.microbatch) for action in own)
    for microbatch in taken:
        counts = tuple(times.pop((kind, microbatch), 0) for kind in Kind if kind is not Kind.UPDATE)
        if counts not in ((1, 1, 0, 0), (1, 0, 1, 1)):
            passes = ", ".join(
                f"{count} {kind.name.lower()}" for kind, count in zip(Kind, counts, strict=False)
            )
            yield f"microbatch {microbatch} passes stage {stage} with {passes}."
    updates = schedule.updates_of(stage)
    for update in range(schedule.batches * updates):
        if times.pop((Kind.UPDATE, update), 0) != 1:
            yield f"stage {stage} is not updated once after batch {update // updates}."
    for kind, microbatch in times:
        yield f"stage {stage} has a {kind.name.lower()} of microbatch {microbatch}, of which there is none."
    per_update = schedule.microbatches // updates
    yield from _weights(own, per_update, per_update // len(schedule.ranks_of(stage)))


def _weights(own: list[Action], per_update: int, taken: int) -> Iterator[str]:
    """What is wrong with the versions, and with when they are made.

    An update is of ``per_update`` microbatches, of which ``taken`` are this rank's.
    """
    made, reads, complete = 0, dict[int, int](), Counter[int]()
    for action in own:
        if action.version > made:
            yield f"{action} reads weights after {action.version} updates; there were {made}."
        if action.kind is Kind.UPDATE:
            if complete[action.microbatch] < taken or action.microbatch != made:
                yield f"{action} comes before all of its gradients, or out of turn."
            made = action.microbatch + 1
        elif action.kind is Kind.FORWARD:
            reads[action.microbatch] = action.version
        elif reads.get(action.microbatch) != action.version:
            yield f"{action} comes before its forward, or reads other weights."
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            complete[action.microbatch // per_update] += 1
