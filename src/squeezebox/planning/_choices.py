"""Which way to work a step, whole or with its first layers in slices, and the plan for it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from squeezebox import planner
from squeezebox.planning._slicing import Slices
from squeezebox.schema import Action, Budget, BudgetError, Plan, StepProfile

_PAYS = 0.98  # of a peak beyond what is there anyway: slices must bring it lower to be worth their time
_PROFILED = 4  # ways in slices of one budget, at most


@dataclass(frozen=True, slots=True)
class Choice:
    """A way to work the step, and its plan."""

    seen: StepProfile
    plan: Plan

    @property
    def seconds(self) -> float:
        """Of forward and backward."""
        again = (Action.RECOMPUTE, Action.REGENERATE)
        follows = any(option.action in again for option in self.plan.choices.values())
        overhead = self.seen.holding_seconds + (self.seen.following_seconds if follows else 0.0)
        return self.seen.plain_seconds + overhead + self.plan.predicted_seconds

    @property
    def beyond_bytes(self) -> int:
        """The peak beyond parameters, gradients and the optimizer's state."""
        return self.plan.predicted_peak_bytes - self.seen.profile.base_bytes[-1]


def fastest(seen: StepProfile, budget: Budget, batch: int, slices: Slices | None) -> Choice | None:
    """The way of least time within the budget; None if none fits.

    Slices are measured where they would be faster if they cost nothing, or as little as fewer layers' do.
    """
    best, found, extra = solved(seen, budget), list[Choice](), 0.0
    for region in seen.regions if slices is not None else ():
        bound = solved(planner.in_slices(seen, planner.free_slices(region)), budget, exchange=False)
        known = min((choice.seconds for choice in (best, *found) if choice is not None), default=math.inf)
        if slices is None or bound is None or bound.seconds + extra >= known:
            continue
        ways = slices.predicted(seen, region, batch)
        extra = min((way.plain_seconds - seen.plain_seconds for way in ways), default=extra)
        choices = (solved(way, budget, exchange=False) for way in ways)
        found += [choice for choice in choices if choice is not None]
    found.sort(key=lambda choice: choice.seconds)
    for choice in found[:_PROFILED]:
        if slices is None or (best is not None and choice.seconds >= best.seconds):
            break
        exact = solved(slices.profiled(seen, choice.seen, batch), budget)
        if exact is not None and (best is None or exact.seconds < best.seconds):
            best = exact
    return best


def leanest(seen: StepProfile, noise: float, batch: int, slices: Slices | None, seconds: float) -> Choice:
    """The way of lowest peak within the seconds beyond the plain step; a faster one where that is as low.

    Raises:
        BudgetError: none takes so little noise or time.
    """
    best = whole = Choice(seen, planner.smallest(seen.profile, noise, seconds))
    found = [whole]
    for way in _ways(seen, noise, batch, slices, whole):
        if not _reaches(planner.floor(way.profile, noise), best):
            continue
        left = seconds - (way.plain_seconds - seen.plain_seconds)
        try:
            found.append(Choice(way, planner.smallest(way.profile, noise, left)))
        except BudgetError:  # slices alone take too long
            continue
        best = min(best, found[-1], key=lambda choice: choice.beyond_bytes)
    enough = best.beyond_bytes / _PAYS if best is not whole else best.beyond_bytes
    best = min((each for each in found if each.beyond_bytes <= enough), key=lambda choice: choice.seconds)
    if slices is None or best is whole:
        return best
    exact = slices.profiled(seen, best.seen, batch)
    left = seconds - (exact.plain_seconds - seen.plain_seconds)
    try:
        choice = Choice(exact, planner.smallest(exact.profile, noise, left))
    except BudgetError:
        return whole
    return choice if choice.beyond_bytes < _PAYS * whole.beyond_bytes else whole


def solved(seen: StepProfile, budget: Budget, *, exchange: bool = True) -> Choice | None:
    """The step's plan within the budget; None if there is none."""
    if planner.floor(seen.profile, budget.noise) > budget.peak_bytes:
        return None
    try:
        return Choice(seen, planner.solve(seen.profile, budget, exchange=exchange))
    except BudgetError:
        return None


def fits(seen: StepProfile, budget: Budget) -> bool:
    """Whether any plan for the step does."""
    enough = planner.floor(seen.profile, budget.noise) <= budget.peak_bytes
    return enough and planner.first_fit(seen.profile, budget) is not None


def _ways(
    seen: StepProfile, noise: float, batch: int, slices: Slices | None, whole: Choice
) -> Iterator[StepProfile]:
    """Those in slices that could need less than the whole step, the least needy first."""
    found = list[StepProfile]()
    for region in seen.regions if slices is not None else ():
        free = planner.in_slices(seen, planner.free_slices(region))
        if slices is not None and _reaches(planner.floor(free.profile, noise), whole):
            found += slices.predicted(seen, region, batch)
    return iter(sorted(found, key=lambda way: planner.floor(way.profile, noise)))


def _reaches(nbytes: int, best: Choice) -> bool:
    """Whether a peak of ``nbytes`` would be as low as the best one, or nearly so."""
    fixed = best.seen.profile.base_bytes[-1]
    return nbytes - fixed <= best.beyond_bytes / _PAYS
