"""Which training comes next in the search for the loosest level, and which levels are shown. No torch.

Losses are in units of the margin, so that a level below 1 is within it. A belief over curves chooses what to
train; a level counts as shown by the paired t test of its own trainings alone, whatever the belief is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from squeezebox.reports import paired_limit, t_quantile

SHARE = 0.1
"""Of a training that a short run takes."""
_EVERY = 2  # second level is screened
_FEWEST = 3  # pairs that a test takes
EARLY, LAST = 0.028, 0.042  # level of a test's earlier looks, which share it, and of its last one
_LATER = 0.5  # of these for levels after the first, since each is another chance to err
_WORTH = 0.02  # least chance to show more that is worth another training
_NEXT = 0.9  # worth of a level next to the loosest
_DECADES = 0.5  # of noise between two levels
_MOST_LOSS = 20.0  # a training that broke
Array = NDArray[np.float64]


@dataclass(kw_only=True, slots=True)
class Searched:
    """What a search has trained and shown: losses in margins, by level from the tightest.

    ``screened`` are of short runs, ``pairs`` of whole ones, pair after pair; ``level`` is the loosest that
    was shown. ``spent`` counts whole trainings and the shares of short ones.
    """

    screened: dict[int, float] = field(default_factory=dict)
    pairs: dict[int, list[float]] = field(default_factory=dict)
    level: int | None = None
    spent: float = 0.0


def least_trainings(levels: int) -> int:
    """Those of a screening and of the fewest pairs that show anything."""
    return math.ceil(2 * _FEWEST + screening(levels))


def search(
    levels: int, trainings: float, screen: Callable[[int], float], train: Callable[[int, int], float]
) -> Searched:
    """Find the loosest level whose loss is below 1.

    Args:
        levels: their number; 0 is the tightest.
        trainings: how many may be spent.
        screen: the loss of a short run with noise of a level, against a short plain run.
        train: the loss of a whole training at a level, against the plain one of the same pair. Plain
            trainings are shared by the levels.
    """
    found, belief = Searched(spent=screening(levels)), _Belief(levels)
    for screened in range(levels - 1, -1, -_EVERY):
        found.screened[screened] = screen(screened)
        belief.screened(screened, found.screened[screened])
    closed = [False] * levels
    early = EARLY / max(1, trainings // 2 - _FEWEST)
    while (level := _next(found, belief, closed, trainings)) is not None:
        pairs = found.pairs.setdefault(level, [])
        if _affordable(found, level, trainings) > len(pairs):
            found.spent += _cost(found, level)
            pairs.append(train(level, len(pairs)))
            belief.paired(level, pairs[-1])
        last = _affordable(found, level, trainings) == len(pairs)
        share = 1.0 if level == next(iter(found.pairs)) else _LATER
        if len(pairs) >= _FEWEST and paired_limit(pairs, share * (LAST if last else early)) < 1.0:
            found.level = level
            closed[: level + 1] = [True] * (level + 1)
        elif last:
            closed[level] = True
    return found


def screening(levels: int) -> float:
    """Trainings that screening takes: a plain short run, and one for every second level."""
    return SHARE * (1 + len(range(levels - 1, -1, -_EVERY)))


def _cost(found: Searched, level: int) -> float:
    """Of the level's next pair: its plain training may be there already."""
    trained = max(map(len, found.pairs.values()), default=0)
    return 1.0 if len(found.pairs.get(level, ())) < trained else 2.0


def _affordable(found: Searched, level: int, trainings: float) -> int:
    """Pairs that a level can have in all with what is left."""
    count, left = len(found.pairs.get(level, ())), trainings - found.spent + 1e-9
    shared = max(map(len, found.pairs.values()), default=0) - count
    return count + int(left if left < shared else shared + (left - shared) // 2)


def _next(found: Searched, belief: _Belief, closed: list[bool], trainings: float) -> int | None:
    """The level that most probably shows more than is shown, if that is worth a training."""
    best: int | None = None
    most = _WORTH
    for level in [level for level in range(len(closed)) if not closed[level]]:
        count = _affordable(found, level, trainings)
        if count >= _FEWEST:
            worth = belief.worth(level, found.pairs.get(level, []), count, found.level)
            if worth > most:
                best, most = level, worth
    return best


class _Belief:
    """How probable each curve of losses is: exp(power * (level - boundary) * step), up to a broken training.

    Besides power and boundary it has the deviation of a pair's loss, and how many times larger a short run's
    loss is.
    """

    def __init__(self, levels: int) -> None:
        axes = np.meshgrid(
            np.linspace(-1.5, levels + 0.5, 4 * levels + 1),
            [0.5, 0.8, 1.1, 1.6, 5.0],  # the last one is a cliff
            [-1.2, -0.6, 0.0, 0.6, 1.2],
            [0.1, 0.2, 0.35, 0.6, 1.0, 2.0, 5.0],
            indexing="ij",
        )
        boundary, power, scale, self._deviation = (axis.ravel() for axis in axes)
        steps = (np.arange(levels) - boundary[:, None]) * _DECADES * math.log(10)
        self._losses = np.minimum(np.exp(np.minimum(power[:, None] * steps, 10.0)), _MOST_LOSS)
        self._within = (self._losses < 1).sum(1)  # levels within the margin
        self._scale = np.exp(scale)
        curves = np.where(power > 4, -1.0, -(((power - 1) / 0.5) ** 2))
        self._logs = curves - scale**2 - 0.5 * np.log(self._deviation / 0.35) ** 2

    def screened(self, level: int, loss: float) -> None:
        self._observe(self._scale * self._losses[:, level], loss)

    def paired(self, level: int, loss: float) -> None:
        self._observe(self._losses[:, level], loss)

    def _observe(self, expected: Array, loss: float) -> None:
        """By Student's density with 5 degrees of freedom, for one pair far off not to decide."""
        distance = (loss - expected) / self._deviation
        self._logs -= np.log(self._deviation) + 3 * np.log1p(distance**2 / 5)

    def worth(self, level: int, pairs: list[float], count: int, shown: int | None) -> float:
        """How much nearer to the truth ``level`` comes, if ``count`` pairs show it, times that chance."""
        weights = np.exp(self._logs - self._logs.max())
        gain = self._near(level) - (0.0 if shown is None else self._near(shown))
        left = count - len(pairs)
        if left == 0:
            chance = np.full(len(weights), float(paired_limit(pairs, LAST) < 1.0))
        else:
            mean = (sum(pairs) + left * self._losses[:, level]) / count
            least = 1 - t_quantile(1 - LAST, count - 1) * self._deviation / math.sqrt(count) - mean
            chance = _normal(least / (self._deviation * math.sqrt(left) / count))
        return float((weights * chance * gain).sum() / weights.sum())

    def _near(self, level: int) -> Array:
        """1 where the level is the loosest within the margin, less where it is the next, and so on."""
        beyond = self._within - level
        tighter = 0.5 * (level + 1) / self._within.clip(1)
        return np.where(beyond <= 1, 1.0, np.where(beyond == 2, _NEXT, tighter))


def _normal(x: Array) -> Array:
    """The normal distribution, within 1e-2: logistic."""
    return 1 / (1 + np.exp(np.clip(-1.702 * x, -50, 50)))
