"""The lowest peak, by halving the range of budgets."""

from __future__ import annotations

import math

from squeezebox.planner._greedy import solve
from squeezebox.schema import Budget, BudgetError, Plan, Profile

_PRECISION = 0.002  # of the peak


def smallest(profile: Profile, noise: float, seconds: float = math.inf) -> Plan:
    """The plan with the lowest peak found within the noise and the time.

    Args:
        profile: bytes, seconds and noise of every option of every tensor.
        noise: most relative gradient noise of all options together.
        seconds: most of all options together, beyond keeping every tensor.

    Raises:
        BudgetError: no choice has so little noise, or takes so little time.
        OptionError: the profile contradicts itself.
    """
    low, high = max(profile.base_bytes, default=0), _everything(profile)
    best = solve(profile, Budget(peak_bytes=high, noise=noise))
    if best.predicted_seconds > seconds:
        raise BudgetError(
            f"no plan takes at most {seconds:.3g} s more than the plain step at noise {noise:g}: the fastest "
            f"takes {best.predicted_seconds:.3g} s more. Allow more time or more noise."
        )
    while best.predicted_peak_bytes - low > max(1.0, _PRECISION * best.predicted_peak_bytes):
        middle = (low + best.predicted_peak_bytes) // 2
        try:
            plan = solve(profile, Budget(peak_bytes=middle, noise=noise), exchange=math.isfinite(seconds))
        except BudgetError:
            low = middle
            continue
        best, low = (plan, low) if plan.predicted_seconds <= seconds else (best, middle)
    try:
        return solve(profile, Budget(peak_bytes=best.predicted_peak_bytes, noise=noise))
    except BudgetError:  # prices need not lead there again
        return best


def _everything(profile: Profile) -> int:
    """More than any choice can hold."""
    bytes_ = (max(o.held_bytes + o.working_bytes for o in tensor.options) for tensor in profile.tensors)
    return max(profile.base_bytes, default=0) + sum(bytes_)
