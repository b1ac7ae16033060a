"""How long capture's own work takes, which a step's seconds are too noisy to tell."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from squeezebox.capture._lineage import Lineage
from squeezebox.capture._recorder import Recorder


class Stopwatch:
    """Seconds spent on holding tensors, and on following how they are made, while :meth:`running`."""

    def __init__(self) -> None:
        self.holding = self.following = 0.0

    @contextlib.contextmanager
    def running(self, recorder: Recorder, lineage: Lineage) -> Iterator[None]:
        """Time this recorder, not yet entered, whose store follows this lineage."""
        watched: tuple[tuple[Any, str, Callable[[float], None], float], ...] = (
            (recorder, "_run", self._hold, 1.0),
            (recorder, "_called", self._hold, -1.0),
            (recorder.hooks, "pack", self._hold, 1.0),
            (lineage, "begin", self._follow, 1.0),
            (lineage, "end", self._follow, 1.0),
        )
        before = [dict(vars(owner)) for owner, *_ in watched]
        for owner, name, add, sign in watched:
            setattr(owner, name, _timed(getattr(owner, name), add, sign))
        try:
            yield
        finally:
            for (owner, name, *_), own in zip(watched, before, strict=True):
                delattr(owner, name)
                if name in own:
                    setattr(owner, name, own[name])

    def _hold(self, seconds: float) -> None:
        self.holding += seconds

    def _follow(self, seconds: float) -> None:
        self.following += seconds


def _timed(work: Callable[..., Any], add: Callable[[float], None], sign: float) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return work(*args, **kwargs)
        finally:
            add(sign * (time.perf_counter() - begun))

    return timed
