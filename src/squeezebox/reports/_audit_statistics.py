"""Spread, churn and distance of trainings that differ in one thing or another.

Figures after Zhuang et al., "Randomness in neural network training" (MLSys 2022, section 3): standard
deviation of the top line, churn (the share of samples on which two models disagree), and the L2 distance of
weights normalised to length 1. Intervals are percentile bootstraps over trainings, 95 %.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from squeezebox.reports._audit_runs import AuditRecord
from squeezebox.reports._equivalence import p_different

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
