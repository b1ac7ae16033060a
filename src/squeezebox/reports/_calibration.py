"""A calibration's findings: the loosest level shown to stay within the margin, and what that took."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from squeezebox.reports._audit_statistics import LEVEL, paired_limit, t_quantile
from squeezebox.reports._saved import Saved
from squeezebox.reports._selection import select
from squeezebox.schema import checked

_POWER_QUANTILE = 0.8416  # of the normal distribution at 80 %
_MOST_PAIRS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibratedLevel:
    """One level: its options, and what was measured of it.

    ``screened_loss`` is that of a short run with injected noise. ``losses`` are plain's metric less the
    level's, pair by pair; their mean's 90 % interval is ``low`` to ``high``. ``chance`` is the probability
    that the loss is within the margin, by a paired bootstrap.
    """

    options: Mapping[str, float]
    screened_loss: float | None
    losses: tuple[float, ...]
    loss: float | None
    low: float | None
    high: float | None
    chance: float | None
    shown: bool

    @property
    def name(self) -> str:
        """The options, as in the names of files."""
        return level_name(self.options)


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration(Saved):
    """The loosest options whose metric stays within ``margin`` of plain training's; ``str()`` is a page.

    ``options`` are None where no level was shown. ``spent`` counts whole trainings and the shares of short
    ones. ``trainings_needed`` would show a level without any loss in four of five calibrations; None where it
    is unknown or above 2000. ``facts`` say what was trained.
    """

    KIND, AGAIN = "calibration", "squeezebox.calibrate(...).save(path)"

    facts: Mapping[str, str]
    metric: str
    margin: float
    options: Mapping[str, float] | None
    levels: tuple[CalibratedLevel, ...]
    trainings: int
    spent: float
    trainings_needed: int | None
    notes: tuple[str, ...]

    @property
    def noise(self) -> float | None:
        """The noise among the options, for ``attach(noise=...)``."""
        return None if self.options is None else self.options.get("noise")

    @property
    def shown(self) -> CalibratedLevel | None:
        """The level that was shown."""
        return next((level for level in reversed(self.levels) if level.shown), None)

    @classmethod
    def from_dict(cls, values: Any, where: str = "") -> Calibration:
        """The result of such values; FormatError names the field that is wrong."""
        return cls(**checked(cls, values, where, any_number=True))

    def __str__(self) -> str:
        rows = [["level", "short run", "pairs", "loss", "90 % interval", "P(within)", ""]]
        rows += [_row(level) for level in self.levels]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*_verdict(self), "", *table, *(["", *self.notes] if self.notes else [])])


def level_name(options: Mapping[str, float]) -> str:
    """The options in a few words."""
    return ", ".join(f"{name}={value:g}" for name, value in options.items())


def calibrated_level(
    options: Mapping[str, float],
    screened: float | None,
    losses: Sequence[float],
    margin: float,
    *,
    shown: bool,
) -> CalibratedLevel:
    """A level's figures; without pairs there are none."""
    several = len(losses) > 1
    mirrored = [-loss for loss in losses]
    chance = select({"level": mirrored, "margin": [-margin] * len(losses)}) if several else None
    return CalibratedLevel(
        options=options,
        screened_loss=screened,
        losses=tuple(losses),
        loss=statistics.fmean(losses) if losses else None,
        low=_finite(-paired_limit(mirrored, LEVEL)) if several else None,
        high=_finite(paired_limit(losses, LEVEL)) if several else None,
        chance=None if chance is None else chance.chance if chance.best == "level" else 1 - chance.chance,
        shown=shown,
    )


def pairs_needed(deviation: float, margin: float, level: float) -> int | None:
    """Pairs with which a level without loss is shown in four of five tests; None above 1000."""
    for count in range(3, _MOST_PAIRS + 1):
        if (t_quantile(1 - level, count - 1) + _POWER_QUANTILE) * deviation / math.sqrt(count) < margin:
            return count
    return None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _verdict(found: Calibration) -> list[str]:
    spent = f"{found.spent:.1f} of {found.trainings} trainings"
    shown = found.shown
    if shown is not None:
        return [
            f"{shown.name}: {found.metric} stays within {found.margin:g} of plain training's, shown by "
            f"{len(shown.losses)} pairs ({spent})",
            f"loss {_signed(shown.loss)}, 90 % interval {_signed(shown.low)} to {_signed(shown.high)}",
        ]
    if found.trainings_needed is None:
        more = "how many would is not known"
    else:
        more = f"about {found.trainings_needed} trainings show a level without loss"
    return [
        f"no level is shown to stay within {found.margin:g} of plain training's {found.metric} ({spent}); "
        f"{more}"
    ]


def _row(level: CalibratedLevel) -> list[str]:
    return [
        level.name,
        _signed(level.screened_loss),
        str(len(level.losses) or "-"),
        _signed(level.loss),
        "-" if level.low is None else f"{_signed(level.low)} to {_signed(level.high)}",
        "-" if level.chance is None else f"{level.chance:.0%}",
        "shown" if level.shown else "",
    ]


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.4g}"
