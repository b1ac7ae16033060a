"""Offsets by a search under falling capacities: exact where it ends in time."""

# mypy: allow-untyped-calls

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from squeezebox.memory import _search_loops as loops
from squeezebox.memory._problem import Integers, Problem, Relation, all_cliques, lower_bound, overlaps
from squeezebox.memory._somas import placed_around, somas

_LARGEST = 2000  # buffers; the search's tables are quadratic
_SLICE = 1000  # nodes between looks at the clock
_TURNS = 5  # capacities a round, next to the lower bound itself
_GOLDEN = (5**0.5 - 1) / 2  # its multiples, less their whole parts, fill the line evenly


def search(problem: Problem, seconds: float = 2.0) -> Integers:
    """Offsets by the heuristics of SOMAS, then by a search for better ones while there is hope and time.

    Capacities between the lower bound and the best height so far are tried in turn, each with three orders
    of preference and a number of nodes that doubles from round to round. A capacity within which there
    is nothing raises the bound; where the two meet, the search ends with an optimum.

    Args:
        problem: what is to be placed. Of more than 2,000 buffers the largest are searched, and the others
            placed around them one by one.
        seconds: what the search may take on top of the heuristics.
    """
    best = somas(problem)
    height, floor = _height(problem, best), problem.lower_bound
    if height == floor:
        return best
    if len(best) > _LARGEST:
        return min(best, _around_largest(problem, seconds), key=lambda each: _height(problem, each))
    cliques = all_cliques(problem)
    orders = _orders(problem, cliques)
    cases = [_case(problem, cliques, order) for order in orders]
    loops.fit(cases[0], loops.begin(len(best)), floor, 0, 0)  # the first call on a machine compiles for long
    end = time.monotonic() + seconds
    for share, limit, which in _attempts(len(best), len(orders)):
        if height <= floor or time.monotonic() >= end:
            break
        capacity = floor + round((height - 1 - floor) * share)
        state = loops.begin(len(best))
        answer = _fit(cases[which], state, capacity, limit, end)
        if answer == loops.FOUND:
            best[orders[which]] = state.offsets
            height = _height(problem, best)
        elif answer == loops.IMPOSSIBLE:
            floor = capacity + 1
    return best


def _around_largest(problem: Problem, seconds: float) -> Integers:
    order = np.argsort(-problem.sizes, kind="stable")
    largest = order[:_LARGEST]
    conflicts = problem.conflicts[np.ix_(largest, largest)]
    sizes, lower, upper = (each[largest] for each in (problem.sizes, problem.lower, problem.upper))
    bound = lower_bound(sizes, lower, upper, conflicts)
    part = Problem(sizes=sizes, lower=lower, upper=upper, conflicts=conflicts, lower_bound=bound)
    return placed_around(search(part, seconds), order, problem)


def _fit(case: loops.Case, state: loops.State, capacity: int, limit: int, end: float) -> int:
    """``loops.fit``, with a look at the clock now and then."""
    answer, depth = loops.UNKNOWN, 0
    for seen in range(0, limit, _SLICE):
        answer, depth = loops.fit(case, state, capacity, min(_SLICE, limit - seen), depth)
        if answer != loops.UNKNOWN or time.monotonic() >= end:
            break
    return answer


def _attempts(count: int, orders: int) -> Iterator[tuple[float, int, int]]:
    """Shares of the way from what cannot be undercut to the best, limits of nodes, and orders, without end.

    Which capacity a search finds its way under is a matter of luck, so no share comes twice but 0.
    """
    limit, turn = 2 * count, 0
    while True:
        shares = [(turn + each) * _GOLDEN % 1.0 for each in range(1, _TURNS + 1)]
        for share in (0.0, *shares):
            for which in range(orders):
                yield share, limit, which
        limit, turn = 2 * limit, turn + _TURNS


def _height(problem: Problem, offsets: Integers) -> int:
    return int((offsets + problem.sizes).max(initial=0))


def _orders(problem: Problem, cliques: Relation) -> list[Integers]:
    """MiniMalloc's: by time, by size times time, and by the size of the largest clique, in three orders."""
    totals = np.where(cliques, (cliques @ problem.sizes)[:, None], 0).max(0)
    times = problem.upper - problem.lower
    areas = times.astype(np.float64) * problem.sizes
    return [
        np.lexsort([-key for key in reversed(keys)])
        for keys in ((times, areas, totals), (totals, areas, times), (totals, times, areas))
    ]


def _case(problem: Problem, cliques: Relation, order: Integers) -> loops.Case:
    """The problem with its buffers in that order."""
    conflicts = problem.conflicts[np.ix_(order, order)]
    lower, upper = problem.lower[order], problem.upper[order]
    if (conflicts & ~overlaps(lower, upper)).any():  # then times do not tell what falls apart
        lower, upper = np.zeros_like(lower), np.ones_like(upper)
    neighbour_starts, neighbours = _lists(conflicts)
    clique_starts, members = _lists(cliques[:, order].T)
    return loops.Case(
        sizes=problem.sizes[order],
        lower=lower,
        upper=upper,
        by_lower=np.argsort(lower, kind="stable"),
        neighbour_starts=neighbour_starts,
        neighbours=neighbours,
        clique_starts=clique_starts,
        cliques=members,
        tops=np.zeros(len(cliques), np.int64),
    )


def _lists(relation: Relation) -> tuple[Integers, Integers]:
    """Where each row's list starts, and what is true in the rows, one after the other."""
    return np.concatenate(([0], np.cumsum(relation.sum(1)))), np.nonzero(relation)[1]
