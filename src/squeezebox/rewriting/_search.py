"""Which rewrites lower the peak of a step: a beam over sets of them, each estimated as a whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

WIDTH = 4
PAYS = 0.002  # of the peak, or else of what is saved, is worth another rounding
SLACK = 0.05  # of the best peak: a set may be that much worse, and lead to a better one

Cost = tuple[int, int]  # bytes of the peak, and of what is saved


@dataclass(frozen=True, slots=True)
class Found:
    """The best set, in the order in which its members joined, with the peak before and after each."""

    members: tuple[str, ...]
    costs: tuple[Cost, ...]  # one more than members

    @property
    def peak_bytes(self) -> int:
        """With all of them."""
        return self.costs[-1][0]


def best(candidates: Iterable[str], cost: Callable[[frozenset[str]], Cost]) -> Found:
    """The set of lowest cost that a beam of :data:`WIDTH` finds.

    A step adds one candidate to each set of the beam. Those within :data:`SLACK` of the best peak so far stay
    in, although they may be worse than what they came from; two steps without a new best end the search. A
    member that pays less than :data:`PAYS` is left out in the end. (Tolerance for a temporary loss is
    what He et al., "X-RLflow: graph reinforcement learning for neural network subgraphs transformation",
    2023, found missing in greedy searches; they learn a policy where this keeps a beam.)
    A TimeoutError of ``cost`` ends the search with the best so far, and is raised where there is none.
    """
    names, known = list(candidates), dict[frozenset[str], Cost]()

    def priced(members: tuple[str, ...]) -> Cost:
        key = frozenset(members)
        if key not in known:
            known[key] = cost(key)
        return known[key]

    def joined(members: tuple[str, ...]) -> Found:
        return Found(members, tuple(priced(members[:count]) for count in range(len(members) + 1)))

    beam: list[tuple[str, ...]] = [()]
    winner: tuple[str, ...] = ()
    idle = 0
    with contextlib.suppress(TimeoutError):
        while beam and idle < 2:
            longer = [(*each, name) for each in beam for name in names if name not in each]
            steps = {frozenset(each): each for each in longer}
            ranked = sorted(steps.values(), key=priced)
            idle = 0 if ranked and priced(ranked[0]) < priced(winner) else idle + 1
            winner = min([winner, *ranked[:1]], key=priced)
            limit = (1 + SLACK) * priced(winner)[0]
            beam = [each for each in ranked[:WIDTH] if priced(each)[0] <= limit]
        kept = winner
        for name in winner:
            others = tuple(each for each in kept if each != name)
            if not _pays(priced(others), priced(kept)):
                kept = others
        return joined(kept)
    return joined(winner)


def _pays(before: Cost, after: Cost) -> bool:
    """Whether a peak falls far enough, or one that stays holds far less."""
    (peak, saved), (lower_peak, lower_saved) = before, after
    if peak - lower_peak > PAYS * peak:
        return True
    return lower_peak <= peak and saved - lower_saved > PAYS * saved
