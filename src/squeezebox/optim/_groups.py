"""Some of an optimizer's parameters at a time, and what stands for gradients that are used up."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from squeezebox.memory import Absent
from squeezebox.schema import CaptureError, OptionError


class SpentGradient(Absent):
    """The gradient of a parameter that was updated in backward: what asks for it is refused by name."""

    def __init__(self, like: torch.Tensor, name: str) -> None:
        self.parameter = name

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        first = args[0]
        spent = next(
            each
            for each in (*(first if isinstance(first, (list, tuple)) else ()), *args)
            if isinstance(each, SpentGradient)
        )
        if func is torch.ops.aten.detach.default:
            return spent
        raise CaptureError(
            f"{func} asks for the gradient of '{spent.parameter}', which backward used up: under this plan "
            "it updates every parameter as soon as its gradient is there. Clipping, GradScaler, an average "
            "over ranks, gradients that add up and zero_grad(set_to_none=False) need it. Make an eager plan "
            "with clip=True where you clip or scale, or accumulate= where you add up; or leave states=True "
            "out. Begin from saved weights: these have been updated."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None


# Those of torch.optim whose step treats every parameter by itself, and whose needs profiling knows.
_ONE_BY_ONE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad")


def refuse_unknown(optimizer: object) -> None:
    """OptionError for an optimizer that cannot be stepped parameter by parameter with the same result."""
    kind: Any = type(optimizer)
    step = inspect.unwrap(kind.step)
    known = step.__module__.startswith("torch.optim.") and step.__qualname__.split(".")[0] in _ONE_BY_ONE
    if known and not any(group.get("differentiable") for group in getattr(optimizer, "param_groups", ())):
        return
    raise OptionError(
        f"states=True steps an optimizer parameter by parameter, and {kind.__name__} is not known to give "
        f"the same result so. Use torch.optim's {', '.join(_ONE_BY_ONE)} (not differentiable), or leave "
        "states=True out."
    )


def step_these(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], group: dict[str, Any]
) -> None:
    """Update some parameters of ``group`` as the optimizer's own step would; its hooks are not called."""
    step: Any = type(optimizer).step
    bare = step.__wrapped__ if getattr(step, "hooked", False) else step
    groups = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": [*parameters]}]
    try:
        bare(optimizer)
    finally:
        optimizer.param_groups = groups


def step_apart(
    optimizer: torch.optim.Optimizer, elements: torch.Tensor, group: dict[str, Any], state: dict[str, Any]
) -> dict[str, Any]:
    """The same for elements that are none of the optimizer's parameters; gives what becomes of their state.

    Nothing of them is left in the optimizer, also where its step fails.
    """
    try:
        if state:
            optimizer.state[elements] = state
        step_these(optimizer, [elements], group)
    finally:
        left: dict[str, Any] = optimizer.state.pop(elements, {})
    return left


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
