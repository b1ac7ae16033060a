"""How far a step is, and the time that it still takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from squeezebox.streaming._resume import Position


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a step is: strips of all its passes, and seconds."""

    done: int
    total: int
    seconds: float
    seconds_left: float


class Clock:
    """Predicts the time left: a stage's strips cost the same, backward ones three times as much.

    Args:
        stages: the weight of each, and its strips.
    """

    def __init__(self, stages: Sequence[tuple[int, int]]) -> None:
        self._stages, self._ahead = stages, [strips for _, strips in stages]
        self._spent, self._begun = 0.0, 0.0

    def start(self, position: Position) -> None:
        """Leave out what was done before."""
        for number in range(position.stage + 1):
            self._ahead[number] -= position.strip if number == position.stage else self._ahead[number]
        self._begun = time.monotonic()

    def tick(self, number: int) -> Progress:
        """After a strip of the stage of this number."""
        weight, strips = self._stages[number]
        self._ahead[number] -= 1
        self._spent += weight / strips
        cost = sum(
            weight * ahead / strips for (weight, strips), ahead in zip(self._stages, self._ahead, strict=True)
        )
        total, seconds = sum(strips for _, strips in self._stages), time.monotonic() - self._begun
        return Progress(
            done=total - sum(self._ahead),
            total=total,
            seconds=seconds,
            seconds_left=seconds * cost / self._spent,
        )
