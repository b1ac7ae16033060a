"""An alarm when what is held between steps creeps up."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from squeezebox.reports import human_bytes
from squeezebox.schema import MemoryGrowthWarning

_WINDOW = 16  # steps, of which the least counts: what comes and goes is not growth
_WINDOWS = 5
_LEAST_BYTES = 32 * 2**20
_LEAST_SHARE = 0.05


@dataclass(slots=True)
class Growth:
    """Watches the bytes that a process holds before each step; warns once.

    The alarm is raised when the least of each window of 16 steps is above the one before, over five windows,
    by 32 MiB and a twentieth altogether; it is added to ``notes``.
    """

    notes: dict[str, None]
    _told: bool = False
    _window: list[int] = field(default_factory=list)
    _least: list[int] = field(default_factory=list)

    def observe(self, nbytes: int | None) -> None:
        """Bytes held before a step; None: unknown."""
        if nbytes is None or self._told:
            return
        self._window.append(nbytes)
        if len(self._window) < _WINDOW:
            return
        self._least = [*self._least[1 - _WINDOWS :], min(self._window)]
        self._window.clear()
        first, last = self._least[0], self._least[-1]
        rises = all(earlier < later for earlier, later in zip(self._least, self._least[1:], strict=False))
        if len(self._least) == _WINDOWS and rises and last - first >= max(_LEAST_BYTES, _LEAST_SHARE * first):
            self._alarm(first, last)

    def _alarm(self, first: int, last: int) -> None:
        steps = _WINDOW * (_WINDOWS - 1)
        note = (
            f"memory held between steps grew from {human_bytes(first)} to {human_bytes(last)} in {steps} "
            f"steps, {human_bytes((last - first) / steps)} a step: look for what keeps tensors, such as "
            "losses that are gathered without .item()"
        )
        self.notes[note] = None
        self._told = True
        warnings.warn(note, MemoryGrowthWarning, stacklevel=2)
