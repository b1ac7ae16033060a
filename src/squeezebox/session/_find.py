"""The largest batch for the memory there is: foretold from two small probes, then tried once."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import torch

from squeezebox import planner
from squeezebox.profiling import free_bytes
from squeezebox.reports import FoundBatch, StepPlan
from squeezebox.schema import Budget, OptionError, SqueezeboxError, StepProfile
from squeezebox.session._estimate import estimate
from squeezebox.session._models import device_of, held_by, nbytes_of, persistent, tensors_in
from squeezebox.session._plans import fits_within, plain_peak, plannable, planned, size_named
from squeezebox.session._profiles import Progress, Subject, measured_peak, profile_step
from squeezebox.session._samples import LossFunction, batch_of, check_sample, described, resize

_SAFE = 0.8  # of the budget: what the plain step of a probe may take by a prediction that is not exact
_UNKNOWN_BATCH = 4  # of the first probe, where nothing foretells what it takes


def find_batch(
    model: torch.nn.Module,
    sample: tuple[Any, Any],
    *,
    loss_fn: LossFunction,
    memory: int | str | None = None,
    reserve: int | str = "10%",
    optimizer: torch.optim.Optimizer | None = None,
    noise: float | None = None,
    exact: bool = False,
    effective: int | None = None,
    on_progress: Progress | None = None,
) -> FoundBatch:
    """The largest batch that trains in ``memory`` with a reserve, found without running out of it.

    The budget is the memory less the reserve. :func:`max_batch` answers the same for a budget, but profiles
    batches that need not fit the machine. Here no plain step is run that is not foretold to fit: at most two
    batches are profiled, and the answer is run once, under its plan, and made smaller by what that needed
    more than foretold. Profiles that choose bounds for ``noise`` hold more than a plain step, which is not
    foretold exactly: they may run out of a tight memory.

    Args:
        model: see :func:`plan`; so are ``loss_fn``, ``optimizer``, ``noise``, ``exact`` and ``on_progress``.
        sample: inputs and target of any batch; others repeat or cut it, as :func:`max_batch` does.
        loss_fn: see above.
        memory: what the step may take, parameters, gradients and optimizer state included: bytes or "8GiB";
            None: what is free on the model's device, and what the model holds already.
        reserve: bytes to leave free, or a share of the memory, such as "10%".
        optimizer: see above.
        noise: see above.
        exact: see above.
        effective: samples of one update: they are divided into microbatches that fit, as alike as can be,
            whose gradients add up. Batch normalisation then sees the microbatches.
        on_progress: see above.

    Returns:
        Batch, plan and microbatches; attach the plan.

    Raises:
        BudgetError: not even a batch of 1 fits; says what would.
        OptionError: as :func:`max_batch`; reserve or effective out of range.
    """
    sample, loss_fn = check_sample(sample, loss_fn)
    allowed, batch = plannable(model, noise, exact), batch_of(sample)
    if batch < 1 or (effective is not None and effective < 1):
        what = f"the sample has {described(sample[0])} as inputs" if batch < 1 else f"effective={effective}"
        raise OptionError(f"{what}, which is no batch.")
    memory_bytes, reserve_bytes = _room(model, optimizer, memory, reserve)
    limit = memory_bytes - reserve_bytes
    subject = Subject(
        model=model,
        sample=sample,
        loss_fn=loss_fn,
        optimizer=optimizer,
        noise=allowed,
        on_progress=on_progress,
    )
    known = probe(subject, limit)

    def plan_at(size: int, foretold: int) -> StepPlan:
        return planned(model, planner.at_batch(known, size), foretold, allowed, size)

    answer = max(_largest(known, limit, allowed), 1)
    plan = plan_at(answer, limit)
    measured = measured_peak(_of_size(subject, answer), plan)
    probes = (*known, answer)
    if measured is not None and measured > limit:
        foretold = limit * plan.predicted_peak_bytes // measured  # what may be, for so much more to fit
        answer = _smaller(known, answer, foretold, allowed)
        plan, measured = plan_at(answer, foretold), None
    return FoundBatch(
        batch=answer,
        plan=plan,
        memory_bytes=memory_bytes,
        reserve_bytes=reserve_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        measured_peak_bytes=measured,
        plain_batch=planner.largest_batch(lambda size: _plain(known, size) <= limit),
        probes=probes,
        microbatches=(answer,) if effective is None else _microbatches(effective, answer),
    )


def probe(subject: Subject, limit: int) -> dict[int, StepProfile]:
    """Profiles of at most two batches of the subject's sample whose plain steps fit ``limit`` bytes.

    The first is the sample's, or one that fits; the second the largest that is safe and may be asked for.
    """
    room = limit // 2 if subject.noise else limit  # statistics hold exact tensors and second gradients too
    first = _first(subject.model, subject.sample, room)
    known = {first: profile_step(_of_size(subject, first))}
    safe = planner.largest_batch(lambda size: _plain(known, size) <= _SAFE * room)
    second = min(_largest(known, limit, subject.noise), safe)
    if second in (0, first):
        second = first // 2
    if second > 1:  # batch normalisation refuses a single sample
        known[second] = profile_step(_of_size(subject, second))
    return known


def _of_size(subject: Subject, size: int) -> Subject:
    sample = resize(subject.sample, batch_of(subject.sample), size)
    return dataclasses.replace(subject, sample=sample)


def _room(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    memory: int | str | None,
    reserve: int | str,
) -> tuple[int, int]:
    """Bytes to train in, and of them those to leave free."""
    if memory is None:
        memory_bytes = free_bytes(device_of(model))
        memory_bytes += nbytes_of([*held_by(model), *persistent(model, optimizer)])
    else:
        size, is_share = size_named(memory)
        if is_share:
            raise OptionError(f"memory {memory!r} is a share of nothing known; give bytes or '8GiB'.")
        memory_bytes = int(size)
    size, is_share = (0.0, False) if reserve in (0, "0", "0%") else size_named(reserve)
    reserve_bytes = int(size * memory_bytes if is_share else size)
    if reserve_bytes >= memory_bytes:
        raise OptionError(f"reserve {reserve!r} leaves nothing of {memory_bytes} bytes of memory.")
    return memory_bytes, reserve_bytes


def _first(model: torch.nn.Module, sample: tuple[Any, Any], limit: int) -> int:
    """A batch to begin with whose plain step fits: by a step on fake tensors, where they can run it."""
    size, inputs = batch_of(sample), list(tensors_in(sample[0]))
    if len(inputs) != 1 or not isinstance(sample[0], torch.Tensor):
        return min(size, _UNKNOWN_BATCH)
    with contextlib.suppress(SqueezeboxError):
        while size > 1:
            shape, dtype = inputs[0].shape[1:], inputs[0].dtype
            peak = estimate(model, input_shape=shape, batch=size, input_dtype=dtype).peak_bytes
            if peak <= _SAFE * limit:
                return size
            size //= 2
        return 1
    return min(batch_of(sample), _UNKNOWN_BATCH)


def _largest(known: dict[int, StepProfile], limit: int, noise: float) -> int:
    budget = Budget(peak_bytes=limit, noise=noise)
    return planner.largest_batch(
        lambda size: fits_within(planner.at_batch(known, size).profile, budget), min(known)
    )


def _smaller(known: dict[int, StepProfile], batch: int, limit: int, noise: float) -> int:
    return max(min(_largest(known, limit, noise), batch - 1), 1)


def _plain(known: dict[int, StepProfile], size: int) -> int:
    return plain_peak(planner.at_batch(known, size))


def _microbatches(effective: int, batch: int) -> tuple[int, ...]:
    """As few as hold ``effective`` samples, of sizes that differ by one at most."""
    count = math.ceil(effective / batch)
    small, larger = divmod(effective, count)
    return (small + 1,) * larger + (small,) * (count - larger)
