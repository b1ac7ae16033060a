"""The calibration: the loosest noise that a training's own metric bears, from few trainings."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from squeezebox import codecs
from squeezebox.auditing._folder import claim, path_of, require_same_samples, train_and_save
from squeezebox.auditing._run import ATTACH, RunKey, ShortRun, TrainFunction
from squeezebox.auditing._search import LAST, SHARE, Searched, least_trainings, screening, search
from squeezebox.reports import (
    EVERYTHING,
    AuditRecord,
    Calibration,
    calibrated_level,
    level_name,
    pairs_needed,
)
from squeezebox.schema import OptionError
from squeezebox.steps import Progress

KNOBS = ("noise", "update_noise")
METRICS = ("accuracy", "score")
_NOISE = {"noise": (1e-4, 0.3)}
_PLAIN = "plain"
_FIRST = 1  # seed of whole trainings; short ones have 0, so that what chooses a level does not also test it


def calibrate(
    train: TrainFunction,
    *,
    metric: str = "accuracy",
    margin: float = 0.01,
    knobs: Mapping[str, tuple[float, float]] | None = None,
    trainings: int = 14,
    out: str | os.PathLike[str] = "calibration",
    threads: int | None = None,
    on_progress: Progress | None = None,
) -> Calibration:
    """Find the loosest noise with which a training's metric stays within a margin of plain training's.

    Levels lie half a decade apart. Short runs with noise in their gradients screen them; pairs of whole
    trainings, plain and squeezed with one seed, then show a level or lead to a tighter one. A level is shown
    where a paired t test rejects, at 5 % over its looks, that it loses the margin or more.

    Args:
        train: a whole training, as for :func:`squeezebox.audit`. ``run.attach`` must be given the optimizer.
        metric: "accuracy" of the held-out samples, or the "score" that ``run.finish`` is given. Larger is
            better.
        margin: the loss of the metric that is too much, in its own unit.
        knobs: the tightest and loosest value of each, all loosened together: "noise" and "update_noise" of
            attach, and any of your own, which ``train`` reads by ``run.knob(name)``: the noise of a gradient
            exchange, say. Default: noise from 1e-4 to 0.3.
        trainings: the most that are made; a short run counts a tenth.
        out: a folder for finished trainings, as for the audit. Those found there are not trained again.
        threads: of torch (default: those of the trainings in ``out``, else the cores).
        on_progress: called with (done, total, what was done).

    Returns:
        The level with its interval, and what was measured of the others; ``str()`` is a page.

    Raises:
        OptionError: an argument is out of range; ``out`` holds trainings of another request; ``train`` does
            not return ``run.finish(...)``, gives no optimizer, or trains alike whatever its seed is.
        OutputError: ``out`` cannot be written.
    """
    ranges = _NOISE if knobs is None else knobs
    _check(metric, margin, ranges, threads)
    levels = _levels(ranges)
    least = least_trainings(len(levels))
    if trainings < least:
        raise OptionError(
            f"trainings {trainings} is below {least}, which screening {len(levels)} levels and three pairs "
            f"of one take; give {least} or more."
        )
    for dtype in (torch.float32, torch.bfloat16):  # every training packs from its first step on
        codecs.require(dtype)
    folder = Path(out)
    arms = {_PLAIN: None, **{level_name(options): options for options in levels}}
    request = claim(folder, train, arms, threads, workers=1)
    trainer = _Trainer(train, folder, levels, metric, request.threads, trainings, on_progress)
    found = search(
        len(levels),
        trainings,
        lambda level: trainer.screened(level) / margin,
        lambda level, pair: trainer.paired(level, pair) / margin,
    )
    facts = {
        "train": request.train,
        "threads": str(request.threads),
        "torch": request.torch,
        "device": request.device,
    }
    notes = tuple(_notes(found, [level_name(options) for options in levels], trainer.equal))
    return _calibration(found, levels, metric, margin, trainings, facts, notes)


def _check(metric: str, margin: float, knobs: Mapping[str, tuple[float, float]], threads: int | None) -> None:
    unknown = sorted((set(knobs) & ATTACH) - set(KNOBS))
    wrong_ranges = [name for name, ends in knobs.items() if not _is_range(ends)]
    checks = (
        (metric not in METRICS, f"metric {metric!r} is none of {', '.join(METRICS)}."),
        (not 0.0 < margin < math.inf, f"margin {margin} is not finite and above 0; give 0.01 for one point."),
        (not knobs, 'there is no knob; give knobs={"noise": (1e-4, 0.3)}.'),
        (
            bool(unknown),
            f"knob {unknown[:1]} is an option of attach that is no noise; give {', '.join(KNOBS)}, or one of "
            "your own that the training reads by run.knob(name).",
        ),
        (
            bool(wrong_ranges),
            f"knobs {dict(knobs)}: give {', '.join(wrong_ranges)} as (tightest, loosest), both above 0.",
        ),
        (threads is not None and threads < 1, f"threads {threads} is below 1."),
    )
    for wrong, message in checks:
        if wrong:
            raise OptionError(message)


def _is_range(ends: object) -> bool:
    if not isinstance(ends, tuple | list) or [type(end) in (int, float) for end in ends] != [True, True]:
        return False
    return bool(0.0 < ends[0] < ends[1] < math.inf)


def _levels(knobs: Mapping[str, tuple[float, float]]) -> list[dict[str, float]]:
    """From the tightest corner of the ranges to the loosest, along the diagonal, by half decades."""
    count = 1 + max(1, *(round(2 * math.log10(high / low)) for low, high in knobs.values()))
    values = {
        name: [low, *(_rounded(value, low, high) for value in np.geomspace(low, high, count)[1:-1]), high]
        for name, (low, high) in knobs.items()
    }
    return [{name: values[name][level] for name in knobs} for level in range(count)]


def _rounded(value: float, low: float, high: float) -> float:
    """To two digits, within the range."""
    return min(max(low, float(f"{value:.2g}")), high)


class _Trainer:
    """Makes the trainings that a search asks for, and keeps each in the folder."""

    def __init__(
        self,
        train: TrainFunction,
        folder: Path,
        levels: Sequence[Mapping[str, float]],
        metric: str,
        threads: int,
        trainings: int,
        on_progress: Progress | None,
    ) -> None:
        self._train, self._folder, self._levels = train, folder, levels
        self._metric, self._threads = metric, threads
        self._trainings, self._on_progress = trainings, on_progress
        self._records: dict[RunKey, AuditRecord] = {}
        self.equal: dict[int, bool] = {}  # levels whose every pair is equal to the bit
        self._spent = 0.0

    def screened(self, level: int) -> float:
        """The metric of a short plain run less that of one with the level's noise in its gradients."""
        steps = max(1, round(SHARE * self._whole_steps()))
        noise = sum(self._levels[level].values())
        arm = f"injected {level_name(self._levels[level])}"
        plain, noisy = (
            self._record(RunKey(arm=name, series=f"first-{steps}", seed=0), None, short)
            for name, short in (
                (_PLAIN, ShortRun(steps=steps)),
                (arm, ShortRun(steps=steps, noise=noise)),
            )
        )
        return self._value(plain) - self._value(noisy)

    def paired(self, level: int, pair: int) -> float:
        """The metric of a whole plain training less the level's, of one seed."""
        plain = self._plain(pair)
        if pair == 1 and plain.digest == self._plain(0).digest:
            raise OptionError(
                "the plain trainings of two seeds are equal to the bit, so all pairs would tell the same. "
                "Make "
                "the model within run.initialising(), and draw the data's order from run.order."
            )
        options = self._levels[level]
        key = RunKey(arm=level_name(options), series=EVERYTHING, seed=_FIRST + pair)
        squeezed = self._record(key, options)
        self.equal[level] = self.equal.get(level, True) and squeezed.digest == plain.digest
        return self._value(plain) - self._value(squeezed)

    def _plain(self, pair: int) -> AuditRecord:
        return self._record(RunKey(arm=_PLAIN, series=EVERYTHING, seed=_FIRST + pair), None)

    def _whole_steps(self) -> int:
        steps = self._plain(0).steps
        if not steps:
            raise OptionError(
                "the training gave run.attach no optimizer, whose steps a short run counts; write "
                "run.attach(model, optimizer)."
            )
        return steps

    def _value(self, record: AuditRecord) -> float:
        if self._metric == "score":
            return record.score
        return float((record.predictions == record.targets).mean())

    def _record(
        self, key: RunKey, options: Mapping[str, float] | None, short: ShortRun | None = None
    ) -> AuditRecord:
        if key in self._records:
            return self._records[key]
        path = path_of(self._folder, key)
        if not path.exists():
            train_and_save(self._train, key, options, self._threads, path, short)
        record = AuditRecord.load(path)
        first = next(iter(self._records), key)
        require_same_samples(first, self._records.get(first, record), key, record)
        self._records[key] = record
        self._spent += 1.0 if short is None else SHARE
        if self._on_progress is not None:
            self._on_progress(min(round(self._spent), self._trainings), self._trainings, str(key))
        return record


def _calibration(
    found: Searched,
    levels: Sequence[Mapping[str, float]],
    metric: str,
    margin: float,
    trainings: int,
    facts: Mapping[str, str],
    notes: tuple[str, ...],
) -> Calibration:
    losses = {level: [margin * loss for loss in pairs] for level, pairs in found.pairs.items()}
    return Calibration(
        facts=facts,
        metric=metric,
        margin=margin,
        options=None if found.level is None else levels[found.level],
        levels=tuple(
            calibrated_level(
                options,
                margin * found.screened[level] if level in found.screened else None,
                losses.get(level, []),
                margin,
                shown=level == found.level,
            )
            for level, options in enumerate(levels)
        ),
        trainings=trainings,
        spent=found.spent,
        trainings_needed=_trainings_needed(losses, margin, len(levels)),
        notes=notes,
    )


def _trainings_needed(losses: Mapping[int, Sequence[float]], margin: float, levels: int) -> int | None:
    """By the deviation of the tightest level that has one; with the screening."""
    tightest = next((pairs for _, pairs in sorted(losses.items()) if len(pairs) > 1), None)
    if tightest is None:
        return None
    pairs = pairs_needed(statistics.stdev(tightest), margin, LAST)
    return None if pairs is None else math.ceil(2 * pairs + screening(levels))


def _notes(found: Searched, names: Sequence[str], equal: Mapping[int, bool]) -> Iterator[str]:
    if found.level == len(names) - 1:
        yield "the loosest level of the range is shown: a looser one may be within the margin too."
    for level, losses in found.pairs.items():
        if equal[level]:
            yield f"{names[level]} equals plain to the bit in every pair: compression changed nothing in it."
        elif len(losses) > 1 and len(set(losses)) == 1:
            yield (
                f"all pairs of {names[level]} differ by the same: the metric is coarse. Hold out more "
                "samples, or give run.finish a finer score."
            )
