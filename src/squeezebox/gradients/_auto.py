"""Which gradients go together, and how: chosen from what a few passes took on these ranks and their link."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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
_TRIED = 5  # of each candidate
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

    ``seconds`` from the end of forward until all have come, and ``noise`` of all together, are planned ones.
    ``follows_buckets`` says that groups are DDP's buckets.
    """

    groups: tuple[SentGroup, ...]
    seconds: float
    noise: float
    follows_buckets: bool

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
    ``buckets`` are DDP's.
    """

    ways: tuple[Way, ...]
    gradients: tuple[Gradient, ...]
    buckets: tuple[Names, ...]

    def of_buckets(self, way: Way) -> ExchangePlan:
        """What DDP's buckets take when all go in one way."""
        gradients = {each.name: each for each in self.gradients}
        ordered = _rising([gradients[name] for names in self.buckets for name in names])
        ends = list(itertools.accumulate(len(names) for names in self.buckets))
        groups = [Group(first=a, end=b, way=way) for a, b in itertools.pairwise([0, *ends])]
        return _plan(ordered, evaluate_fusion(ordered, groups), follows_buckets=True)


class Arrivals:
    """When backward has each gradient, in seconds from the end of forward."""

    def __init__(self, names: Sequence[str]) -> None:
        self._seconds: dict[str, list[float]] = {name: [] for name in names}
        self.repeats = False  # a gradient that comes in parts, as with reentrant checkpoints
        self.begin()

    def begin(self) -> None:
        """Forward ends."""
        self._begun, self._came = time.perf_counter(), set[str]()

    def note(self, name: str) -> None:
        """A gradient is there."""
        self.repeats = self.repeats or name in self._came
        self._came.add(name)
        self._seconds[name].append(self.elapsed())

    def elapsed(self) -> float:
        """Seconds since forward ended."""
        return time.perf_counter() - self._begun

    def medians(self) -> list[float]:
        """Of every parameter; one that never came is the last."""
        found = [statistics.median(each) if each else None for each in self._seconds.values()]
        last = max((each for each in found if each is not None), default=0.0)
        return [last if each is None else each for each in found]


class Chooser:
    """Passes that measure, then passes that try the plan and DDP's own exchange; the fastest stays."""

    def __init__(self, sizes: Mapping[str, int], noise: float) -> None:
        self._sizes, self._noise = sizes, noise
        self.arrivals = Arrivals(list(sizes))
        self._passes = 0
        self._candidates: list[ExchangePlan] = []
        self._tried: list[list[float]] = []
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
            self._tried[(self._passes - 1) % len(self._candidates)].append(self.arrivals.elapsed())
        elif self._passes < _SETTLING + _MEASURED:
            return None
        else:
            self._candidates = self._made(groups, exchange, worker)
            self._tried, self._passes = [[] for _ in self._candidates], 0
        if len(self._candidates) > 1 and self._passes < _TRIED * len(self._candidates):
            return self._candidates[self._passes % len(self._candidates)]
        self.is_done = True
        return self._fastest(exchange)

    def _fastest(self, exchange: Exchange) -> ExchangePlan:
        """By the median of what the slowest rank took; plain stays unless one is clearly faster."""
        if len(self._candidates) == 1:
            return self._candidates[0]
        rows = [exchange.numbers(each) for each in self._tried]
        medians = [statistics.median(map(max, zip(*each, strict=True))) for each in rows]
        for plan, median in zip(self._candidates, medians, strict=True):
            if plan.is_plain and min(medians) > _CLEAR * median:
                return plan
        return self._candidates[medians.index(min(medians))]

    def _made(
        self, groups: Sequence[tuple[Names, Tensor]], exchange: Exchange, worker: Worker
    ) -> list[ExchangePlan]:
        """The plan, and DDP's buckets whole; made by the first rank of what all have measured."""
        parts = {
            name: part
            for names, flat in groups
            for name, part in zip(names, flat.split([self._sizes[name] for name in names]), strict=True)
        }
        ways = measured_ways(list(parts.values()), self._noise, exchange, worker)
        squares = [float(parts[name].double().square().sum()) for name in self._sizes]
        rows = exchange.numbers([*self.arrivals.medians(), *squares, float(self.arrivals.repeats)])
        *means, repeats = (statistics.fmean(column) for column in zip(*rows, strict=True))
        numbers = zip(self._sizes.items(), means[: len(squares)], means[len(squares) :], strict=True)
        gradients = [
            Gradient(name=name, numel=numel, ready_seconds=ready, squares=square)
            for (name, numel), ready, square in numbers
        ]
        self.costs = ExchangeCosts(
            ways=ways,
            gradients=tuple(sorted(gradients, key=lambda each: each.ready_seconds)),
            buckets=tuple(names for names, _ in groups),
        )
        found: list[ExchangePlan] = []
        if exchange.rank == 0:
            found = candidates(self.costs, self._noise, takes_single=not repeats)
        text = exchange.first_text(json.dumps([each.to_dict() for each in found]))
        return [ExchangePlan.from_dict(each) for each in json.loads(text)]


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
    return ExchangePlan(
        groups=groups, seconds=plan.seconds, noise=plan.noise, follows_buckets=follows_buckets
    )
