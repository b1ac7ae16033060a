"""How long capture's own work takes, which a step's seconds are too noisy to tell."""

from __future__ import annotations

import time

from squeezebox.capture._onlooker import Onlooker


class Stopwatch:
    """Seconds spent on holding tensors, and on following how they are made, while ``onlooker`` looks on."""

    def __init__(self) -> None:
        self.holding = self.following = self._begun = 0.0

    @property
    def onlooker(self) -> Onlooker:
        """What a store shows its steps to."""
        return Onlooker(holding=self._begin, held=self._hold, following=self._begin, followed=self._follow)

    def _begin(self) -> None:
        self._begun = time.perf_counter()

    def _hold(self) -> None:
        self.holding += time.perf_counter() - self._begun

    def _follow(self) -> None:
        self.following += time.perf_counter() - self._begun
