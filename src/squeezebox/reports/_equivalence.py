"""Are two trainings' results the same, as far as the spread between seeds matters? Student's t, no scipy."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.05
"""Of every one-sided test; intervals of the mean difference hold 90 %, so that both sides have it."""
_TRIALS = 20_000  # a power within 0.4 percentage points
_MOST_SEEDS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Equivalence:
    """Two one-sided t tests on paired differences (Schuirmann 1987).

    ``low`` and ``high`` hold the mean with 90 %. ``power`` is the chance to find equivalence when there is no
    difference at all, with differences that spread as these do and the margin as it is; ``least_margin`` the
    smallest margin this data would pass; ``least_visible`` the smallest mean difference that a two-sided 5 %
    t test would call significant, and ``p_different`` that test's p.
    """

    count: int
    mean: float
    deviation: float
    low: float
    high: float
    margin: float
    p_value: float
    equivalent: bool
    power: float
    least_margin: float
    least_visible: float
    p_different: float

    @property
    def different(self) -> bool:
        """Whether the mean difference is significant (two-sided, 5 %)."""
        return self.p_different < LEVEL


def equivalence(
    differences: Sequence[float], margin: float, *, margin_uncertainty: float = 0.0
) -> Equivalence:
    """Test whether the mean of paired differences lies within ``margin`` of zero.

    With ``margin_uncertainty``, the margin less its own lower 95 % limit, both one-sided limits are those of
    mean minus margin by the method of variance estimates recovery (Zou and Donner 2008, eq. 3): the two
    uncertainties add in squares. Without it the margin is taken as known.

    Raises:
        ValueError: there are fewer than two differences, or one is NaN or infinite.
    """
    count = len(differences)
    if count < 2:
        raise ValueError(f"{count} differences have no spread; an equivalence test needs at least 2.")
    if not all(map(math.isfinite, differences)):
        raise ValueError(f"A difference is not finite: {list(differences)}.")
    mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
    error, quantile = deviation / math.sqrt(count), t_quantile(1 - LEVEL, count - 1)
    # So quantile * both is the root of (quantile * error)^2 + margin_uncertainty^2.
    both = math.hypot(error, margin_uncertainty / quantile)
    least = abs(mean) + quantile * both
    return Equivalence(
        count=count,
        mean=mean,
        deviation=deviation,
        low=mean - quantile * error,
        high=mean + quantile * error,
        margin=margin,
        p_value=_tail(margin - abs(mean), both, count - 1),
        equivalent=least < margin,
        power=power(deviation, margin, count, margin_uncertainty=margin_uncertainty),
        least_margin=least,
        least_visible=t_quantile(1 - LEVEL / 2, count - 1) * error,
        p_different=p_different(differences),
    )


def p_different(differences: Sequence[float]) -> float:
    """Two-sided p of the t test that the mean is zero.

    Of differences that are equal but for rounding, 1 if they are zero, else that of the sign-flip test:
    shares of few samples are often equal by chance, and the t test would call them certain.
    """
    count, mean, deviation = len(differences), statistics.fmean(differences), statistics.stdev(differences)
    if mean == 0.0:
        return 1.0
    if deviation < 1e-9 * abs(mean):
        return 2.0 ** (1 - count)
    return min(1.0, 2 * _tail(abs(mean), deviation / math.sqrt(count), count - 1))


def _tail(distance: float, error: float, freedom: int) -> float:
    """P(T > distance / error); 1 where that is not a number."""
    if error == 0.0:
        return 0.0 if distance > 0.0 else 1.0
    t = distance / error
    return 1.0 if math.isnan(t) else max(0.0, 1 - t_distribution(t, freedom))  # Simpson's rule may pass 1


def power(deviation: float, margin: float, count: int, *, margin_uncertainty: float = 0.0) -> float:
    """Chance of the verdict "equivalent" if the true difference is zero, by simulation."""
    generator = np.random.default_rng(0)
    freedom = count - 1
    quantile = t_quantile(1 - LEVEL, freedom)
    # Mean and deviation of normal samples are independent, so each is drawn by itself.
    means = generator.standard_normal(_TRIALS) * (deviation / math.sqrt(count))
    squares = generator.chisquare(freedom, _TRIALS) / freedom
    errors = deviation * np.sqrt(squares) / math.sqrt(count)
    passed = np.abs(means) + quantile * np.hypot(errors, margin_uncertainty / quantile) < margin
    return float(passed.mean())


def deviation_uncertainty(deviation: float, count: int) -> float:
    """A standard deviation of ``count`` values less its lower 95 % limit, by chi-square.

    Its quantile is Wilson and Hilferty's (1931), within 0.3 % from three values on.
    """
    freedom, part = count - 1, 2 / (9 * (count - 1))
    upper = freedom * (1 - part + statistics.NormalDist().inv_cdf(1 - LEVEL) * math.sqrt(part)) ** 3
    return deviation * (1 - math.sqrt(freedom / upper))


def seeds_needed(deviation: float, margin_deviation: float, units: float, chance: float = 0.8) -> int | None:
    """Seeds with which no true difference would be found equivalent with ``chance``; None above 1000.

    Args:
        deviation: of the paired differences.
        margin_deviation: of the results between seeds.
        units: the margin, in such deviations.
        chance: the power asked for.
    """

    def enough(count: int) -> bool:
        uncertainty = units * deviation_uncertainty(margin_deviation, count)
        return power(deviation, units * margin_deviation, count, margin_uncertainty=uncertainty) >= chance

    low, high = 2, 3
    while not enough(high):
        if high == _MOST_SEEDS:
            return None
        low, high = high, min(high * 2, _MOST_SEEDS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def t_distribution(t: float, freedom: int) -> float:
    """P(T <= t) of Student's distribution, by Simpson's rule on t = sqrt(freedom) * tan(angle).

    There the density is proportional to cos(angle)^(freedom - 1): smooth and of finite range.
    """
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    intervals = 2000
    width = math.atan(t / math.sqrt(freedom)) / intervals
    weights = np.ones(intervals + 1)
    weights[1:-1] = np.resize([4.0, 2.0], intervals - 1)
    area = float(weights @ np.cos(np.arange(intervals + 1) * width) ** (freedom - 1))
    return 0.5 + scale * area * width / 3


@functools.lru_cache
def t_quantile(probability: float, freedom: int) -> float:
    """The t with P(T <= t) = ``probability``, by bisection.

    Raises:
        ValueError: the probability is not within 0.5 and 1, or there is no degree of freedom.
    """
    if not 0.5 <= probability < 1 or freedom < 1:
        raise ValueError(f"No t quantile for probability={probability} and freedom={freedom}.")
    low, high = 0.0, 1.0
    while t_distribution(high, freedom) < probability:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if t_distribution(middle, freedom) < probability else (low, middle)
    return (low + high) / 2
