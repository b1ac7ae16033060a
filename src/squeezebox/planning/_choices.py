"""Which way to work a step, whole or in slices, the plan for it, and a step that measures the plan."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from squeezebox import planner
from squeezebox.bounds import Controller
from squeezebox.memory import sectors, within_room
from squeezebox.planning._profiles import run_step
from squeezebox.planning._slicing import Slices
from squeezebox.profiling import loads_named, routed, state_bytes
from squeezebox.reports import StepPlan, exact_bytes
from squeezebox.schema import Action, Budget, BudgetError, Option, Plan, StepProfile, TensorProfile
from squeezebox.session import begin
from squeezebox.steps import TrainingStep, tensors_in

_REHEARSED_STEPS = 4  # of an arena, whose places should be large enough for the bounds that follow


@within_room("a step under the plan")
def measured_noise(step: TrainingStep, plan: StepPlan) -> float | None:
    """Of a step under the plan, with its weights as they are; None where no gradient is other than zero."""
    plan = dataclasses.replace(plan, weights=None)
    with step.restored():
        engine = begin(step.model, step.optimizer, None, plan=plan, place=step.folder)
        try:
            noise = engine.noise_of(lambda: run_step(step, engine.framed()))
            return None if math.isnan(noise) else noise
        finally:
            engine.detach()


@within_room("a step under the plan")
def measured_peak(step: TrainingStep, plan: StepPlan) -> int | None:
    """Of a step under the plan, with the state that the optimizer will have; None without a meter.

    Where the plan has several add up, it is a step with the gradients of an earlier one.
    """
    model, optimizer = step.model, step.optimizer
    present = sum(state.nbytes for state in tensors_in([*optimizer.state.values()])) if optimizer else 0
    with step.restored():
        engine = begin(model, optimizer, None, plan=plan, place=step.folder)
        engine.checks_budget = False  # which the caller does
        try:
            model.zero_grad(set_to_none=True)
            for _ in range(min(plan.accumulate, 2)):
                run_step(step, engine.framed())
            engine.close_step()
            peak = engine.records.peak_bytes
        finally:
            engine.detach()
    return None if peak is None else peak + state_bytes(model, optimizer) - present


def rehearsed(step: TrainingStep, controller: Controller | None) -> Mapping[str, int]:
    """The places that an arena has after a few steps of the sample, with bounds that follow it."""
    with step.restored():
        engine = begin(step.model, step.optimizer, controller, arena=True)
        try:
            for _ in range(1 if controller is None else _REHEARSED_STEPS):
                step.model.zero_grad(set_to_none=True)
                run_step(step, engine.framed())
            engine.store.start_places(measured=False, guessed=False)
            return engine.store.places
        finally:
            engine.detach()


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
                f"a plan was predicted to fit, but its noise on the sample is {measured:.1e} where {noise:g} "
                f"is allowed; and with less noise, {error}"
            ) from error
        found = measure(plan) if plan.predicted_noise else None
        if found is None:
            return plan, 0.0, 0.0
        measured = found
        return dataclasses.replace(plan, predicted_noise=found), plan.predicted_noise, found

    return within(noise, attempt) or plan_for(0.0)


def measured_at_load(step: TrainingStep, plan: StepPlan, load: str | None) -> int | None:
    """:func:`measured_peak` of the worst step of that load."""
    if load is None:
        return measured_peak(step, plan)
    peaks = []
    for each in loads_named(load):
        with routed(each):
            peaks.append(measured_peak(step, plan))
    return max((peak for peak in peaks if peak is not None), default=None)


def at_worst(step: TrainingStep, plan_below: Callable[[int | None], StepPlan], limit: int | None) -> StepPlan:
    """A plan under which a step with all tokens at the same experts stays within ``limit``, too.

    Raises:
        BudgetError: there is none.
    """
    aim, worst = limit, None
    while True:
        try:
            plan = plan_below(aim)
        except BudgetError as error:
            if worst is None:
                raise
            raise BudgetError(
                f"a plan fits a balanced load of experts, but a step with all tokens at the same ones takes "
                f"{exact_bytes(worst)}; below that, {error}"
            ) from error
        worst = measured_at_load(step, plan, "worst")
        if limit is None or aim is None or worst is None or worst <= limit:
            return dataclasses.replace(plan, budget_bytes=limit, worst_peak_bytes=worst)
        aim = min(aim, plan.predicted_peak_bytes) - (worst - limit)


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
        overhead += self.seen.file_seconds if self.has_file else 0.0
        return self.seen.plain_seconds + overhead + self.plan.predicted_seconds

    @property
    def has_file(self) -> bool:
        """Whether anything is moved to one."""
        return any(_is_moved(option) for option in self.plan.choices.values())

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
    best = whole = _smallest(seen, noise, seconds)
    found = [whole]
    for way in _ways(seen, noise, batch, slices, whole):
        if not _reaches(planner.floor(way.profile, noise), best):
            continue
        left = seconds - (way.plain_seconds - seen.plain_seconds)
        try:
            found.append(_smallest(way, noise, left))
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
        choice = _smallest(exact, noise, left)
    except BudgetError:
        return whole
    return choice if choice.beyond_bytes < _PAYS * whole.beyond_bytes else whole


def solved(seen: StepProfile, budget: Budget, *, exchange: bool = True) -> Choice | None:
    """The step's plan within the budget, without a file where that is faster; None if there is none."""
    found = _solved(seen, budget, exchange)
    if found is None or not found.has_file or not seen.file_seconds:
        return found
    other = _solved(_without_file(seen), budget, exchange)
    return other if other is not None and other.seconds < found.seconds else found


def _solved(seen: StepProfile, budget: Budget, exchange: bool) -> Choice | None:
    if planner.floor(seen.profile, budget.noise) > budget.peak_bytes:
        return None
    try:
        return Choice(seen, planner.solve(seen.profile, budget, exchange=exchange))
    except BudgetError:
        return None


def _smallest(seen: StepProfile, noise: float, seconds: float) -> Choice:
    """Of the lowest peak within the seconds, of which a file takes some; BudgetError if there is none."""
    without = _without_file(seen)
    if without.profile != seen.profile:
        with contextlib.suppress(BudgetError):
            found = Choice(seen, planner.smallest(seen.profile, noise, seconds - seen.file_seconds))
            if found.has_file or not seen.file_seconds:
                return found
    return Choice(seen, planner.smallest(without.profile, noise, seconds))


def with_room(seen: StepProfile, nbytes: int) -> StepProfile:
    """The step in which at most ``nbytes`` can be moved: of tensors that are dearest to hold otherwise."""

    def dearness(tensor: TensorProfile) -> float:
        saved = seen.saved_bytes[tensor.key]
        moving = min(each.seconds for each in tensor.options if _is_moved(each))
        others = (o.seconds for o in tensor.options if not _is_moved(o) and o.held_bytes < saved)
        return (min(others, default=math.inf) - moving) / max(saved, 1)

    movable = [each for each in seen.profile.tensors if any(map(_is_moved, each.options))]
    crowded_out = set()
    for each in sorted(movable, key=dearness, reverse=True):
        taken = sectors(seen.saved_bytes[each.key])
        if taken > nbytes:
            crowded_out.add(each.key)
        else:
            nbytes -= taken
    return _without_file(seen, crowded_out)


def _without_file(seen: StepProfile, keys: Container[str] | None = None) -> StepProfile:
    """The step with nothing in a file that can be elsewhere, or none of these."""
    tensors = tuple(
        dataclasses.replace(each, options=tuple(o for o in each.options if not _is_moved(o)) or each.options)
        if keys is None or each.key in keys
        else each
        for each in seen.profile.tensors
    )
    return dataclasses.replace(seen, profile=dataclasses.replace(seen.profile, tensors=tensors))


def _is_moved(option: Option) -> bool:
    return option.action is Action.OFFLOAD and option.codec != "host"


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
