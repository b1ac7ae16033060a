"""Choices whose noise is measured, and which are made once more where the error law promised too little."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from squeezebox.reports import StepPlan
from squeezebox.schema import BudgetError

_ATTEMPTS = 4
_MARGIN = 1.05
T = TypeVar("T")


def within(noise: float, attempt: Callable[[float], tuple[T, float, float]]) -> T | None:
    """The first of a few attempts whose measured noise is at most ``noise``.

    The error law and its checks predict a step's noise to within a factor of two or so. That factor changes
    little from one choice to the next, so one for as much less comes out right.

    Args:
        noise: what is allowed.
        attempt: what can be had for so much noise by the error law, its noise by that law, and as measured.
    """
    limit = noise
    for _ in range(_ATTEMPTS):
        made, predicted, found = attempt(limit)
        if found <= noise:
            return made
        limit = predicted * noise / (_MARGIN * found)
    return None


def plan_within(
    noise: float, plan_for: Callable[[float], StepPlan], measure: Callable[[StepPlan], float | None]
) -> StepPlan:
    """A plan whose measured noise is at most ``noise``; after a few attempts, one without any.

    Args:
        noise: what is allowed.
        plan_for: the plan of so much noise by the error law.
        measure: its noise on the sample; None if there is no gradient to compare with.

    Returns:
        The plan; its ``predicted_noise`` is what was measured.

    Raises:
        BudgetError: no plan fits.
    """
    measured = 0.0

    def attempt(limit: float) -> tuple[StepPlan, float, float]:
        nonlocal measured
        try:
            plan = plan_for(limit)
        except BudgetError as error:
            if not measured:
                raise
            raise BudgetError(
                f"a plan fits by the error law, but its noise on the sample is {measured:.1e} where "
                f"{noise:g} is allowed; and with less noise, {error}"
            ) from error
        found = measure(plan) if plan.predicted_noise else None
        if found is None:
            return plan, 0.0, 0.0
        measured = found
        return dataclasses.replace(plan, predicted_noise=found), plan.predicted_noise, found

    return within(noise, attempt) or plan_for(0.0)
