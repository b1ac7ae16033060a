"""Several plans for one step, of which the one is in force that is fastest as links and disks now are."""

from __future__ import annotations

import time
from collections.abc import Sequence

from squeezebox.planner import Balance
from squeezebox.reports import StepPlan, human_bytes
from squeezebox.schema import OptionError


class Balanced:
    """The plans, and which of them the next step is for.

    Raises:
        OptionError: there are fewer than two; one may pass the least of their budgets; or they have
            optimizer state, frozen weights or an arena in different ways.
    """

    def __init__(self, plans: Sequence[StepPlan]) -> None:
        _check(plans)
        self._plans = plans
        self._balance = Balance([each.predicted_seconds for each in plans])
        self._begun_at, self._changes, self._note = 0.0, 0, ""

    @property
    def plan(self) -> StepPlan:
        """The one in force."""
        return self._plans[self._balance.choice]

    def begin(self, step: int, notes: dict[str, None], *, counts: bool) -> StepPlan:
        """Step number ``step`` begins; returns the plan for it, and notes a change.

        ``counts``: the one before came as far as its backward, so that its seconds tell something.
        """
        before, now = self._balance.choice, time.perf_counter()
        if counts and self._begun_at:
            self._balance.note(now - self._begun_at)
        self._begun_at = now
        if self._balance.choice != before:
            self._changes += 1
            notes.pop(self._note, None)
            self._note = (
                f"plan {self._balance.choice + 1} of {len(self._plans)} is in force since step {step}, after "
                f"{self._changes} changes, trials counted"
            )
            notes[self._note] = None
        return self.plan


def _check(plans: Sequence[StepPlan]) -> None:
    if len(plans) < 2 or not all(isinstance(each, StepPlan) for each in plans):
        raise OptionError(f"plan {plans!r} is no choice of plans; give one, or two or more in a list.")
    first, most = plans[0], max(each.predicted_peak_bytes for each in plans)
    least = min(each.budget_bytes or each.predicted_peak_bytes for each in plans)
    if most > least:
        raise OptionError(
            f"of these plans one reaches {human_bytes(most)}, and another one has to stay below "
            f"{human_bytes(least)}. Make them all for the same budget."
        )
    alike = (first.model, first.optimizer, first.weights, first.arena)
    if any((each.model, each.optimizer, each.weights, each.arena) != alike for each in plans):
        raise OptionError(
            "these plans are for different models, or have optimizer state, frozen weights or an arena in "
            "different ways, so they cannot take turns. Make them alike but for offload= and recompute=."
        )
