"""An optimizer's parameters, which its own step does not see while it has nothing left to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


class Groups:
    """The parameters of an optimizer: their names in the model, and their groups."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._optimizer = optimizer
        self._numbers: dict[int, int] = {}
        self._hidden: list[tuple[dict[str, Any], list[Any]]] = []

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """All of them."""
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def name(self, parameter: torch.nn.Parameter) -> str:
        """For messages."""
        return self._names.get(id(parameter), f"a parameter of shape {tuple(parameter.shape)}")

    def of(self, parameter: torch.nn.Parameter) -> int:
        """The number of a parameter's group."""
        if id(parameter) not in self._numbers:  # added later
            groups = enumerate(self._optimizer.param_groups)
            self._numbers = {id(each): number for number, group in groups for each in group["params"]}
        return self._numbers[id(parameter)]

    def hide(self) -> None:
        """Leave the optimizer no parameters."""
        self.show()
        self._hidden = [(group, group["params"]) for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["params"] = []

    def show(self) -> None:
        """The optimizer's parameters are its own again."""
        for group, parameters in self._hidden:
            group["params"] = parameters
        self._hidden = []
