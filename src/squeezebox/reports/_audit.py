"""An audit's findings: figures from finished trainings, as text and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from squeezebox.reports import _audit_statistics as statistics
from squeezebox.reports._audit_statistics import (
    AuditRecord,
    Equivalence,
    Figure,
    PartChange,
    deviation_uncertainty,
    equivalence,
    seeds_needed,
)
from squeezebox.reports._saved import Saved
from squeezebox.schema import checked

EVERYTHING, CONTROL, IMPLEMENTATION = "everything", "control", "implementation"


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlPair:
    """The same training twice. ``first_unequal`` says where they part, if that was looked for."""

    arm: str
    equal: bool
    churn: float
    distance: float
    first_unequal: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesSpread:
    """How far trainings of one arm differ when one factor, or everything, varies."""

    arm: str
    varied: str
    runs: int
    distinct: int
    score: float
    deviation: Figure
    churn: Figure
    distance: Figure


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmComparison:
    """An arm against the first one, over the same seeds.

    ``churn`` and ``distance`` are between the two arms' trainings of one seed. ``exceeds_tooling`` says
    whether that churn is above what varying the implementation alone makes; None where their intervals
    overlap, or fewer than three trainings varied in that. ``shares`` are those of the top line's variation.
    ``diverged`` counts the arm's trainings with NaN or infinity in outputs or weights.
    """

    arm: str
    difference: Figure
    test: Equivalence
    seeds_needed: int | None
    churn: Figure
    distance: Figure
    exceeds_tooling: bool | None
    shares: Mapping[str, float]
    classes: tuple[PartChange, ...]
    groups: tuple[PartChange, ...]
    diverged: int

    @property
    def verdict(self) -> str:
        """The test in a few words."""
        if self.diverged:
            return f"diverged in {self.diverged} of {self.test.count}"
        if self.test.equivalent:
            return "there, but below the noise" if self.test.different else "below the noise"
        if not self.test.different:
            return "not decided"
        return f"{'better' if self.difference.value > 0 else 'worse'}, and not shown to be below the noise"


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditedOperator:
    """An operator run again on the same inputs, right where it stood.

    ``unequal`` counts, for each way it was repeated, the calls whose outputs were not equal to the bit;
    ``deterministic_seconds`` and ``seconds`` are medians over its calls, with and without
    ``torch.use_deterministic_algorithms``.
    """

    name: str
    calls: int
    unequal: Mapping[str, int]
    deterministic_seconds: float
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """Median seconds of a plain arm's training step with deterministic algorithms and without."""

    steps: int
    deterministic_seconds: float
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit(Saved):
    """Whether compression changes a training more than its tooling does. ``str()`` is a page of text.

    ``facts`` say what was trained; ``factor_shares`` is each factor's variance, varied alone, over their sum.
    """

    KIND, AGAIN = "audit", "squeezebox.audit(...).save(path)"

    facts: Mapping[str, Any]
    controls: tuple[ControlPair, ...]
    series: tuple[SeriesSpread, ...]
    factor_shares: Mapping[str, float]
    comparisons: tuple[ArmComparison, ...]
    operators: tuple[AuditedOperator, ...] = ()
    cost: StepCost | None = None
    notes: tuple[str, ...] = ()

    @property
    def sound(self) -> bool:
        """Whether every control was bitwise zero."""
        return all(control.equal for control in self.controls)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with each comparison's verdict; None for NaN and infinity, which JSON has not."""
        values: dict[str, Any] = dataclasses.asdict(self)
        for comparison, plain in zip(self.comparisons, values["comparisons"], strict=True):
            plain["verdict"] = comparison.verdict
        return {name: _finite(value) for name, value in values.items()} | {"sound": self.sound}

    @classmethod
    def from_dict(cls, values: Any, where: str = "") -> Audit:
        """The result of such values, NaN for null; FormatError names the field that is wrong."""
        if isinstance(values, dict):  # what follows from the rest
            values.pop("sound", None)
            comparisons = values.get("comparisons")
            for each in comparisons if isinstance(comparisons, list) else ():
                if isinstance(each, dict):
                    each.pop("verdict", None)
        return cls(**checked(cls, values, where, any_number=True))

    def __str__(self) -> str:
        from squeezebox.reports._audit_text import audit_text

        return audit_text(self)


def analyse(records: Sequence[AuditRecord], margin: float, facts: Mapping[str, Any]) -> Audit:
    """Everything that finished trainings tell.

    Args:
        records: of the first arm in every series, and of the others where there are some. Trainings of
            "everything" pair by their seeds; seed 0 of it begins every factor's series and is what the
            control repeats.
        margin: of the equivalence test, in standard deviations of the first arm's score between seeds.
        facts: what goes into the findings as it is.
    """
    arms = list(dict.fromkeys(record.arm for record in records))
    by_series = _by_series(records)
    series = [_spread(*key, found) for key, found in by_series.items() if key[1] != CONTROL]
    plain = by_series[arms[0], EVERYTHING]
    # two trainings are one pair, which has no interval
    tooling = next((each.churn for each in series if each.varied == IMPLEMENTATION and each.runs > 2), None)
    factors = {each.varied: each.deviation.value for each in series if each.varied != EVERYTHING}
    return Audit(
        facts={**facts, "margin": margin},
        controls=tuple(_control(arm, by_series) for arm in arms if (arm, CONTROL) in by_series),
        series=tuple(series),
        factor_shares=statistics.variance_shares(factors),
        comparisons=tuple(_compare(plain, by_series[arm, EVERYTHING], margin, tooling) for arm in arms[1:]),
        notes=tuple(_notes(records, series, by_series)),
    )


def _by_series(records: Sequence[AuditRecord]) -> dict[tuple[str, str], list[AuditRecord]]:
    """By arm and series, each in order of seeds; seed 0 of everything begins every factor's series."""
    found: dict[tuple[str, str], list[AuditRecord]] = {}
    for record in sorted(records, key=lambda record: record.seed):
        found.setdefault((record.arm, record.series), []).append(record)
    for (arm, series), members in found.items():
        if series != EVERYTHING:
            members.insert(0, found[arm, EVERYTHING][0])
    return found


def _spread(arm: str, varied: str, records: Sequence[AuditRecord]) -> SeriesSpread:
    values = statistics.scores(records)
    return SeriesSpread(
        arm=arm,
        varied=varied,
        runs=len(records),
        distinct=len({record.digest for record in records}),
        score=float(values.mean()),
        deviation=statistics.spread(values),
        churn=statistics.mean_of_pairs(statistics.pairwise(records, statistics.churn)),
        distance=statistics.mean_of_pairs(statistics.pairwise(records, statistics.distance)),
    )


def _control(arm: str, by_series: Mapping[tuple[str, str], Sequence[AuditRecord]]) -> ControlPair:
    first, second = by_series[arm, CONTROL][:2]
    return ControlPair(
        arm=arm,
        equal=first.digest == second.digest,
        churn=statistics.churn(first, second),
        distance=statistics.distance(first, second),
    )


def _compare(
    plain: Sequence[AuditRecord], other: Sequence[AuditRecord], margin: float, tooling: Figure | None
) -> ArmComparison:
    mine, theirs = statistics.scores(plain), statistics.scores(other)
    spread = statistics.deviation(mine)
    test = equivalence(
        list(theirs - mine),
        margin * spread,
        margin_uncertainty=margin * deviation_uncertainty(spread, len(plain)),
    )
    pairs = list(zip(plain, other, strict=True))
    churn = statistics.mean(np.array([statistics.churn(*pair) for pair in pairs]))
    return ArmComparison(
        arm=other[0].arm,
        difference=statistics.mean(theirs - mine),
        test=test,
        seeds_needed=seeds_needed(test.deviation, spread, margin) if spread else None,
        churn=churn,
        distance=statistics.mean(np.array([statistics.distance(*pair) for pair in pairs])),
        exceeds_tooling=_exceeds(churn, tooling),
        shares=statistics.sums_of_squares(mine, theirs),
        classes=statistics.part_changes(plain, other, plain[0].targets),
        groups=statistics.part_changes(plain, other, plain[0].groups) if plain[0].groups.size else (),
        diverged=sum(not record.finite for record in other),
    )


def _exceeds(churn: Figure, tooling: Figure | None) -> bool | None:
    """Whether it does; None where the two intervals overlap."""
    if tooling is None or tooling.low <= churn.high and churn.low <= tooling.high:
        return None
    return churn.low > tooling.high


def _notes(
    records: Sequence[AuditRecord],
    series: Sequence[SeriesSpread],
    by_series: Mapping[tuple[str, str], Sequence[AuditRecord]],
) -> Iterator[str]:
    broken = [record for record in records if not record.finite]
    if broken:
        named = ", ".join(f"{record.arm} {record.series} {record.seed}" for record in broken[:5])
        yield f"NaN or infinite outputs or weights in {len(broken)} of {len(records)}: {named}."
    arms = dict.fromkeys(each.arm for each in series)
    for arm in (arm for arm in arms if arm not in {record.arm for record in broken}):
        still = [each.varied for each in series if each.arm == arm and each.distinct == 1 and each.runs > 1]
        if still:
            yield (
                f"varying {' and '.join(still)} changed nothing in {arm}, to the bit: the training does not "
                "depend on it, or draws from elsewhere (run.initialising() and run.order are for the first "
                "two factors)."
            )
    for each in series:
        if each.varied == EVERYTHING and 1 < each.distinct < each.runs:
            yield (
                f"of {each.runs} trainings of {each.arm} with seeds of their own only {each.distinct} "
                "differ, so the deviation is none between seeds: let run.initialising() and run.order decide "
                "what they draw."
            )
    plain, *others = arms
    for arm in others:
        pairs = zip(by_series[plain, EVERYTHING], by_series[arm, EVERYTHING], strict=True)
        if all(one.digest == other.digest for one, other in pairs):
            yield f"{arm} equals {plain} to the bit in every training: compression changed nothing in it."


def _finite(value: Any) -> Any:
    """The same with None for every number that is not."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
