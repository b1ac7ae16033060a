"""Some parameters' part of an optimizer's step."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from squeezebox.schema import OptionError

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
