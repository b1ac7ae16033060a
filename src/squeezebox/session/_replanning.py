"""Plans for inputs of other shapes than the sample's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from squeezebox.reports import StepPlan
from squeezebox.schema import OptionError
from squeezebox.steps import mapped, tensors_in

Shapes = tuple[tuple[torch.dtype, tuple[int, ...]], ...]


@dataclasses.dataclass(kw_only=True, slots=True)
class Replanning:
    """The plans made so far, by the inputs that each was made for, and how to make another."""

    plans: dict[Shapes, StepPlan]
    failed: dict[Shapes, str] = dataclasses.field(default_factory=dict)
    sample: Shapes = ()
    target: Any = None
    planner: Callable[..., StepPlan] | None = None  # of a sample

    def covering(self, shapes: Shapes) -> StepPlan | None:
        """The first plan made for inputs at least as large in every dimension."""
        return next((plan for planned, plan in self.plans.items() if _covers(planned, shapes)), None)

    def make(self, shapes: Shapes, arguments: tuple[Any, ...]) -> tuple[StepPlan | None, str]:
        """A plan for these arguments, or why there is none; BudgetError if none fits."""
        assert self.planner is not None
        target = mapped(lambda tensor: _fitted(tensor, self.sample, shapes), self.target)
        try:
            plan = self.plans[shapes] = self.planner(sample=(arguments, target))
        except OptionError as error:
            self.failed[shapes] = str(error)
            return None, str(error)
        return plan, ""


def shapes_of(inputs: Any) -> Shapes:
    """Dtype and sizes of every tensor within."""
    return tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors_in(inputs))


def _covers(planned: Shapes, shapes: Shapes) -> bool:
    """Whether every tensor has its kind, and no dimension longer than planned."""
    return [(dtype, len(sizes)) for dtype, sizes in planned] == [
        (dtype, len(sizes)) for dtype, sizes in shapes
    ] and all(
        size <= most
        for (_, sizes), (_, largest) in zip(shapes, planned, strict=True)
        for size, most in zip(sizes, largest, strict=True)
    )


def _fitted(target: torch.Tensor, sample: Shapes, shapes: Shapes) -> torch.Tensor:
    """The target cut or repeated to other inputs' sizes: where it is as long as the sample's first input.

    A first dimension of as many rows as the input has in its first two (tokens in a row) follows both.
    """
    old, new = (next((sizes for _, sizes in each if sizes), ()) for each in (sample, shapes))
    pairs = dict(enumerate(zip(old, new, strict=False)))
    for dim, size in enumerate(target.shape):
        before, after = pairs.get(dim, (size, size))
        if dim == 0 and size == math.prod(old[:2]) != before:
            before, after = size, math.prod(new[:2])
        if size == before != after:
            target = target.index_select(dim, torch.arange(after, device=target.device) % size)
    return target
