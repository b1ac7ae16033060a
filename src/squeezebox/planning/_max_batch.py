"""Steps of any batch, from those profiled at a few, and the largest whose plan fits a budget."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from squeezebox import planner
from squeezebox.memory import free_bytes, within_room
from squeezebox.planning._choices import fits
from squeezebox.planning._kinds import check_kinds
from squeezebox.planning._plans import plain_peak, plannable, planned, size_named
from squeezebox.planning._profiles import profile_step
from squeezebox.planning._slicing import Slices
from squeezebox.planning._states import accumulating
from squeezebox.reports import BatchPoint, MaxBatch, StepPlan
from squeezebox.schema import Budget, BudgetError, OptionError, StepProfile
from squeezebox.steps import (
    LossFunction,
    Progress,
    TrainingStep,
    batch_of,
    check_sample,
    described,
    device_of,
)

_POINTS = 4  # of the frontier, in addition to the answer


class Batches:
    """A step's step at any batch: whole or in slices, as at the batches that are ``known``.

    Args:
        step: of a batch that plain training can hold: there, slices are measured.
        known: profiles by batch; more may be added.
        is_run: see :class:`Slices`.
        adds_up: whether gradients of an earlier backward are there.
    """

    def __init__(
        self, step: TrainingStep, known: dict[int, StepProfile], *, is_run: bool, adds_up: bool = False
    ) -> None:
        self.known, self.adds_up = known, adds_up
        self._model, self._noise, self._slices = step.model, step.noise, Slices(step, is_run=is_run)

    def _at(self, size: int) -> StepProfile:
        whole = planner.at_batch(self.known, size)
        return accumulating(whole, self._model) if self.adds_up else whole

    def fits(self, size: int, limit: int) -> bool:
        """Whether any plan for that batch does."""
        whole, budget = self._at(size), Budget(peak_bytes=limit, noise=self._noise)
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

    def largest(self, limit: int, start: int, below: int | None = None, *, share: float = 0.0) -> int:
        """The largest batch that fits, or up to ``share`` of it less; 0 if none does."""
        return planner.largest_batch(
            lambda size: (below is None or size < below) and self.fits(size, limit), start, share=share
        )

    def plain(self, limit: int) -> int:
        """The largest batch that plain training would hold."""
        return planner.largest_batch(lambda size: self.plain_peak(size) <= limit)

    def plain_peak(self, size: int) -> int:
        """Of a step of that batch with every tensor kept."""
        return plain_peak(self._at(size))

    def plan(self, model: torch.nn.Module, size: int, limit: int, *, predicted: bool = False) -> StepPlan:
        """The fastest for that batch, without a run of it if ``predicted``; BudgetError if none fits."""
        whole = self._at(size)
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


_LESS = 24  # of 25 samples, where slices take more than was predicted


@within_room("the batches that max_batch() measures")
def max_batch(
    model: torch.nn.Module,
    *,
    sample: tuple[Any, Any],
    loss_fn: LossFunction,
    budget: int | str,
    optimizer: torch.optim.Optimizer | None = None,
    noise: float | None = None,
    exact: bool = False,
    on_progress: Progress | None = None,
) -> MaxBatch:
    """The largest batch whose plan fits ``budget``, from at most three profiles.

    Plans are those of :func:`make_plan`, with the first layers in slices where that fits more.

    Profiles the sample's batch and twice or half of it, predicts others on the line through both, and
    profiles the answer, if the device can hold a plain step of it. Should that one not fit, the answer is the
    largest below it that fits on the line.
    Other batches repeat or cut the sample along the first dimension of all its tensors that have its batch's
    size there (targets also a multiple of it).

    Args:
        model: see :func:`make_plan`; so are the other arguments.
        sample: of any batch; one near the answer is quickest.
        loss_fn: see :func:`make_plan`.
        budget: bytes, "2GiB", or a share of the plain step's peak at the sample's batch, "50%".
        optimizer: see :func:`make_plan`.
        noise: see :func:`make_plan`.
        exact: see :func:`make_plan`.
        on_progress: see :func:`make_plan`; every profile begins at zero.

    Returns:
        The batch, its plan, the batch that plain training would hold, and some batches between them with
        what each would take. The plan's noise is predicted by
        the error law and not measured.

    Raises:
        BudgetError: not even a batch of 1 fits.
        OptionError: as :func:`make_plan`, or the sample has no batch.
    """
    check_kinds(model, noise, optimizer)
    sample, loss_fn = check_sample(sample, loss_fn)
    batch, (factor, share) = batch_of(sample), size_named(budget)
    if batch < 1:
        raise OptionError(
            f"the sample has {described(sample[0])} as inputs, which is no batch to make larger."
        )
    step = TrainingStep(
        model=model,
        sample=sample,
        loss_fn=loss_fn,
        optimizer=optimizer,
        noise=plannable(model, noise, exact),
        on_progress=on_progress,
    )
    first = profile_step(step)
    limit = int(factor * plain_peak(first) if share else factor)
    batches = Batches(step, {batch: first}, is_run=True)
    known = batches.known
    grows = batches.fits(batch, limit) or batch <= 2  # batch normalisation refuses a single one
    other = 2 * batch if grows else max(batch // 2, 2)
    with contextlib.suppress(BudgetError):  # there is no memory to measure it
        known[other] = profile_step(step.of_size(other))
    answer = batches.largest(limit, batch)
    room = limit
    with contextlib.suppress(OptionError):  # a system that does not say
        room = max(room, free_bytes(device_of(model)))
    if answer and answer not in known and batches.plain_peak(answer) <= room:
        try:
            known[answer] = profile_step(step.of_size(answer))
        except BudgetError:  # plain, it is too large to be measured
            pass
        except OptionError:
            if answer == 1:
                batches.plan(model, 2, limit)  # which does not fit either, and says so
            raise
        if not batches.fits(answer, limit):
            answer = batches.largest(limit, 1, below=answer)
    answer, plan = _planned(batches, model, max(answer, 1), limit)
    return MaxBatch(
        batch=answer,
        plan=plan,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        plain_batch=batches.plain(limit),
        measured=answer in known,
        frontier=batches.frontier(model, answer, plan, limit),
    )


def _planned(batches: Batches, model: torch.nn.Module, batch: int, limit: int) -> tuple[int, StepPlan]:
    """The batch, or the next one below it, whose plan fits when its slices are run."""
    while True:
        try:
            return batch, batches.plan(model, batch, limit)
        except BudgetError:
            if batch == 1:
                raise
            batch = batch * _LESS // (_LESS + 1)
