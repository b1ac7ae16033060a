"""Which of several settings is best, where every measurement of them is noisy: chance, regret, trials needed.

The one that measures best is chosen by its luck too, the more so the more settings there are. So the means
are drawn from a belief that pulls them together as far as their spread may be noise, and that trusts
outliers less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from squeezebox.schema import OptionError

_CHAINS, _SETTLING, _KEPT = 100, 30, 40  # 4,000 draws: a chance within 0.8 percentage points
_MOST_TRIALS = 1000
_RATIOS = np.geomspace(0.1, 50, 50) ** 2  # of the means' spread to the noise of a mean, squared
_FREEDOMS = np.array([3.0, 6.0, 50.0])  # of the noise: heavy tails, lighter ones, nearly normal
_LOG_GAMMAS = np.array([math.lgamma(freedom / 2) for freedom in _FREEDOMS])
Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The setting that is most probably best, after ``trials`` paired trials of each.

    ``chance`` is the probability that it is, ``regret`` how much worse than the best it is expected to
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
    drawn = _draws(-table if smaller_is_better else table)
    chances = [_chance(drawn, place) for place in range(len(names))]
    best = int(np.argmax(chances))
    return Selection(
        best=names[best],
        trials=table.shape[1],
        means=dict(zip(names, map(float, means), strict=True)),
        chance=chances[best],
        regret=float((drawn.max(0) - drawn[best]).mean()),
        wanted=wanted,
        trials_needed=_needed(drawn, best, table.shape[1], wanted),
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


def _draws(table: Array) -> Array:
    """What the settings' means may be, ``[settings, draws]``: a Gibbs sampler, many chains side by side.

    A measurement is its setting's mean, its trial's own part, and noise: normal, of a variance that an
    element divides by a weight of Gamma(f / 2, f / 2), which makes it Student's t of f degrees (Geweke 1993).
    f is one of three. Settings' means are normal about 0 with a deviation t that is sqrt(r) times the noise's
    of a mean; t has a density of 1 / sqrt(t), between one flat in t and one flat in its logarithm.
    """
    generator = np.random.default_rng(0)
    (settings, count), chains = table.shape, (_CHAINS, 1)
    rows = table.mean(1)
    rows = rows - rows.mean()
    residuals = table - table.mean(0) - rows[:, None]
    variance = float((residuals**2).sum()) / ((settings - 1) * (count - 1))
    if variance <= 1e-24 * float((table**2).max()):  # measurements that do not vary
        return np.repeat(rows[:, None], _CHAINS * _KEPT, axis=1)
    table = table / math.sqrt(variance)
    means = rows / math.sqrt(variance) * generator.uniform(size=chains)
    variances = np.ones(chains)
    weights, freedom = np.ones((_CHAINS, settings, count)), np.full(chains, _FREEDOMS[-1])
    kept = np.empty((_KEPT, _CHAINS, settings))
    for step in range(_SETTLING + _KEPT):
        within = weights / variances[..., None]
        total = within.sum(1)
        seeds = (within * (table - means[..., None])).sum(1) / total
        seeds += generator.normal(size=seeds.shape) / np.sqrt(total)
        spread = variances / count * _RATIOS
        odds = np.log(_RATIOS) / 4 - settings / 2 * np.log(spread) - (means**2).sum(1)[:, None] / (2 * spread)
        ratio = _RATIOS[_drawn(odds, generator)][:, None]
        total = within.sum(2) + count / (variances * ratio)
        means = (within * (table - seeds[:, None])).sum(2) / total
        means += generator.normal(size=means.shape) / np.sqrt(total)
        squares = (table - means[..., None] - seeds[:, None]) ** 2
        sums = (weights * squares).sum((1, 2)) + (means**2).sum(1) * count / ratio[:, 0]
        variances = (sums / 2 / generator.gamma(settings * (count + 1) / 2, size=_CHAINS))[:, None]
        gamma = generator.gamma((freedom[..., None] + 1) / 2, size=weights.shape)
        weights = 2 * gamma / (freedom[..., None] + squares / variances[..., None])
        halves = _FREEDOMS / 2
        odds = settings * count * (halves * np.log(halves) - _LOG_GAMMAS)
        odds = odds + (halves - 1) * np.log(weights).sum((1, 2))[:, None]
        odds = odds - halves * weights.sum((1, 2))[:, None]
        freedom = _FREEDOMS[_drawn(odds, generator)][:, None]
        if step >= _SETTLING:
            kept[step - _SETTLING] = means
    drawn: Array = kept.reshape(-1, settings).T * math.sqrt(variance)
    return drawn


def _drawn(odds: Array, generator: np.random.Generator) -> NDArray[np.intp]:
    """A place in each row, by the logarithms of its odds: the largest one after Gumbel's noise."""
    place: NDArray[np.intp] = (odds + generator.gumbel(size=odds.shape)).argmax(1)
    return place


def _chance(drawn: Array, best: int) -> float:
    """The share of draws in which this one is best; ties are shared."""
    top = drawn == drawn.max(0)
    return float((top[best] / top.sum(0)).mean())


def _needed(drawn: Array, best: int, count: int, wanted: float) -> int | None:
    """By bisection: deviations shrink with the root of the trials, and middles stay."""
    middle = drawn.mean(1, keepdims=True)
    deviations = drawn - middle

    def enough(trials: int) -> bool:
        return _chance(middle + deviations * math.sqrt(count / trials), best) >= wanted

    low, high = 1, _MOST_TRIALS
    if not enough(high):
        return None
    while high - low > 1:
        between = (low + high) // 2
        low, high = (low, between) if enough(between) else (between, high)
    return high
