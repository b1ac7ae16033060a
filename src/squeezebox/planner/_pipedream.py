"""PipeDream's partition: stages of contiguous blocks, each with its replicas, by dynamic programming."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from squeezebox.schema import Block, Link, OptionError

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
