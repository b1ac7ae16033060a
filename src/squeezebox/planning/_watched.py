"""When the profiled step reads each frozen weight, and which ones it treats as only memory can be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from squeezebox.capture import Store
from squeezebox.memory import Lender, Loans, movable_weights, move, settle
from squeezebox.optim import SMALL_BYTES
from squeezebox.profiling import StepProfiler
from squeezebox.steps import TrainingStep


@contextlib.contextmanager
def watching(step: TrainingStep, profiler: StepProfiler, store: Store) -> Iterator[set[str]]:
    """Around a step: its frozen weights come into memory as they would from a file, and the profiler sees it.

    Gives the names, once the step is over, of those that must stay in memory.
    """
    weights = movable_weights(step.model, SMALL_BYTES) if step.moves_weights else {}
    fixed: set[str] = set()
    if not weights:
        yield fixed
        return
    store.loans = Loans()
    lenders = {name: _Watched(name, each.data, profiler) for name, each in weights.items()}
    for name, weight in weights.items():
        move(weight, lenders[name], store.loans)
    try:
        yield fixed
    finally:
        for name, weight in weights.items():
            settle(weight)
            weight.data = lenders[name].stand_in
        store.loans.check()
        store.loans = None
    fixed.update(name for name, lender in lenders.items() if lender.is_fixed)


class _Watched(Lender):
    """A weight that stays in memory, of which every reader gets a copy."""

    def __init__(self, name: str, value: torch.Tensor, profiler: StepProfiler) -> None:
        self.name, self.version = name, 0
        self._value, self._profiler = value, profiler
        self.is_fixed = False  # whether it must stay in memory

    @property
    def stand_in(self) -> torch.Tensor:
        """The weight itself."""
        return self._value

    def load(self) -> torch.Tensor:
        """A copy, as a file's reader allocates it."""
        value = self._value
        with self._profiler.lending(self.name):
            flat = torch.empty(value.numel(), dtype=value.dtype, device="cpu")
        copied = flat.as_strided(value.shape, value.stride())
        with torch.no_grad():
            return copied.copy_(value)

    def take(self, value: torch.Tensor) -> None:
        """Noted, and done."""
        self.is_fixed, self._value = True, value

    def refuse(self, name: str) -> Any:
        """Noted, and answered as without."""
        self.is_fixed = True
        return getattr(self._value, name)()

    def lose(self) -> None:
        """Noted."""
        self.is_fixed = True

    def changing(self) -> torch.Tensor:
        """Noted."""
        self.is_fixed = True
        return self._value

    def detached(self) -> torch.Tensor:
        """Noted: an operator on it is one that the profiler does not see."""
        self.is_fixed = True
        return self._value
