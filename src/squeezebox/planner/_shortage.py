"""The lowest peak that a plan reaches, and why none fits a budget."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from squeezebox.planner._greedy import first_fit, solve
from squeezebox.planner._table import Integers, Table, as_chosen, tabulate
from squeezebox.schema import (
    Budget,
    BudgetError,
    MemoryParts,
    Option,
    Part,
    Plan,
    PlannedPeak,
    Profile,
    Shortage,
)

_PRECISION = 0.002  # of the peak


def smallest(profile: Profile, noise: float, seconds: float = math.inf) -> Plan:
    """The plan with the lowest peak found within the noise and the time; :func:`solve` finds a faster one.

    Args:
        profile: bytes, seconds and noise of every option of every tensor.
        noise: most relative gradient noise of all options together.
        seconds: most of all options together, beyond keeping every tensor.

    Raises:
        BudgetError: no choice has so little noise, or takes so little time.
        OptionError: the profile contradicts itself.
    """
    high = _everything(profile)
    best = solve(profile, Budget(peak_bytes=high, noise=noise), exchange=math.isfinite(seconds))
    if best.predicted_seconds > seconds:
        raise BudgetError(
            f"no plan takes at most {seconds:.3g} s more than the plain step at noise {noise:g}: the fastest "
            f"takes {best.predicted_seconds:.3g} s more. Allow more time or more noise."
        )
    low = floor(profile, noise) - 1
    while best.predicted_peak_bytes - low > max(1.0, _PRECISION * best.predicted_peak_bytes):
        middle = (low + best.predicted_peak_bytes) // 2
        plan = _plan(profile, Budget(peak_bytes=middle, noise=noise), seconds)
        best, low = (best, middle) if plan is None else (plan, low)
    return best


def floor(profile: Profile, noise: float) -> int:
    """Bytes at the peak that no plan of so much noise can be below, ``noise`` as in :class:`Budget`."""
    return tabulate(profile).floor(quiet=noise <= 0.0)


def _plan(profile: Profile, budget: Budget, seconds: float) -> Plan | None:
    """One that fits and takes no longer; None if there is none."""
    if seconds == math.inf:
        return first_fit(profile, budget)
    try:
        plan = solve(profile, budget)
    except BudgetError:
        return None
    return plan if plan.predicted_seconds <= seconds else None


def _everything(profile: Profile) -> int:
    """More than any choice can hold."""
    bytes_ = (max(o.held_bytes + o.working_bytes for o in tensor.options) for tensor in profile.tensors)
    return max(profile.base_bytes, default=0) + sum(bytes_)


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


_SHARES = {"forward": 80, "backward": 100, "optimizer": 20}  # of each phase, in a drawing


def over_step(profile: Profile, choices: Mapping[str, Option]) -> dict[str, tuple[int, ...]]:
    """The most bytes in each share of a phase with these options, by key: see :class:`StepCurve`.

    Raises:
        OptionError: the profile contradicts itself.
    """
    table = as_chosen(profile, choices)
    usage = table.usage(np.zeros(len(table.valid), np.int64))
    phases = np.array([moment.phase.replace("loss", "forward") for moment in profile.moments])
    return {
        phase: tuple(int(share.max()) for share in _in_shares(usage[phases == phase], shares))
        for phase, shares in _SHARES.items()
        if (phases == phase).any()
    }


def _in_shares(values: Integers, shares: int) -> Iterator[Integers]:
    """Neighbours go together; where there are fewer values than shares, one is in several."""
    for share in range(shares):
        start = share * len(values) // shares
        yield values[start : max(-(-(share + 1) * len(values) // shares), start + 1)]


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
