"""Which gradients go together, and how: the least time within a noise budget (Cupcake, MLSys 2023).

Backward makes gradients one after the other. A group packs once its last gradient is there, and backward
waits meanwhile. Then it takes the link, in order, as soon as that is free. What an exchange takes of the
processor holds up backward, too. So with ``n`` groups::

    packed_k = ready of its last gradient + seconds of packing groups 1..k, and busy ones of 1..k-1
    end_k = max(end_(k-1), packed_k) + exchange_k + unpack_k

The plan has the least ``end_n``. Cupcake's recursion has one way for all; here every group chooses one.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

_Array = NDArray[np.float64]
_BEAM = 8  # labels a boundary of the first, rough search
_WORK = 40_000_000  # that the exact one may take: boundaries squared, times ways and labels
_CROWD = 20  # candidates for each label of a boundary
_RATES = (0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.7, 2.5, 5.0)  # times the sharpest rate of seconds for noise


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Seconds of a call: some for the call itself, and some for each element."""

    fixed: float
    each: float

    def at(self, numel: float) -> float:
        """Seconds for as many elements."""
        return self.fixed + self.each * numel


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way for a group to go, as measured.

    ``pack`` holds up backward; ``exchange`` and ``unpack`` hold the link, of which ``busy`` seconds hold up
    backward, too. ``noise`` is the squared error over the squared gradient. ``name`` is the method's, and
    ``level`` its setting. An element takes ``nbytes`` on the link.
    """

    name: str
    level: float
    pack: Line
    exchange: Line
    unpack: Line
    noise: float
    busy: Line = Line(fixed=0.0, each=0.0)
    nbytes: float = 4.0

    def slower(self, seconds: float) -> Way:
        """The same over a link on which a byte takes these ``seconds`` more."""
        each = max(self.exchange.each + self.nbytes * seconds, 0.0)
        return replace(self, exchange=replace(self.exchange, each=each))


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradient:
    """One of a parameter: elements, seconds until backward has it, and its squared norm."""

    name: str
    numel: int
    ready_seconds: float
    squares: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Gradients ``first`` up to ``end`` go together, in this way."""

    first: int
    end: int
    way: Way


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionPlan:
    """Groups in order, seconds until the last is there, and noise of all of them together.

    No plan takes less than ``least_seconds``, where those are proven.
    """

    groups: tuple[Group, ...]
    seconds: float
    noise: float
    least_seconds: float = 0.0


def evaluate_fusion(gradients: Sequence[Gradient], groups: Sequence[Group]) -> FusionPlan:
    """What these groups take, by the schedule above."""
    packed = end = lost = 0.0
    for group in groups:
        members = gradients[group.first : group.end]
        numel = sum(each.numel for each in members)
        packed += group.way.pack.at(numel)
        begun = max(end, members[-1].ready_seconds + packed)
        end = begun + group.way.exchange.at(numel) + group.way.unpack.at(numel)
        packed += group.way.busy.at(numel)
        lost += group.way.noise * sum(each.squares for each in members)
    total = sum(each.squares for each in gradients)
    return FusionPlan(groups=tuple(groups), seconds=end, noise=lost / total if total else 0.0)


def plan_fusion(
    gradients: Sequence[Gradient], ways: Sequence[Way], noise: float, tolerance: float = 0.0
) -> FusionPlan:
    """The groups and ways that end first, of all that keep to the noise.

    A dynamic program over boundaries. Its labels hold seconds of packing, the link's end and the noise; one
    that is no better in any of the three goes. So does one that cannot end before the best known, by
    Lagrange's bound for the noise. The result is the optimum, unless a boundary has thousands of labels; then
    ``least_seconds`` tells how far off it may be.

    Args:
        gradients: at least one, in backward's order: their ``ready_seconds`` never fall.
        ways: of which one has a noise of at most ``noise``.
        noise: squared error over the squared gradient that the whole may have.
        tolerance: share of the seconds by which the optimum may be missed, which makes it much faster.

    Raises:
        ValueError: there is no gradient, or no way that keeps to the noise.
    """
    if not gradients:
        raise ValueError("there is no gradient to plan for; give at least one.")
    fitting = [way for way in ways if way.noise <= noise]
    if not fitting:
        raise ValueError(f"no way has a noise of at most {noise}; add one that loses nothing.")
    search = _Search(gradients, ways, noise)
    rough, _ = search.run(np.inf, _BEAM)
    whole = [evaluate_fusion(gradients, [Group(first=0, end=len(gradients), way=way)]) for way in fitting]
    best = min([*whole, *([rough] if rough else [])], key=lambda plan: (plan.seconds, plan.noise))
    wanted = best.seconds * (1.0 - tolerance)
    if search.least_seconds >= wanted:
        return replace(best, least_seconds=search.least_seconds)
    found, dropped = search.run(wanted, max(_BEAM, _WORK // (len(gradients) ** 2 * len(ways))))
    if found is not None and found.seconds < best.seconds:
        best, wanted = found, found.seconds
    return replace(best, least_seconds=max(search.least_seconds, min(wanted, dropped)))


@dataclass(slots=True)
class _Labels:
    """Partial plans, one an entry: seconds packed, the link's end, what is lost; where from, and how."""

    packed: _Array
    end: _Array
    lost: _Array
    boundary: NDArray[np.int64]
    before: NDArray[np.int64]
    way: NDArray[np.int64]

    def add(self, other: _Labels) -> None:
        for name in _Labels.__slots__:
            setattr(self, name, np.concatenate([getattr(self, name), getattr(other, name)]))


class _Search:
    """One program: what all of its runs share."""

    def __init__(self, gradients: Sequence[Gradient], ways: Sequence[Way], noise: float) -> None:
        self.gradients, self.ways = gradients, ways
        self._numels = np.array([0, *itertools.accumulate(each.numel for each in gradients)], dtype=float)
        self._squares = np.array([0, *itertools.accumulate(each.squares for each in gradients)], dtype=float)
        self._allowed = noise * self._squares[-1] * (1 + 1e-12)
        self._pack = _lines(each.pack for each in ways)
        self._send = _lines(each.exchange for each in ways) + _lines(each.unpack for each in ways)
        self._busy = _lines(each.busy for each in ways)
        self._noise = np.array([each.noise for each in ways])
        self._rates, self._rests, self._waits = self._bounds()
        bounds = np.maximum(self._rests[0], self._waits[0]) - self._rates * self._allowed
        self.least_seconds = float(bounds.max()) * (1 - 1e-12)

    def run(self, best: float, beam: int) -> tuple[FusionPlan | None, float]:
        """The first to end up to ``best``, if any; and what plans take at least that the beam left out."""
        zero, none = np.zeros(1), np.zeros(1, dtype=np.int64)
        known = _Labels(zero, zero.copy(), zero.copy(), none, none - 1, none)
        count, dropped = len(self.gradients), np.inf
        for boundary in range(1, count + 1):
            found, least = self._labels(known, boundary, best, beam)
            known.add(found)
            dropped = min(dropped, least)
        ends = np.flatnonzero(known.boundary == count)
        if not ends.size:
            return None, dropped
        place = int(ends[np.lexsort((known.lost[ends], known.end[ends]))[0]])
        groups: list[Group] = []
        while known.before[place] >= 0:
            before = int(known.before[place])
            way = self.ways[int(known.way[place])]
            groups.append(Group(first=int(known.boundary[before]), end=int(known.boundary[place]), way=way))
            place = before
        return evaluate_fusion(self.gradients, groups[::-1]), dropped

    def _labels(self, known: _Labels, boundary: int, best: float, beam: int) -> tuple[_Labels, float]:
        """All that are worth keeping at a boundary; and the least seconds of those dropped for the beam."""
        numel = (self._numels[boundary] - self._numels[known.boundary])[:, None]
        packed = known.packed[:, None] + self._pack[0] + self._pack[1] * numel
        ready = self.gradients[boundary - 1].ready_seconds
        end = np.maximum(known.end[:, None], ready + packed) + self._send[0] + self._send[1] * numel
        packed = packed + self._busy[0] + self._busy[1] * numel
        squares = (self._squares[boundary] - self._squares[known.boundary])[:, None]
        lost = known.lost[:, None] + self._noise * squares
        places = np.flatnonzero(lost <= self._allowed)
        packed, end, lost = (each.ravel()[places] for each in (packed, end, lost))
        least = self._least(packed, end, lost, boundary)
        kept, crowd = _first(least, np.flatnonzero(least <= best), _CROWD * beam)
        kept, few = _first(least, kept[_undominated(packed[kept], end[kept], lost[kept])], beam)
        before, way = np.divmod(places[kept], len(self.ways))
        found = _Labels(packed[kept], end[kept], lost[kept], np.full(kept.size, boundary), before, way)
        return found, min(crowd, few)

    def _bounds(self) -> tuple[_Array, _Array, _Array]:
        """Rates of seconds for noise, and what gradients from each boundary on cost at least at each.

        Lagrange's bound: the link never idles. Second, the same with backward's seconds before it.
        """
        scale = float(self._send[1].max() * self._numels[-1]) / max(self._allowed, 1e-300)
        tried = np.array([0.0, *np.geomspace(1e-6, 1e3, 37)]) * (scale if np.isfinite(scale) else 0.0)
        sharpest = tried[np.argmax(self._rests_at(tried)[0] - tried * self._allowed)]
        rates = np.array([0.0, *(sharpest * np.array(_RATES))])
        rests = self._rests_at(rates)
        ready = np.array([each.ready_seconds for each in self.gradients])[:, None] + rests[:-1]
        waits = np.maximum.accumulate(ready[::-1])[::-1]
        return rates, rests, waits

    def _rests_at(self, rates: _Array) -> _Array:
        """By boundary and rate: a way goes on for nothing, and another one takes its fixed seconds."""
        numels, squares = np.diff(self._numels), np.diff(self._squares)
        rests = np.zeros((len(numels) + 1, len(rates)))
        goes_on = np.zeros((len(rates), len(self.ways)))  # seconds of the rest, by the way before it
        for place in range(len(numels) - 1, -1, -1):
            cost = self._send[1] * numels[place] + np.outer(rates, self._noise * squares[place])
            chosen = cost + goes_on
            rests[place] = (chosen + self._send[0]).min(axis=1)
            goes_on = np.minimum(chosen, rests[place][:, None])
        return rests

    def _least(self, packed: _Array, end: _Array, lost: _Array, boundary: int) -> _Array:
        """What the whole takes at least: the link's work, or backward's and what the link has after it."""
        if boundary == len(self.gradients):
            return end
        least = np.full_like(end, -np.inf)
        for rate, rest, wait in zip(self._rates, self._rests[boundary], self._waits[boundary], strict=True):
            seconds = np.maximum(end + rest, packed + wait)
            np.maximum(least, seconds - rate * (self._allowed - lost), out=least)
        return least * (1 - 1e-12)


def _lines(lines: Iterable[Line]) -> _Array:
    """Fixed seconds in the first row, those of an element in the second."""
    found: _Array = np.array([(each.fixed, each.each) for each in lines]).T
    return found


def _first(values: _Array, places: NDArray[np.int64], most: int) -> tuple[NDArray[np.int64], float]:
    """Of these places up to ``most``, those of the smallest values; and the smallest value left out."""
    if places.size <= most:
        return places, np.inf
    order = np.argpartition(values[places], most)
    return places[order[:most]], float(values[places[order[most]]])


def _undominated(*columns: _Array) -> NDArray[np.int64]:
    """Places of packed, end and lost than which no other is as good in all three."""
    order = np.lexsort((columns[2], columns[0], columns[1]))
    packed, lost = columns[0][order].tolist(), columns[2][order].tolist()
    edge_packed: list[float] = []  # of those kept, the edge: packed rises, lost falls
    edge_lost: list[float] = []
    kept = []
    for place, x, y in zip(order.tolist(), packed, lost, strict=True):
        after = bisect_right(edge_packed, x)
        if after and edge_lost[after - 1] <= y:
            continue
        kept.append(place)
        first = bisect_left(edge_packed, x)
        stop = first
        while stop < len(edge_lost) and edge_lost[stop] >= y:
            stop += 1
        edge_packed[first:stop], edge_lost[first:stop] = [x], [y]
    return np.array(kept, dtype=np.int64)
