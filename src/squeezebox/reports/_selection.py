"""Which of several settings is best, where every measurement of them is noisy: chance, regret, trials needed.

The one that measures best is chosen by its luck too, the more so the more settings there are. So means are
drawn by a paired bootstrap and pulled together as far as their spread may be noise (Strawderman 1971, a
uniform prior on the share that is).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from squeezebox.schema import OptionError

_DRAWS = 4000  # a chance within 0.8 percentage points
_MOST_TRIALS = 1000
_SHARES = (np.arange(200) + 0.5) / 200
Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The setting with the best mean over ``trials`` paired trials of each.

    ``chance`` is the probability that it is best, ``regret`` how much worse than the best it is expected to
    be, and ``trials_needed`` the paired trials that would make the chance ``wanted``; None above 1000.
    """

    best: str
    trials: int
    means: Mapping[str, float]
    chance: float
    regret: float
    wanted: float
    trials_needed: int | None

    @property
    def clear(self) -> bool:
        """Whether the chance is as large as wanted."""
        return self.chance >= self.wanted

    def __str__(self) -> str:
        needed = f"more than {_MOST_TRIALS}" if self.trials_needed is None else str(self.trials_needed)
        enough = "" if self.clear else f"; {needed} trials of each would say it with {self.wanted:.0%}"
        return (
            f"{self.best} is best of {len(self.means)} with a chance of {self.chance:.0%} after "
            f"{self.trials} "
            f"trials of each (expected regret {self.regret:.3g}){enough}"
        )


def select(
    trials: Mapping[str, Sequence[float]], *, wanted: float = 0.9, smaller_is_better: bool = False
) -> Selection:
    """Choose among settings that were measured side by side.

    Args:
        trials: measurements by the setting's name. Those at one place belong together: of one seed, or one
            round.
        wanted: a chance that counts as clear.
        smaller_is_better: as of seconds.

    Raises:
        OptionError: there are fewer than two settings or trials, not as many of each, one is not finite, or
            ``wanted`` is not between 0.5 and 1.
    """
    _check(trials, wanted)
    table = np.array([list(values) for values in trials.values()], dtype=np.float64)
    means, names = table.mean(1), list(trials)
    table, centre = (-table, -means) if smaller_is_better else (table, means)
    best, count = int(centre.argmax()), table.shape[1]
    middles, deviations = _draws(table)
    drawn = middles + deviations
    return Selection(
        best=names[best],
        trials=count,
        means=dict(zip(names, map(float, means), strict=True)),
        chance=_chance(drawn, best),
        regret=float((drawn.max(0) - drawn[best]).mean()),
        wanted=wanted,
        trials_needed=_needed(middles.mean(1, keepdims=True), deviations, best, count, wanted),
    )


def _check(trials: Mapping[str, Sequence[float]], wanted: float) -> None:
    counts = sorted({len(values) for values in trials.values()})
    finite = all(math.isfinite(value) for values in trials.values() for value in values)
    checks = (
        (len(trials) < 2, f"{len(trials)} settings leave nothing to choose; give 2 or more."),
        (len(counts) > 1, f"there are {counts} trials of the settings; measure each as often."),
        (bool(counts) and counts[0] < 2, f"trials {counts[:1]} have no spread; measure each twice or more."),
        (not finite, "a measurement is NaN or infinite; leave its trial out of every setting."),
        (not 0.5 < wanted < 1, f"wanted {wanted} is not between 0.5 and 1; give 0.9."),
    )
    for wrong, message in checks:
        if wrong:
            raise OptionError(f"select: {message}")


def _draws(table: Array) -> tuple[Array, Array]:
    """What the settings' means may be, ``[settings, draws]``: a middle, and a deviation around it.

    Let m be the means and s^2 the variance of one, seeds' own part removed, with f degrees of freedom. A
    share B of the means' spread is noise with a density of B^((k - 1) / 2) (1 + B S / (s^2 f))^(-(k - 1 + f)
    / 2), where S is the sum of their squares about their mean. A mean is then drawn about (1 - B) m with (1 -
    B) s^2. The bootstrap's deviations are widened as an estimated s asks.
    """
    generator = np.random.default_rng(0)
    settings, count = table.shape
    means = table.mean(1)
    apart = means - means.mean()
    residuals = table - table.mean(0) - apart[:, None]
    freedom = (settings - 1) * (count - 1)
    variance = float((residuals**2).sum()) / freedom / count
    drawn = table[:, generator.integers(count, size=(_DRAWS, count))].mean(2) - means[:, None]
    drawn -= drawn.mean(0)
    if variance <= 1e-24 * float((means**2).max()):  # measurements that do not vary
        return np.repeat(apart[:, None], _DRAWS, axis=1), 0.0 * drawn
    ratio = _SHARES * float((apart**2).sum()) / variance
    logs = (settings - 1) / 2 * np.log(_SHARES) - (settings - 1 + freedom) / 2 * np.log1p(ratio / freedom)
    weights = np.exp(logs - logs.max())
    kept = 1 - generator.choice(_SHARES, p=weights / weights.sum(), size=_DRAWS)
    wider = np.sqrt(count / (count - 1) * freedom / generator.chisquare(freedom, _DRAWS))
    return kept * apart[:, None], np.sqrt(kept) * wider * drawn


def _chance(drawn: Array, best: int) -> float:
    """The share of draws in which this one is best; ties are shared."""
    top = drawn == drawn.max(0)
    return float((top[best] / top.sum(0)).mean())


def _needed(middle: Array, deviations: Array, best: int, count: int, wanted: float) -> int | None:
    """By bisection: deviations shrink with the root of the trials, and middles stay."""

    def enough(trials: int) -> bool:
        return _chance(middle + deviations * math.sqrt(count / trials), best) >= wanted

    low, high = 1, _MOST_TRIALS
    if not enough(high):
        return None
    while high - low > 1:
        between = (low + high) // 2
        low, high = (low, between) if enough(between) else (between, high)
    return high
