"""Which codec and bound a tensor gets, and which tensors, models and shapes a plan admits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from squeezebox import codecs
from squeezebox.bounds import Controller, ControllerState
from squeezebox.capture import Choice, Rule
from squeezebox.reports import StepPlan
from squeezebox.schema import (
    Action,
    Option,
    OptionError,
    PlanError,
    Role,
    StepStatistics,
    UnsupportedModelError,
)
from squeezebox.steps import mapped, tensors_in

_ON_DEVICES = (torch.float32, torch.bfloat16, torch.float16)  # of which kernels make blocks
_SPARSE_ROLES = frozenset({Role.RELU_OUTPUT, Role.POOL_INPUT})


class BoundPolicy:
    """Turns the controller's bounds into codecs; without a controller nothing is lost.

    ``codec`` is taken instead of the usual ones wherever it serves; those are of the ``family`` "entropy" or
    "planes", each with one that preserves signs.
    """

    def __init__(
        self, controller: Controller | None, on_host: bool, codec: codecs.Codec | None, family: str
    ) -> None:
        self.controller = controller
        self.state = ControllerState()
        self.codec, self.family = codec, family
        self.planned: Callable[[str], Option | None] = lambda key: None  # a plan's, whose codec is taken
        self.on_host = on_host  # where entropy coding is quick; elsewhere nothing may wait for a device

    def choose(self, key: str, rule: Rule, tensor: torch.Tensor) -> Choice:
        """Error-bounded codes for values; sign-preserving ones wherever an operator may read the sign."""
        controller, on_host = self.controller, self.on_host
        if controller is None:
            return Choice(codec="lossless" if rule.role in _SPARSE_ROLES and on_host else "keep")
        state = self.state if self.state.is_of_unit(key, rule.scaled) else self.state.without({key})
        bound = controller.bound(state, key, rule.role, lambda: _unit(tensor, rule))
        if bound is None:
            return Choice(codec="keep")
        if rule.highest is not None:
            bound = min(bound, rule.highest())
        if not 0.0 < bound < math.inf:  # all zero, or NaN and infinities within
            return Choice(codec="lossless" if on_host else "keep")
        if self.codec is not None and not rule.scaled and (rule.dense or self.codec.preserves_sign):
            return Choice(codec=self.codec.name, bound=bound)
        if not on_host:
            codec = "blocks" if tensor.dtype in _ON_DEVICES else "keep"
            return Choice(codec=codec, bound=bound, scaled=rule.scaled)
        planned = self.planned(key)
        fast = self.family == "planes" if planned is None else planned.codec.startswith("planes")
        family = "planes" if fast else "entropy"
        return Choice(codec=family if rule.dense else f"{family}-sign", bound=bound, scaled=rule.scaled)

    def learn(self, statistics: StepStatistics, notes: dict[str, None]) -> None:
        """Give the controller a step's statistics; where these are beyond a float, bounds stay, noted."""
        if self.controller is None:
            return
        try:
            self.state = self.controller.update(self.state, statistics)
        except ArithmeticError as error:
            notes[
                f"bounds stayed as they were after a step of which the statistics are no numbers: {error}"
            ] = None


def admit(
    model: str,
    planned: Mapping[str, int],
    notes: dict[str, None],
    replans: bool,
    why_other: Callable[[], str],
    key: str,
    nbytes: int,
    follows_values: bool,
) -> None:
    """Refuse, or note, a tensor that the plan does not know, or not of that size; a smaller one is fine.

    It is noted where a plan may be of other inputs (``replans``), or sizes of this step follow from values.
    """
    known = planned.get(key)
    if known is not None and nbytes <= known:
        return
    if replans or follows_values:
        notes[f"'{key}' was larger than planned, or not planned and held exactly"] = None
    else:
        size = "no such tensor" if known is None else f"{known} bytes"
        raise PlanError(
            f"'{key}' saves {nbytes} bytes and the plan, made for {model}, knows {size}: {why_other()}."
        )


def refuse_unsound(plan: StepPlan, model: torch.nn.Module) -> None:
    """UnsupportedModelError where tensors are to be recomputed from parameters that are gone by then."""
    again = [tensor.key for tensor in plan.tensors if tensor.option.action is Action.RECOMPUTE]
    if again and any(hasattr(module, "reshard") for module in model.modules()):
        raise UnsupportedModelError(
            f"the plan makes {len(again)} tensors again, '{again[0]}' first, and fully_shard takes "
            "parameters away between a module's forward and its backward. Make the plan with recompute=False."
        )


def _unit(tensor: torch.Tensor, rule: Rule) -> float:
    """Root mean square of the non-zero elements; the deviation where zeros carry no meaning.

    In an attention an error's part of the logits counts, by the absolute value, as backward takes their
    exponentials: where they are wider than one, the unit is as much smaller.
    """
    if rule.scaled:
        return 1.0
    found = codecs.unit(tensor, dense=rule.dense)
    return found if rule.logits is None else found / max(1.0, rule.logits())


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

    def make(self, shapes: Shapes, inputs: Any) -> tuple[StepPlan | None, str]:
        """A plan for these inputs, or why there is none; BudgetError if none fits."""
        assert self.planner is not None
        target = mapped(lambda tensor: _fitted(tensor, self.sample, shapes), self.target)
        try:
            plan = self.plans[shapes] = self.planner(sample=(inputs, target))
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
