"""The largest batch whose plan fits a budget."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from squeezebox.memory import free_bytes, within_room
from squeezebox.planning._batches import Batches
from squeezebox.planning._plans import plain_peak, plannable, size_named
from squeezebox.planning._profiles import profile_step
from squeezebox.reports import MaxBatch, StepPlan
from squeezebox.schema import BudgetError, OptionError
from squeezebox.steps import (
    LossFunction,
    Progress,
    TrainingStep,
    batch_of,
    check_sample,
    described,
    device_of,
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
    sample, loss_fn = check_sample(sample, loss_fn)
    allowed = plannable(model, noise, exact)
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
        noise=allowed,
        on_progress=on_progress,
    )
    first = profile_step(step)
    limit = int(factor * plain_peak(first) if share else factor)
    batches = Batches(step, {batch: first}, is_run=True)
    known = batches.known
    grows = batches.fits(batch, limit) or batch <= 2  # batch normalisation refuses a single one
    other = 2 * batch if grows else batch // 2
    with contextlib.suppress(BudgetError):  # there is no memory to measure it
        known[other] = profile_step(step.of_size(other))
    answer = batches.largest(limit, batch)
    room = free_bytes(device_of(model))
    if answer and answer not in known and batches.plain_peak(answer) <= max(room, limit):
        with contextlib.suppress(BudgetError):  # plain, it is too large to be measured
            known[answer] = profile_step(step.of_size(answer))
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
