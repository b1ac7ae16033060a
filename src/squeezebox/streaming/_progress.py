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
    """Predicts the time left: strips cost by their rows, backward ones three times as much."""

    def __init__(self, stages: Sequence[tuple[int, int]], rows: int) -> None:
        self._stages, self._rows = stages, rows
        self._cost = float(sum(weight * rows for weight, _ in stages))
        self._total = sum(-(-rows // height) for _, height in stages)
        self._done, self._spent, self._begun = 0, 0.0, 0.0

    def start(self, position: Position) -> None:
        """Leave out what was done before."""
        for number, (weight, height) in enumerate(self._stages[: position.stage + 1]):
            strips = position.strip if number == position.stage else -(-self._rows // height)
            self._done += strips
            self._cost -= weight * min(strips * height, self._rows)
        self._begun = time.monotonic()

    def tick(self, weight: int, rows: int) -> Progress:
        """After a strip."""
        self._done, self._spent = self._done + 1, self._spent + weight * rows
        seconds = time.monotonic() - self._begun
        left = seconds * max(self._cost - self._spent, 0.0) / self._spent
        return Progress(done=self._done, total=self._total, seconds=seconds, seconds_left=left)
