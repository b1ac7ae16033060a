"""Which tensors are kept in memory, filed, or recomputed: the choice that should take the least time."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch.fx import Node

from squeezebox.streaming._costs import Costs
from squeezebox.streaming._spool import Choice

_WORTH = 0.9  # of a simpler choice's seconds, at most, is worth another: predictions differ by as much
_GAIN = 0.98  # of the seconds before is a single move to take, at most
_DESCENTS = 3  # begin at choices by level
_PLACES = range(3)  # recomputed, kept, filed
_TIME = 0.02  # of the step, and
_LEAST = 0.5  # seconds, that the search may take

NOTHING: Choice = (frozenset(), frozenset())


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """Looks for the cheapest choice; ``nbytes`` are those of every tensor that may be handed on.

    Together ``most_kept`` and ``most_filed`` bytes of them may be in memory and in a file. ``others`` are
    choices to begin at, found where costs were others.
    """

    costs: Costs
    nbytes: Mapping[Node, int]
    most_kept: int
    most_filed: int
    others: tuple[Choice, ...] = ()
    seen: dict[Choice, float] = field(default_factory=dict)

    def cheapest(self) -> Choice:
        """Go on from the best of a few choices, as long as moving or swapping tensors helps."""
        begun, every = time.monotonic(), frozenset(self.nbytes)
        starts = sorted({NOTHING, *self.others, *self._starts()}, key=self.seconds)[:_DESCENTS]
        ended = begun + max(_LEAST, _TIME * self.seconds(starts[0]))
        found = [self._descent(choice, ended) for choice in starts]
        best, none = NOTHING, frozenset[Node]()
        for other in ((every, none), (none, every), min(found, key=self.seconds)):
            best = self._better(best, other, _WORTH)
        return best

    def _better(self, best: Choice, other: Choice, worth: float) -> Choice:
        """The other one, where it takes less than this share of the best one's seconds."""
        return other if self.seconds(other) < worth * self.seconds(best) else best

    def _descent(self, best: Choice, ended: float) -> Choice:
        """Take what is better, until nothing is, or the time is over."""
        nodes, before = sorted(self.nbytes, key=lambda node: -self.nbytes[node]), None
        while best != before:
            before = best
            for moved in [*((node,) for node in nodes), *itertools.combinations(nodes, 2)]:
                other = min(_moves(best, moved), key=self.seconds, default=best)
                best = self._better(best, other, _GAIN)
                if time.monotonic() > ended:
                    return best
        return best

    def seconds(self, choice: Choice) -> float:
        """What a step takes; infinite where it has no room."""
        if choice not in self.seen:
            kept, filed = (sum(map(self.nbytes.__getitem__, nodes)) for nodes in choice)
            has_room = kept <= self.most_kept and filed <= self.most_filed
            self.seen[choice] = self.costs.seconds(choice, kept) if has_room else math.inf
        return self.seen[choice]

    def _starts(self) -> Iterator[Choice]:
        """All from a level on: kept, filed, or kept as long as there is room and filed then."""
        level = self.costs.prepared.streamed.level
        for least in sorted({level[node] for node in self.nbytes}):
            nodes = [node for node in self.nbytes if level[node] >= least]
            kept = self._within(reversed(nodes))
            yield kept, frozenset()
            yield frozenset(), frozenset(nodes)
            yield kept, frozenset(nodes) - kept

    def _within(self, nodes: Iterable[Node]) -> frozenset[Node]:
        """As many of them, in order, as may be in memory."""
        found, total = set[Node](), 0
        for node in nodes:
            if total + self.nbytes[node] <= self.most_kept:
                found.add(node)
                total += self.nbytes[node]
        return frozenset(found)


def _moves(choice: Choice, nodes: tuple[Node, ...]) -> Iterator[Choice]:
    """The choice with one tensor elsewhere, or two in each other's place."""
    places = [_place(choice, node) for node in nodes]
    if len(nodes) == 1:
        yield from (_moved(choice, {nodes[0]: place}) for place in _PLACES if place != places[0])
    elif places[0] != places[1]:
        yield _moved(choice, dict(zip(nodes, reversed(places), strict=True)))


def _place(choice: Choice, node: Node) -> int:
    return 2 if node in choice[1] else int(node in choice[0])


def _moved(choice: Choice, places: Mapping[Node, int]) -> Choice:
    """With these nodes recomputed (0), kept (1) or filed (2)."""
    kept, filed = (
        nodes.difference(places).union(node for node, place in places.items() if place == number)
        for number, nodes in enumerate(choice, 1)
    )
    return kept, filed
