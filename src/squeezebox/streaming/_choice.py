"""Which tensors are kept in memory, filed, or recomputed: the choice that should take the least time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch.fx import Node

from squeezebox.streaming._costs import Costs
from squeezebox.streaming._spool import Choice

_WORTH = 0.98  # of the seconds before, at most, is worth another choice: what is measured differs by as much
_SWEEPS = 3  # over all tensors
_TIME = 0.05  # of the step, and
_LEAST = 0.3  # seconds, that the search may take

NOTHING: Choice = (frozenset(), frozenset())


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """Looks for the cheapest choice; ``nbytes`` are those of every tensor that may be handed on.

    Together ``most_kept`` and ``most_filed`` bytes of them may be in memory and in a file.
    """

    costs: Costs
    nbytes: Mapping[Node, int]
    most_kept: int
    most_filed: int
    seen: dict[Choice, float] = field(default_factory=dict)

    def cheapest(self) -> Choice:
        """Start from the best of a few choices by level, then move one tensor at a time."""
        begun, best = time.monotonic(), NOTHING
        for choice in self._starts():
            best = self._better(best, choice)
        for _ in range(_SWEEPS):
            before = best
            for node in sorted(self.nbytes, key=lambda node: -self.nbytes[node]):
                for choice in _moves(best, node):
                    best = self._better(best, choice)
                if time.monotonic() - begun > max(_LEAST, _TIME * self.seconds(best)):
                    return best
            if best == before:
                break
        return best

    def seconds(self, choice: Choice) -> float:
        """What a step takes; infinite where it has no room."""
        if choice not in self.seen:
            kept, filed = (sum(map(self.nbytes.__getitem__, nodes)) for nodes in choice)
            has_room = kept <= self.most_kept and filed <= self.most_filed
            self.seen[choice] = self.costs.seconds(choice, kept) if has_room else math.inf
        return self.seen[choice]

    def _better(self, best: Choice, other: Choice) -> Choice:
        """The other one, if that is worth it."""
        return other if self.seconds(other) < _WORTH * self.seconds(best) else best

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


def _moves(choice: Choice, node: Node) -> Iterator[Choice]:
    """The choice with one tensor elsewhere."""
    kept, filed = (nodes - {node} for nodes in choice)
    for other in ((kept | {node}, filed), (kept, filed | {node}), (kept, filed)):
        if other != choice:
            yield other
