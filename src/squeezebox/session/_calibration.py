"""Plans whose noise is measured, and that are made anew where the error law promised too little."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from squeezebox.reports import StepPlan
from squeezebox.schema import BudgetError

_ATTEMPTS = 4
_MARGIN = 1.05


def plan_within(
    noise: float, plan_for: Callable[[float], StepPlan], measure: Callable[[StepPlan], float | None]
) -> StepPlan:
    """A plan whose measured noise is at most ``noise``; after a few attempts, one without any.

    The error law and its checks foretell a step's noise to within a factor of two or so. That factor changes
    little from one plan to the next, so a plan for as much less comes out right.

    Args:
        noise: what is allowed.
        plan_for: the plan of so much noise by the error law.
        measure: its noise on the sample; None if there is no gradient to compare with.

    Returns:
        The plan; its ``predicted_noise`` is what was measured.

    Raises:
        BudgetError: no plan fits.
    """
    limit, measured = noise, 0.0
    for _ in range(_ATTEMPTS):
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
            return plan
        if found <= noise:
            return dataclasses.replace(plan, predicted_noise=found)
        measured, limit = found, plan.predicted_noise * noise / (_MARGIN * found)
    return plan_for(0.0)
