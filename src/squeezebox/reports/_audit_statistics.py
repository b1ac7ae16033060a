"""Finished trainings: their spread, churn and distance, and whether two ways give the same. No scipy.

Figures after Zhuang et al., "Randomness in neural network training" (MLSys 2022, section 3): standard
deviation of the top line, churn (the share of samples on which two models disagree), and the L2 distance of
weights normalised to length 1. Intervals are percentile bootstraps over trainings, 95 %.
"""

from __future__ import annotations

import functools
import io
import math
import os
import statistics
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from squeezebox.schema import FormatError, write_whole

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


def paired_limit(differences: Sequence[float], level: float) -> float:
    """The upper limit of the mean of paired differences, which holds with 1 - ``level``, by Student's t.

    Of differences that are equal but for rounding it is infinite, as long as so few may be equal by chance.
    """
    count, mean, deviation = len(differences), statistics.fmean(differences), statistics.stdev(differences)
    if deviation <= 1e-9 * max(abs(mean), 1e-300):
        return mean if 2.0**-count < level else math.inf
    return mean + t_quantile(1 - level, count - 1) * deviation / math.sqrt(count)


_ARRAYS = ("predictions", "targets", "groups", "weights")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AuditRecord:
    """What a training gave: n predicted classes, their targets, and k numbers that stand for its weights.

    ``series`` names what varied: "everything", one factor, or "control". ``groups`` has a name for each
    sample, or is empty. ``weights`` are normalised to length 1; of models with more than 65,536 parameters a
    sketch. ``digest`` is equal where all parameters, buffers and outputs are equal to the bit. ``steps`` are
    those of the optimizer; 0 where the training gave none.
    """

    arm: str
    series: str
    seed: int
    predictions: NDArray[np.int64]
    targets: NDArray[np.int64]
    groups: NDArray[np.str_]
    weights: NDArray[np.float32]
    score: float
    finite: bool
    digest: str
    seconds: float
    steps: int = 0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file whole or not at all; OutputError if the path cannot be written."""
        content = io.BytesIO()
        np.savez(content, **{name: getattr(self, name) for name in AuditRecord.__slots__})
        write_whole(path, content.getvalue())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AuditRecord:
        """What :meth:`save` wrote; FormatError if the file is damaged or of something else."""
        try:
            with np.load(io.BytesIO(Path(path).read_bytes()), allow_pickle=False) as file:
                values = {
                    name: file[name] if name in _ARRAYS else file[name].item()
                    for name in cls.__slots__
                    if name in file or name != "steps"  # which earlier files have not
                }
        except (OSError, ValueError, KeyError, EOFError, NotImplementedError, zipfile.BadZipFile) as error:
            raise FormatError(
                f"{path} is no finished training of an audit ({error}). Delete it, and the audit "
                "will train it again."
            ) from error
        return cls(**values)


_RESAMPLES = 2000
Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A statistic with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PartChange:
    """A class's or a group's accuracy in the plain arm and in another, over seeds.

    ``adjusted_p`` is that of a paired t test, after Holm over all parts of its kind.
    """

    name: str
    samples: int
    plain: float
    plain_deviation: float
    arm: float
    arm_deviation: float
    adjusted_p: float


def scores(records: Sequence[AuditRecord]) -> Array:
    """The top line of every training."""
    return np.array([record.score for record in records])


def deviation(values: Array) -> float:
    """Sample standard deviation; exactly 0.0 of equal values and of fewer than two."""
    return 0.0 if len(values) < 2 or np.ptp(values) == 0.0 else float(values.std(ddof=1))


def churn(first: AuditRecord, second: AuditRecord) -> float:
    """Share of samples that two models put into different classes."""
    return float((first.predictions != second.predictions).mean())


def distance(first: AuditRecord, second: AuditRecord) -> float:
    """L2 distance of the normalised weights; 0 to 2. Of sketches within 1 % or so."""
    return float(np.linalg.norm(first.weights.astype(np.float64) - second.weights))


def pairwise(records: Sequence[AuditRecord], measure: Callable[[AuditRecord, AuditRecord], float]) -> Array:
    """The symmetric matrix of ``measure`` over all pairs of trainings."""
    matrix = np.zeros((len(records), len(records)))
    for row, first in enumerate(records):
        for column in range(row):
            matrix[row, column] = matrix[column, row] = measure(first, records[column])
    return matrix


def bootstrap(count: int, statistic: Callable[[NDArray[np.int64]], float]) -> Figure:
    """``statistic`` of the indices 0 to ``count`` - 1, and its percentile interval over resampled ones.

    All are NaN where the statistic is: of diverged trainings, or of pairs where there is one training.
    """
    generator, value = np.random.default_rng(0), statistic(np.arange(count))
    if np.isnan(value):
        return Figure(value=value, low=value, high=value)
    drawn = [statistic(generator.integers(count, size=count)) for _ in range(_RESAMPLES)]
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    return Figure(value=value, low=float(low), high=float(high))


def spread(values: Array) -> Figure:
    """Standard deviation of independent results."""
    return bootstrap(len(values), lambda chosen: deviation(values[chosen]))


def mean(values: Array) -> Figure:
    """Mean of independent results."""
    return bootstrap(len(values), lambda chosen: float(values[chosen].mean()))


def mean_of_pairs(matrix: Array) -> Figure:
    """Mean over pairs of different trainings; resampling draws trainings, not pairs."""

    def statistic(chosen: NDArray[np.int64]) -> float:
        different = chosen[:, None] != chosen
        return float(matrix[np.ix_(chosen, chosen)][different].mean()) if different.any() else np.nan

    return bootstrap(len(matrix), statistic)


def variance_shares(deviations: Mapping[str, float]) -> dict[str, float]:
    """Every factor's variance, varied alone, over their sum; zeros where nothing varies."""
    variances = {name: value**2 for name, value in deviations.items()}
    total = sum(variances.values())
    return {name: value / total if total else 0.0 for name, value in variances.items()}


def sums_of_squares(plain: Array, other: Array) -> dict[str, float]:
    """Shares of two arms' total variation over the same seeds: two-way analysis of variance.

    "seeds" is what both arms have in common, "compression" the difference of their means, and
    "interaction" the rest: how each seed's difference departs from that mean. All are 0 where nothing varies.
    """
    table = np.stack([plain, other])
    # means of equal numbers differ from them in the last bit
    if np.ptp(table) <= 1e-12 * np.abs(table).max():
        return dict.fromkeys(("seeds", "compression", "interaction"), 0.0)
    rows, columns = table.mean(1, keepdims=True), table.mean(0, keepdims=True)
    grand = table.mean()
    squares = {
        "seeds": 2 * float(((columns - grand) ** 2).sum()),
        "compression": len(plain) * float(((rows - grand) ** 2).sum()),
        "interaction": float(((table - rows - columns + grand) ** 2).sum()),
    }
    total = sum(squares.values())
    return {name: value / total if total else 0.0 for name, value in squares.items()}


def part_changes(
    plain: Sequence[AuditRecord], other: Sequence[AuditRecord], labels: NDArray[np.generic]
) -> tuple[PartChange, ...]:
    """Accuracy on every part of the samples in both arms; ``labels`` names each sample's part."""
    names = np.unique(labels)
    mine, theirs = (_accuracies(records, labels, names) for records in (plain, other))
    adjusted = holm([p_different(list(row)) for row in theirs - mine])
    return tuple(
        PartChange(
            name=str(name),
            samples=int((labels == name).sum()),
            plain=float(mine[row].mean()),
            plain_deviation=deviation(mine[row]),
            arm=float(theirs[row].mean()),
            arm_deviation=deviation(theirs[row]),
            adjusted_p=adjusted[row],
        )
        for row, name in enumerate(names)
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p values: all below the level are false with no more than the level's chance (Holm 1979)."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda place: p_values[place])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def _accuracies(
    records: Sequence[AuditRecord], labels: NDArray[np.generic], names: NDArray[np.generic]
) -> Array:
    """Of every part (row) in every training (column)."""
    right = np.stack([record.predictions == record.targets for record in records])
    return np.stack([right[:, labels == name].mean(1) for name in names])
