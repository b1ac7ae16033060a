"""Which of several choices to go on with, by the seconds of steps: links and disks change their speed."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

_WINDOW = 5  # steps whose median is the level of the choice that is in force,
_TRIAL = 3  # and of one that is tried, after a first step that may take longer
_LESS = 0.95  # of the other's level, below which a choice takes its place
_MORE = 1.1  # of a choice's own level, above which something has changed
_FAR = 1.3  # of the other's level, above which a trial ends at once
_SOONEST, _LATEST = 20, 160  # steps between two trials of a choice that is about as good
_SHARE = 0.02  # of all seconds, that trials without an occasion may lose


class Balance:
    """Takes the seconds that each step took, and says which choice is the next one's.

    A choice stays in force until another one is faster by more than 5 %, as seen in a trial of a few steps.
    A trial has an occasion where steps have become slower than another choice is known to be. Others come
    so rarely that they lose about 2 % of the time; they notice a link that has recovered.

    Args:
        expected: seconds of a step by choice, as planned; at least one.
        first: the choice to begin with; None for the one that is expected to be the fastest.
        loads: what each choice puts on what may change its speed, such as bytes on a link. Where the choice
            in force becomes slower or faster, others are taken to do so in proportion; None for not at all.
    """

    def __init__(
        self, expected: Sequence[float], first: int | None = None, loads: Sequence[float] | None = None
    ) -> None:
        self._loads = loads
        self._levels = list(expected)
        self.choice = self._levels.index(min(self._levels)) if first is None else first
        self._kept = self.choice  # in force; another one is on trial
        self._seen: deque[float] = deque(maxlen=_WINDOW)
        self._is_first = True  # of a choice's steps in a row
        self._calm = 0.0  # the level that is no occasion
        self._anchor = 0.0  # the level that others' levels belong to
        self._step = 0
        self._tried = [-_LATEST] * len(self._levels)  # the step of a choice's last trial,
        self._waits = [_SOONEST] * len(self._levels)  # and how long it is not tried if it is about as good

    def note(self, seconds: float) -> int:
        """A step under the choice took so long; returns the choice for the next one."""
        self._step += 1
        on_trial, known = self.choice != self._kept, self._levels[self.choice]
        if (
            on_trial
            and seconds > _FAR * self._levels[self._kept]
            and not (self._is_first and seconds < known / _FAR)
        ):
            self._fail(min(seconds, known) if self._is_first else seconds)
        elif self._is_first:
            self._is_first = False
        else:
            self._seen.append(seconds)
            if on_trial and len(self._seen) == _TRIAL:
                self._judge(statistics.median(self._seen))
            elif len(self._seen) == _WINDOW:
                self._consider(statistics.median(self._seen))
        return self.choice

    def _judge(self, level: float) -> None:
        if level >= _LESS * self._levels[self._kept]:
            self._fail(level)
            return
        self._tried[self._kept] = self._step
        self._kept, self._calm, self._levels[self.choice] = self.choice, level, level
        self._anchor = level

    def _fail(self, level: float) -> None:
        """The choice on trial is not the better one."""
        self._levels[self.choice] = level
        self._waits[self.choice] = min(2 * self._waits[self.choice], _LATEST)
        self._take(self._kept)

    def _consider(self, level: float) -> None:
        """Whether another choice is worth a trial."""
        if not self._calm:  # what was planned is right up to a factor
            self._levels = [each * level / self._levels[self._kept] for each in self._levels]
            self._calm = self._anchor = level
        self._levels[self._kept], self._calm = level, min(self._calm, level)
        others = [each for each in range(len(self._levels)) if each != self._kept]
        if self._loads is not None and abs(level - self._anchor) > (_MORE - 1.0) * self._anchor:
            for each in others:
                moved = (level - self._anchor) * self._loads[each] / self._loads[self._kept]
                self._levels[each] = max(self._levels[each] + moved, 0.0)
            self._anchor = level
        better = [each for each in others if self._levels[each] < _LESS * level]
        if level > _MORE * self._calm and better:
            soonest = _SOONEST if level < _FAR * self._calm else 0
            due = [each for each in better if self._step - self._tried[each] >= soonest]
        else:
            due = [each for each in others if self._step - self._tried[each] >= self._wait(each)]
        if level > _MORE * self._calm and not better:
            self._calm = level
        if due:
            self._take(min(due, key=lambda each: self._levels[each]))
            self._tried[self.choice] = self._step

    def _wait(self, other: int) -> float:
        """Steps until a trial without an occasion."""
        worse = self._levels[other] / self._levels[self._kept] - 1.0
        return self._waits[other] if worse < _FAR - 1.0 else max(worse / _SHARE, _SOONEST)

    def _take(self, choice: int) -> None:
        self.choice, self._is_first = choice, True
        self._seen.clear()
