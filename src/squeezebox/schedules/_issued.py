"""The messages of a schedule, in the order in which squeezebox.pipeline's runner issues them."""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from squeezebox.schedules._action import Action, Kind, Schedule
from squeezebox.schedules._issue import Call, Issue, at_once, line_name


def issued(schedule: Schedule, rank: int, batches: int) -> list[Issue]:
    """A rank's messages and waits in the first batches, until all is drained.

    Each message has one tensor, all have gradients, and batches are whole. Where stages have replicas, each
    pair of ranks has a line of its own. What ranks exchange before a step is not among them.
    """
    issuer = _Issuer(schedule, rank)
    for batch in range(batches):
        issuer.begin(batch)
        for action in issuer.until(batch):
            issuer.act(action)
    issuer.drain(batches)
    return issuer.log


@dataclass(slots=True, eq=False)
class _Line:
    """One end of a line: calls that are not waited for, messages not asked for yet, and buffers for them."""

    name: str
    ranks: tuple[int, ...]
    back: bool
    sends: bool
    count: int = 0
    underway: deque[int] = field(default_factory=deque)
    expected: int = 0
    buffers: int = 0


class _Issuer:
    """Does a rank's actions on paper."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        assert schedule.turns is not None
        self._schedule, self._rank = schedule, rank
        self._actions = schedule.turns(rank, 0)
        self._ahead: Action | None = None
        self._in_flight, self._returned = at_once(schedule, Kind.FORWARD), at_once(schedule, Kind.INPUT)
        self._lines: dict[
            tuple[int, int, bool], _Line
        ] = {}  # by stage before, rank at the other end, and way
        self._open: list[_Line] = []  # with what was sent on them, activations first
        self._awaited = Counter[str]()
        self._ended = 0
        self.log: list[Issue] = []

    def until(self, batch: int) -> Iterator[Action]:
        """Actions before the first one of a later batch."""
        while True:
            self._ahead = self._ahead or next(self._actions)
            if self._schedule.batch_of(self._ahead) > batch:
                return
            action, self._ahead = self._ahead, None
            yield action

    def begin(self, batch: int) -> None:
        """Expect all that will come."""
        first = batch * self._schedule.microbatches
        stages = self._schedule.stages_of(self._rank)
        for number, stage in itertools.product(range(first, first + self._schedule.microbatches), stages):
            if self._schedule.rank_of(stage, number) == self._rank and self._comes_from_elsewhere(stage):
                line = self._line(stage - 1, stage - 1, number, back=False)
                line.expected += 1
                self._post(line)

    def drain(self, batches: int) -> None:
        """Finish what is under way, but for updates that nobody waits for."""
        whole = batches * sum(map(self._schedule.updates_of, self._schedule.stages_of(self._rank)))
        while self._ended < whole:
            action = self._ahead or next(self._actions)
            self._ahead = None
            if self._schedule.batch_of(action) < batches:
                self.act(action)
        sent = [line for line in self._open if line.sends]
        for line in sorted(sent, key=lambda each: each.back):
            self._settle(line, 0)

    def act(self, action: Action) -> None:
        """All that an action issues."""
        if action.kind is Kind.UPDATE:
            self._ended += 1
        elif action.kind is Kind.FORWARD:
            self._forward(action.stage, action.microbatch)
        else:
            self._backward(action)

    def _forward(self, stage: int, number: int) -> None:
        if self._comes_from_elsewhere(stage):
            line = self._line(stage - 1, stage - 1, number, back=False)
            if line not in self._open:
                line.buffers = self._of_those(self._in_flight[stage], stage, stage - 1) + 1
                self._open += line, self._line(stage - 1, stage - 1, number, back=True)
            self._receive(line)
        if self._goes_elsewhere(stage):
            line, most = self._line(stage, stage + 1, number, back=False), self._in_flight[stage]
            self._send(line, self._of_those(most, stage, stage + 1))
            self._awaited[line.name] += 1
            gradients = self._line(stage, stage + 1, number, back=True)
            if gradients not in self._open:
                gradients.buffers = self._returned[stage] + 1
                self._open += line, gradients
            gradients.expected += 1
            self._post(gradients)

    def _backward(self, action: Action) -> None:
        stage, number = action.stage, action.microbatch
        if action.kind is not Kind.WEIGHT:
            if self._goes_elsewhere(stage):
                line = self._line(stage, stage + 1, number, back=False)
                self._receive(self._line(stage, stage + 1, number, back=True))
                self._awaited[line.name] -= 1
                self._settle(line, self._awaited[line.name])
            if self._comes_from_elsewhere(stage):
                looped = self._schedule.num_stages > self._schedule.num_ranks
                most = self._in_flight[stage - 1] if looped else 1
                self._send(self._line(stage - 1, stage - 1, number, back=True), most)
        if action.kind is not Kind.INPUT:
            if self._comes_from_elsewhere(stage):
                self._release(self._line(stage - 1, stage - 1, number, back=False))
            if self._goes_elsewhere(stage):
                self._release(self._line(stage, stage + 1, number, back=True))

    def _comes_from_elsewhere(self, stage: int) -> bool:
        return stage > 0 and self._rank not in self._schedule.ranks_of(stage - 1)

    def _goes_elsewhere(self, stage: int) -> bool:
        last = self._schedule.num_stages - 1
        return stage < last and self._rank not in self._schedule.ranks_of(stage + 1)

    def _line(self, boundary: int, stage: int, number: int, *, back: bool) -> _Line:
        """Over a boundary, to or from the rank that has a microbatch at another stage."""
        other = self._schedule.rank_of(stage, number)
        key = boundary, other, back
        if key not in self._lines:
            before, after = (other, self._rank) if stage == boundary else (self._rank, other)
            name, ranks = line_name(boundary, before, after, back), (min(before, after), max(before, after))
            self._lines[key] = _Line(name, ranks, back, sends=(before == self._rank) != back)
        return self._lines[key]

    def _of_those(self, in_flight: int, stage: int, other: int) -> int:
        own, others = (len(self._schedule.ranks_of(each)) for each in (stage, other))
        return -(-in_flight * math.gcd(own, others) // others)

    def _send(self, line: _Line, most: int) -> None:
        self._settle(line, most - 1)
        self._issue(Call.SEND, line)

    def _settle(self, line: _Line, keep: int) -> None:
        while len(line.underway) > keep:
            self._wait(line)

    def _receive(self, line: _Line) -> None:
        self._post(line)
        self._wait(line)

    def _release(self, line: _Line) -> None:
        line.buffers += 1
        self._post(line)

    def _post(self, line: _Line) -> None:
        while line.buffers and line.expected:
            line.buffers, line.expected = line.buffers - 1, line.expected - 1
            self._issue(Call.RECEIVE, line)

    def _issue(self, call: Call, line: _Line) -> None:
        self.log.append(Issue(call=call, line=line.name, number=line.count, ranks=line.ranks))
        line.underway.append(line.count)
        line.count += 1

    def _wait(self, line: _Line) -> None:
        number = line.underway.popleft()
        self.log.append(Issue(call=Call.WAIT, line=line.name, number=number, ranks=line.ranks))
