"""Steps of any batch, from those profiled at a few, and what fits a budget."""

from __future__ import annotations

import contextlib

import torch

from squeezebox import planner
from squeezebox.planning._choices import fits
from squeezebox.planning._plans import plain_peak, planned
from squeezebox.planning._slicing import Slices
from squeezebox.reports import BatchPoint, StepPlan
from squeezebox.schema import Budget, BudgetError, StepProfile
from squeezebox.steps import TrainingStep

_POINTS = 4  # of the frontier, in addition to the answer


class Batches:
    """A step's step at any batch: whole or in slices, as at the batches that are ``known``.

    Args:
        step: of a batch that plain training can hold: there, slices are measured.
        known: profiles by batch; more may be added.
        is_run: see :class:`Slices`.
    """

    def __init__(self, step: TrainingStep, known: dict[int, StepProfile], *, is_run: bool) -> None:
        self.known = known
        self._noise, self._slices = step.noise, Slices(step, is_run=is_run)

    def fits(self, size: int, limit: int) -> bool:
        """Whether any plan for that batch does."""
        whole, budget = planner.at_batch(self.known, size), Budget(peak_bytes=limit, noise=self._noise)
        if fits(whole, budget):
            return True
        for region in whole.regions:
            free = planner.in_slices(whole, planner.free_slices(region))
            if not fits(free, budget):
                continue
            ways = reversed(self._slices.predicted(whole, region, size))
            if any(fits(way, budget) for way in ways):
                return True
        return False

    def largest(self, limit: int, start: int, below: int | None = None) -> int:
        """The largest batch that fits; 0 if none does."""
        return planner.largest_batch(
            lambda size: (below is None or size < below) and self.fits(size, limit), start
        )

    def plain(self, limit: int) -> int:
        """The largest batch that plain training would hold."""
        return planner.largest_batch(lambda size: self.plain_peak(size) <= limit)

    def plain_peak(self, size: int) -> int:
        """Of a step of that batch with every tensor kept."""
        return plain_peak(planner.at_batch(self.known, size))

    def plan(self, model: torch.nn.Module, size: int, limit: int, *, predicted: bool = False) -> StepPlan:
        """The fastest for that batch, without a run of it if ``predicted``; BudgetError if none fits."""
        whole = planner.at_batch(self.known, size)
        slices = self._slices.predicting() if predicted else self._slices
        return planned(model, whole, limit, self._noise, size, slices=slices)

    def frontier(
        self, model: torch.nn.Module, answer: int, plan: StepPlan, limit: int
    ) -> tuple[BatchPoint, ...]:
        """Batches from plain training's to the answer, and what the fastest plan of each takes."""
        first = max(min(self.plain(limit), answer), 1)
        ratio = answer / first
        sizes = {round(first * ratio ** (step / _POINTS)) for step in range(_POINTS)} - {answer}
        points = []
        for size in sorted(sizes):
            with contextlib.suppress(BudgetError):  # a smaller batch may be planned worse
                points.append(_point(size, self.plan(model, size, limit, predicted=True)))
        return (*points, _point(answer, plan))


def _point(size: int, plan: StepPlan) -> BatchPoint:
    return BatchPoint(
        batch=size,
        peak_bytes=plan.predicted_peak_bytes,
        time_ratio=plan.predicted_seconds / plan.plain_seconds,
    )
