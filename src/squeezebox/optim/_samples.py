"""How far updates from packed state are from those that exact state would have made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from squeezebox.memory import flat_in_memory
from squeezebox.optim._single import step_these

_SAMPLED = 256  # elements of a parameter
_KEPT = 0.9  # of the sums before, in each step's


class UpdateNoise:
    """Squared error of updates over their squared norm, over the last ten steps or so."""

    def __init__(self) -> None:
        self._error = self._size = self._past_error = self._past_size = 0.0

    def add(self, error: float, size: float) -> None:
        """Of one parameter in this step."""
        self._error += error
        self._size += size

    def end_step(self) -> None:
        """All parameters are updated."""
        self._past_error = _KEPT * self._past_error + self._error
        self._past_size = _KEPT * self._past_size + self._size
        self._error = self._size = 0.0

    @property
    def value(self) -> float | None:
        """None before the first step, or where nothing moved."""
        return self._past_error / self._past_size if self._past_size > 0.0 else None


class Sample:
    """Some elements of a parameter, which are also updated from exact state of their own."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._numel = parameter.numel()
        self._every = max(1, self._numel // _SAMPLED)
        self._state: dict[str, Any] = {}
        self._values: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []
        self._updated: list[torch.Tensor] = []

    def begin(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Go on from a state that is still exact."""
        self._state = {key: self._own(value, parameter) for key, value in state.items()}

    def _own(self, value: Any, parameter: torch.Tensor) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.shape != parameter.shape:
            return value.clone()
        return flat_in_memory(value, parameter)[:: self._every].clone()

    def take(self, start: int, values: torch.Tensor, gradient: torch.Tensor) -> None:
        """Note those among a piece's elements, which begin at ``start``, before their update."""
        self._values.append(self._of(start, values))
        self._gradients.append(self._of(start, gradient))

    def see(self, start: int, values: torch.Tensor) -> None:
        """Note the same after the update."""
        self._updated.append(self._of(start, values))

    def _of(self, start: int, values: torch.Tensor) -> torch.Tensor:
        return values[-start % self._every :: self._every].clone()

    def compare(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> tuple[float, float]:
        """Squared error and squared norm of the update, of all elements."""
        before = torch.cat(self._values)
        exact = before.clone()
        exact.grad = torch.cat(self._gradients)
        updated = torch.cat(self._updated)
        self._values, self._gradients, self._updated = [], [], []
        if self._state:
            optimizer.state[exact] = self._state
        step_these(optimizer, [exact], group)
        self._state = optimizer.state.pop(exact, {})
        error = (updated - exact).double().square().sum()
        moved = (exact - before).double().square().sum()
        share = self._numel / len(before)
        return share * float(error), share * float(moved)
