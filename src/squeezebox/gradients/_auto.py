"""Which gradients go together, and how: chosen from what a few passes took on these ranks and their link."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from squeezebox.gradients._costs import measured_ways
from squeezebox.gradients._exchange import Exchange
from squeezebox.gradients._ranks import Worker
from squeezebox.gradients._residuals import Names
from squeezebox.planner import FusionPlan, Gradient, Group, Way, evaluate_fusion, plan_fusion

AUTO = "auto"
_SETTLING = 2  # passes of a process before buckets are DDP's final ones
_MEASURED = 5  # in which arrivals are measured
_OTHER_LINKS = (-0.5, 0.5, 2.0, 8.0)  # of a pass's seconds, that its bytes take more over other links
_OTHER = 1.4  # times the bytes of another plan, or fewer by as much, that make one worth a choice
_BLOCK = 4  # passes of a candidate in a row, the first of which does not count
_ROUNDS = 6  # of blocks, at most
_MARGIN = 0.5  # over the rounds so far: a candidate that is slower than the fastest by more gets no other
_NEAR = 1.5  # times the fastest one's planned seconds, within which others are tried too
_MOST = 4  # candidates
_CLEAR = 0.97  # of the seconds of plain gradients, which another way must stay below
_TOLERANCE = 0.005  # share of the seconds by which a plan may miss the optimum
_WORTH = 0.98  # of the seconds of DDP's own buckets, which groups of ours must stay below


@dataclass(frozen=True, kw_only=True, slots=True)
class SentGroup:
    """Parameters whose gradients go together: by a method, whose setting is ``level``."""

    names: Names
    method: str
    level: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangePlan:
    """What ``method="auto"`` chose: groups in their order, and how each goes.

    ``seconds`` from the end of forward until all have come are planned ones, or what passes took that tried
    it. ``noise`` is that of all together, as planned, and ``nbytes`` a rank sends in a pass.
    ``follows_buckets`` says that groups are DDP's buckets.
    """

    groups: tuple[SentGroup, ...]
    seconds: float
    noise: float
    follows_buckets: bool
    nbytes: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether gradients go as DDP itself sends them."""
        return self.follows_buckets and all(group.method == "plain" for group in self.groups)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ExchangePlan:
        """What :meth:`to_dict` gave."""
        groups = tuple(
            SentGroup(names=tuple(each["names"]), method=each["method"], level=each["level"])
            for each in data["groups"]
        )
        return cls(**{**data, "groups": groups})


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeCosts:
    """What "auto" measured, alike on all ranks: the slowest rank's seconds.

    ``gradients`` are in the order in which backward makes them, in seconds from the end of forward.
    ``buckets`` are DDP's. ``tried`` are plans with the seconds that passes took, and ``shift`` is what these
    are more than planned.
    """

    ways: tuple[Way, ...]
    gradients: tuple[Gradient, ...]
    buckets: tuple[Names, ...]
    tried: tuple[ExchangePlan, ...] = ()
    shift: float = 0.0

    def of_buckets(self, way: Way) -> ExchangePlan:
        """What DDP's buckets take when all go in one way."""
        groups = (SentGroup(names=names, method=way.name, level=way.level) for names in self.buckets)
        return self.of(ExchangePlan(groups=tuple(groups), seconds=0.0, noise=0.0, follows_buckets=True))

    def of(self, plan: ExchangePlan) -> ExchangePlan:
        """The same groups, with what they take and lose."""
        for each in self.tried:
            if each.groups == plan.groups:
                return each
        ways = {(way.name, way.level): way for way in self.ways}
        gradients = {each.name: each for each in self.gradients}
        ordered = _rising([gradients[name] for group in plan.groups for name in group.names])
        ends = [0, *itertools.accumulate(len(group.names) for group in plan.groups)]
        groups = [
            Group(first=a, end=b, way=ways[group.method, group.level])
            for (a, b), group in zip(itertools.pairwise(ends), plan.groups, strict=True)
        ]
        found = _plan(ordered, evaluate_fusion(ordered, groups), follows_buckets=plan.follows_buckets)
        return replace(found, seconds=found.seconds + self.shift)

    def slower(self, seconds: float) -> ExchangeCosts:
        """The same over a link on which a byte takes these ``seconds`` more."""
        return replace(self, ways=tuple(way.slower(seconds) for way in self.ways))


class Arrivals:
    """When backward has each gradient, in seconds from the end of forward."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._passes: list[list[float]] = []  # seconds until forward ended, then until each gradient came
        self.repeats = False  # a gradient that comes in parts, as with reentrant checkpoints
        self.end()
        self.begin()

    def begin(self) -> None:
        """Forward ends."""
        self._begun, self._came = time.perf_counter(), dict[str, float]()

    def note(self, name: str) -> None:
        """A gradient is there."""
        self.repeats = self.repeats or name in self._came
        self._came[name] = self.elapsed()

    def elapsed(self) -> float:
        """Seconds since forward ended."""
        return time.perf_counter() - self._begun

    def keep(self) -> None:
        """The pass counts."""
        came = [self._came.get(name, -math.inf) for name in self._names]
        self._passes.append([self._begun - self._ended, *came])

    def end(self) -> None:
        """A pass has ended, on all ranks at once."""
        self._ended = time.perf_counter()

    def medians(self, exchange: Exchange) -> list[float]:
        """When the last rank has each, from the first end of forward on; one that never came is the last."""
        rows = torch.tensor(exchange.numbers([each for row in self._passes for each in row]))
        rows = rows.view(exchange.ranks, len(self._passes), -1)
        latest = (rows[..., :1] + rows[..., 1:]).amax(0) - rows[..., :1].amin(0)
        found = latest.median(0).values
        return torch.where(found.isfinite(), found, found.max().clamp(min=0.0)).tolist()


class Chooser:
    """Passes that measure, then passes that try the plan and DDP's own exchange; the fastest stays."""

    def __init__(self, sizes: Mapping[str, int], noise: float) -> None:
        self._sizes, self._noise = sizes, noise
        self.arrivals = Arrivals(list(sizes))
        self._passes = 0
        self._candidates: list[ExchangePlan] = []
        self._tried: list[list[float]] = []  # of each candidate, this rank's seconds
        self._seconds: list[float] = []  # of each, the slowest rank's
        self._left: list[int] = []  # candidates that may still be the fastest
        self._others: list[ExchangePlan] = []  # that would be the fastest over other links
        self.costs: ExchangeCosts | None = None
        self.is_done = False

    @property
    def is_measuring(self) -> bool:
        """Whether this pass times arrivals, so that nothing should be sent meanwhile."""
        return not self._candidates and self._passes >= _SETTLING

    def end_pass(
        self, groups: Sequence[tuple[Names, Tensor]], exchange: Exchange, worker: Worker
    ) -> ExchangePlan | None:
        """How the next pass goes; None if as this one. ``groups`` are its mean gradients."""
        if not all(math.isfinite(torch.linalg.vector_norm(flat)) for _, flat in groups):
            return None  # on all ranks alike
        self._passes += 1
        if self._candidates:
            return self._race(exchange)
        if self._passes <= _SETTLING:
            return None
        self.arrivals.keep()
        if self._passes < _SETTLING + _MEASURED:
            return None
        (self._candidates, self._others), self._passes = self._made(groups, exchange, worker), 0
        self._tried, self._left = [[] for _ in self._candidates], list(range(len(self._candidates)))
        self._seconds = [0.0] * len(self._candidates)
        return self._candidates[0]

    def _race(self, exchange: Exchange) -> ExchangePlan:
        """Candidates take turns of a few passes; after a round those go on that may still be the fastest."""
        turn, place = divmod(self._passes - 1, _BLOCK)
        if place:
            self._tried[self._left[turn]].append(self.arrivals.elapsed())
        if self._passes < _BLOCK * len(self._left):
            return self._candidates[self._left[self._passes // _BLOCK]]
        rounds = len(self._tried[self._left[0]]) // (_BLOCK - 1)
        for each in self._left:
            rows = exchange.numbers(self._tried[each])
            median = statistics.median(map(max, zip(*rows, strict=True)))
            self._seconds[each] = median
        least = min(self._seconds[each] for each in self._left)
        self._left = [each for each in self._left if self._seconds[each] <= (1.0 + _MARGIN / rounds) * least]
        self._passes = 0
        return self._candidates[self._left[0]] if rounds < _ROUNDS and len(self._left) > 1 else self._chosen()

    def _chosen(self) -> ExchangePlan:
        """By the median of what the slowest rank took; plain stays unless one is clearly faster."""
        assert self.costs is not None
        tried = [
            replace(each, seconds=seconds)
            for each, seconds in zip(self._candidates, self._seconds, strict=True)
        ]
        shifts = [self._seconds[each] - self._candidates[each].seconds for each in self._left]
        self.costs = replace(self.costs, tried=tuple(tried), shift=statistics.median(shifts))
        self.is_done = True
        left = [tried[each] for each in self._left]
        best = min(left, key=lambda plan: plan.seconds)
        return next((each for each in left if each.is_plain and best.seconds > _CLEAR * each.seconds), best)

    def _made(
        self, groups: Sequence[tuple[Names, Tensor]], exchange: Exchange, worker: Worker
    ) -> list[list[ExchangePlan]]:
        """Plans for this link, and for others; made by the first rank of what all have measured."""
        parts = {
            name: part
            for names, flat in groups
            for name, part in zip(names, flat.split([self._sizes[name] for name in names]), strict=True)
        }
        ways = measured_ways(list(parts.values()), self._noise, exchange, worker)
        squares = [float(parts[name].double().square().sum()) for name in self._sizes]
        rows = exchange.numbers([*squares, float(self.arrivals.repeats)])
        *means, repeats = (statistics.fmean(column) for column in zip(*rows, strict=True))
        numbers = zip(self._sizes.items(), self.arrivals.medians(exchange), means, strict=True)
        gradients = [
            Gradient(name=name, numel=numel, ready_seconds=ready, squares=square)
            for (name, numel), ready, square in numbers
        ]
        self.costs = ExchangeCosts(
            ways=ways,
            gradients=tuple(sorted(gradients, key=lambda each: each.ready_seconds)),
            buckets=tuple(names for names, _ in groups),
        )
        found: list[list[ExchangePlan]] = []
        if exchange.rank == 0:
            found = [candidates(self.costs, self._noise, takes_single=not repeats), []]
            seconds = found[0][0].seconds / sum(4.0 * each.numel for each in self.costs.gradients)
            for times in _OTHER_LINKS:
                costs = self.costs.slower(times * seconds)
                plans = candidates(costs, self._noise, takes_single=not repeats)
                found[1].append(self.costs.of(plans[0]))
        text = exchange.first_text(json.dumps([[each.to_dict() for each in plans] for plans in found]))
        return [[ExchangePlan.from_dict(each) for each in plans] for plans in json.loads(text)]

    def choices(self, chosen: ExchangePlan) -> list[ExchangePlan]:
        """The plan, and others that would be the fastest over a slower or faster link."""
        assert self.costs is not None
        found = [chosen]
        for each in self._others:
            if all(max(each.nbytes, one.nbytes) > _OTHER * min(each.nbytes, one.nbytes) for one in found):
                found.append(self.costs.of(each))
        return found


def candidates(costs: ExchangeCosts, noise: float, *, takes_single: bool) -> list[ExchangePlan]:
    """The plan that should be the fastest, then DDP's buckets in each way that comes near it."""
    best = sorted(
        (costs.of_buckets(way) for way in costs.ways if way.noise <= noise), key=lambda plan: plan.seconds
    )
    if takes_single:
        plan = plan_fusion(costs.gradients, costs.ways, noise, _TOLERANCE)
        if plan.seconds < _WORTH * best[0].seconds:
            best.insert(0, _plan(costs.gradients, plan, follows_buckets=False))
    return [each for each in best if each.seconds < _NEAR * best[0].seconds][:_MOST]


def _rising(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Each is ready no sooner than the one before."""
    latest, found = 0.0, []
    for each in gradients:
        latest = max(latest, each.ready_seconds)
        found.append(Gradient(name=each.name, numel=each.numel, ready_seconds=latest, squares=each.squares))
    return found


def _plan(ordered: Sequence[Gradient], plan: FusionPlan, *, follows_buckets: bool) -> ExchangePlan:
    groups = tuple(
        SentGroup(
            names=tuple(each.name for each in ordered[group.first : group.end]),
            method=group.way.name,
            level=group.way.level,
        )
        for group in plan.groups
    )
    numels = (sum(each.numel for each in ordered[group.first : group.end]) for group in plan.groups)
    return ExchangePlan(
        groups=groups,
        seconds=plan.seconds,
        noise=plan.noise,
        follows_buckets=follows_buckets,
        nbytes=sum(group.way.nbytes * numel for group, numel in zip(plan.groups, numels, strict=True)),
    )
