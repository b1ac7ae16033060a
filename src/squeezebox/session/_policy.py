"""Which codec and bound a tensor gets, and which tensors and models a plan admits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from squeezebox import codecs
from squeezebox.bounds import Controller, ControllerState
from squeezebox.capture import Choice, Rule
from squeezebox.reports import StepPlan
from squeezebox.schema import Action, Option, PlanError, Role, StepStatistics, UnsupportedModelError

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
        bound = controller.bound(self.state, key, rule.role, lambda: _unit(tensor, rule))
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
    notes: dict[str, None] | None,
    why_other: Callable[[], str],
    key: str,
    nbytes: int,
) -> None:
    """Refuse, or note, a tensor that the plan does not know, or not of that size; a smaller one is fine."""
    known = planned.get(key)
    if known is not None and nbytes <= known:
        return
    if notes is not None:
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
