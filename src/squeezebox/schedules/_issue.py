"""In which order ranks issue their messages, and whether communicators that block can carry them out."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from squeezebox.schedules._action import Kind, Schedule


class Call(Enum):
    """What a rank asks of a communicator, or waits for."""

    SEND = "sends"
    RECEIVE = "receives"
    TOGETHER = "calls a collective"
    WAIT = "waits"


@dataclass(frozen=True, kw_only=True, slots=True)
class Issue:
    """One call, in the order in which a rank makes them.

    ``line`` names a communicator, ``ranks`` are those in it. Of a wait, ``number`` says which of this rank's
    earlier calls on that line it is for; of others, it counts these from 0. ``what`` is carried, in words
    that must be the same at both ends. ``thread`` is 0 for the one that does a rank's actions.
    """

    call: Call
    line: str
    number: int
    ranks: tuple[int, ...]
    what: str = ""
    thread: int = 0

    def __str__(self) -> str:
        named = f"{self.what} on {self.line}" if self.what else self.line
        return f"{self.call.value} {'for ' * (self.call is Call.WAIT)}{named}"


def line_name(boundary: int, before: int, after: int, back: bool) -> str:
    """Of the communicator for one direction over a boundary, between two ranks."""
    return f"boundary {boundary}, ranks {before} and {after}, {'backward' if back else 'forward'}"


def find_deadlock(logs: Sequence[Sequence[Issue]]) -> str:
    """What keeps ranks from the end of their logs if communicators block; "" if nothing does.

    The rules are NCCL's. Calls on a communicator run in the order in which a rank issues them, each blocking
    those behind it. A send runs with the receive that is first at the other rank, whatever tags say, and a
    collective when it is first at all ranks of the communicator. A wait keeps its rank from issuing more
    until the call has run. A second thread's calls come in no order, so they are refused.
    """
    lines = _Lines(logs)
    for rank, log in enumerate(logs):
        for place, issue in enumerate(log):
            if issue.thread:
                return f"rank {rank} {issue}, as its call {place}, from a second thread: in no order"
    done, moved = [0] * len(logs), True
    while moved:
        moved = False
        for rank, log in enumerate(logs):
            while done[rank] < len(log) and not lines.blocks(rank, log[done[rank]]):
                lines.issue(rank, log[done[rank]])
                done[rank] += 1
                moved = True
        problem = lines.run()
        if problem:
            return problem
    stuck = [
        f"rank {rank} {log[place]}, as its call {place}, behind {lines.first(rank, log[place].line)}"
        for rank, (log, place) in enumerate(zip(logs, done, strict=True))
        if place < len(log)
    ]
    return "; ".join(stuck) or lines.left()


class _Lines:
    """Calls that were issued and have not run, by communicator and rank."""

    def __init__(self, logs: Sequence[Sequence[Issue]]) -> None:
        self._waiting: dict[str, dict[int, deque[Issue]]] = defaultdict(lambda: defaultdict(deque))
        self._run = Counter[tuple[str, int]]()
        self._touched: set[str] = set()

    def blocks(self, rank: int, issue: Issue) -> bool:
        """Whether it is a wait for what has not run."""
        return issue.call is Call.WAIT and self._run[issue.line, rank] <= issue.number

    def issue(self, rank: int, issue: Issue) -> None:
        if issue.call is not Call.WAIT:
            self._waiting[issue.line][rank].append(issue)
            self._touched.add(issue.line)

    def run(self) -> str:
        """Run all that is first at all of its ranks; why two that meet cannot, else ""."""
        for line in self._touched:
            queues = self._waiting[line]
            while pair := self._ready(queues):
                calls = {rank: queues[rank][0] for rank in pair}
                if len({issue.what for issue in calls.values()}) > 1 or not _fit(calls.values()):
                    return ", and ".join(f"rank {rank} {issue}" for rank, issue in calls.items())
                for rank in pair:
                    queues[rank].popleft()
                    self._run[line, rank] += 1
        self._touched.clear()
        return ""

    def _ready(self, queues: dict[int, deque[Issue]]) -> tuple[int, ...]:
        """Ranks whose first calls are for one another."""
        for queue in [*queues.values()]:
            if queue and all(
                queues[rank] and queues[rank][0].ranks == queue[0].ranks for rank in queue[0].ranks
            ):
                return queue[0].ranks
        return ()

    def first(self, rank: int, line: str) -> str:
        """What is to run first on a rank's line, and what that is to run with."""
        queue = self._waiting[line][rank]
        if not queue:
            return "nothing that was issued"
        others = [
            f"rank {other} {'has issued nothing there' if not theirs else theirs[0]}"
            for other, theirs in (
                (each, self._waiting[line][each]) for each in queue[0].ranks if each != rank
            )
        ]
        return f"'{queue[0]}', for which {' and '.join(others)}"

    def left(self) -> str:
        """What was issued, and never waited for, and cannot run."""
        return "; ".join(
            f"rank {rank} {queue[0]}, and nobody takes part"
            for queues in self._waiting.values()
            for rank, queue in queues.items()
            if queue
        )


def _fit(issues: Iterable[Issue]) -> bool:
    """Whether they are a send and a receive, or collectives."""
    calls = [issue.call for issue in issues]
    return {*calls} == {Call.TOGETHER} or (len(calls) == 2 and {*calls} == {Call.SEND, Call.RECEIVE})


def at_once(schedule: Schedule, first: Kind) -> list[int]:
    """Of each stage, the most microbatches between this action and the end of backward, at least one."""
    most = [1] * schedule.num_stages
    now = [0] * schedule.num_stages
    for order in schedule.orders:
        for action in order:
            now[action.stage] += action.kind is first
            most[action.stage] = max(most[action.stage], now[action.stage])
            # Whole backwards leave nothing between their two parts, so they end only what a forward began.
            if action.kind is Kind.WEIGHT or (action.kind is Kind.BACKWARD and first is Kind.FORWARD):
                now[action.stage] -= 1
    return most
