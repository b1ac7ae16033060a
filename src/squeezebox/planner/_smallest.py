"""The lowest peak, by halving the range of budgets."""

from __future__ import annotations

import math

from squeezebox.planner._greedy import first_fit, solve
from squeezebox.planner._table import tabulate
from squeezebox.schema import Budget, BudgetError, Plan, Profile

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
