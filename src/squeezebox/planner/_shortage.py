"""Why no plan fits a budget, and which changes would make one fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from squeezebox.planner._greedy import solve
from squeezebox.planner._table import Integers, Table, as_chosen
from squeezebox.schema import Budget, BudgetError, MemoryParts, Part, Plan, PlannedPeak, Profile, Shortage

_MORE_NOISE = 10.0


def shortage(profile: Profile, budget: Budget, least: Plan, batch: int = 0) -> Shortage:
    """Take apart the peak of ``least``, the smallest plan, which is above the budget.

    Args:
        profile: with its moments and parts.
        budget: what nothing fits.
        least: what :func:`squeezebox.planner.smallest` found.
        batch: samples of the profiled step; 0: unknown.
    """
    table = as_chosen(profile, least.choices)
    usage = table.usage(np.zeros(len(table.valid), np.int64))
    moment = profile.moments[int(usage.argmax())]
    return Shortage(
        budget_bytes=budget.peak_bytes,
        noise=budget.noise,
        moment=moment,
        parts=_parts(profile, table, usage),
        more_noise=_more_noise(profile, budget),
        smaller_batch=_smaller_batch(profile, usage, budget.peak_bytes, batch),
        stateless_peak_bytes=_within(_stateless(profile, usage), budget),
        peak_bytes_but_loss=_within(_but_loss(profile, usage), budget) if moment.phase == "loss" else None,
    )


def planned_peak(profile: Profile, plan: Plan) -> PlannedPeak:
    """Where the peak of a plan for this profile lies, and what it is made of."""
    table = as_chosen(profile, plan.choices)
    usage = table.usage(np.zeros(len(table.valid), np.int64))
    moment = profile.moments[int(usage.argmax())]
    return PlannedPeak(
        phase=moment.phase, event=moment.event, key=moment.key, parts=_parts(profile, table, usage)
    )


def _parts(profile: Profile, table: Table, usage: Integers) -> MemoryParts:
    """What is live at the highest position."""
    position = int(usage.argmax())
    moment = profile.moments[position]
    owned = profile.parameter_bytes + profile.input_bytes + profile.state_bytes + moment.gradient_bytes
    saved, gradients, states, weights = (
        _held(table, position, part) for part in (Part.SAVED, Part.GRADIENT, Part.STATE, Part.PARAMETER)
    )
    return MemoryParts(
        parameter_bytes=profile.parameter_bytes + weights,
        input_bytes=profile.input_bytes,
        gradient_bytes=moment.gradient_bytes + gradients,
        state_bytes=profile.state_bytes + states,
        saved_bytes=saved,
        temporary_bytes=int(usage[position]) - owned - saved - gradients - states - weights,
    )


def _held(table: Table, position: int, part: Part) -> int:
    """Bytes held of this part of the step, without what is unpacked or read."""
    of_part = np.array([tensor.part is part for tensor in table.profile.tensors], bool)
    living = of_part & (table.starts[:, 0] <= position) & (position < table.ends[:, 0])
    return int(table.held[living, 0].sum())


def _within(peak_bytes: int, budget: Budget) -> int | None:
    return peak_bytes if peak_bytes <= budget.peak_bytes else None


def _more_noise(profile: Profile, budget: Budget) -> float | None:
    """Ten times the noise, where that is enough."""
    wider = replace(budget, noise=_MORE_NOISE * budget.noise)
    try:
        solve(profile, wider)
    except BudgetError:
        return None
    return wider.noise


def _smaller_batch(profile: Profile, usage: Integers, budget_bytes: int, batch: int) -> int | None:
    """The largest batch that fits if all but parameters, gradients and their like is in proportion to it."""
    gradients = np.array([moment.gradient_bytes for moment in profile.moments], np.int64)
    fixed = profile.parameter_bytes + profile.state_bytes + gradients
    fixed[-1] = usage[-1] - profile.input_bytes  # the optimizer works on parameters
    room, grows = budget_bytes - fixed, np.maximum(usage - fixed, 0)
    if (room < 0).any():
        return None
    samples = int((batch * room[grows > 0] // grows[grows > 0]).min(initial=batch))
    return samples or None


def _stateless(profile: Profile, usage: Integers) -> int:
    """The peak with an optimizer that keeps nothing, and needs nothing while it steps."""
    left = usage - profile.state_bytes
    left[-1] = profile.parameter_bytes + profile.input_bytes + profile.moments[-1].gradient_bytes
    return int(left.max())


def _but_loss(profile: Profile, usage: Integers) -> int:
    """The peak outside of the loss."""
    others = [moment.phase != "loss" for moment in profile.moments]
    return int(usage[others].max(initial=0))
