"""From a sample to a plan: profile, solve, slice where that is needed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from squeezebox import planner
from squeezebox.bounds import NoiseBudget
from squeezebox.capture import SMALL_BYTES, foreign_hooks
from squeezebox.reports import BYTE_UNITS, MaxBatch, PlannedTensor, StepPlan, explain
from squeezebox.schema import (
    Action,
    Budget,
    BudgetError,
    OptionError,
    Plan,
    Profile,
    Region,
    StepProfile,
)
from squeezebox.session._calibration import plan_within
from squeezebox.session._models import device_of
from squeezebox.session._places import profile_with_places
from squeezebox.session._profiles import (
    Progress,
    Subject,
    cached,
    keeping,
    key_of,
    measured_noise,
    profile_step,
    without,
)
from squeezebox.session._samples import LossFunction, batch_of, check_sample, described, resize

_PAYS = 0.98  # of a peak beyond what is there anyway: slices must bring it lower to be worth their time


def make_plan(
    model: torch.nn.Module,
    *,
    sample: tuple[Any, Any] | None,
    loss_fn: LossFunction | None,
    optimizer: torch.optim.Optimizer | None = None,
    budget: int | str | None = None,
    noise: float | None = None,
    exact: bool = False,
    offload: bool = True,
    recompute: bool = True,
    time_limit: float | None = None,
    arena: bool = False,
    cache: str | os.PathLike[str] | None = None,
    on_progress: Progress | None = None,
) -> StepPlan:
    """Choose for every saved tensor how to hold it, so that the step's peak stays under ``budget``.

    Runs a few steps on ``sample`` (parameters, gradients, buffers and random states are as before):
    statistics, then one in which every way to hold every tensor is timed and weighed. Then the least time
    within the bytes at every position of forward and backward and within the noise is looked for. Where
    nothing fits, or the least peak is asked for, the first layers are tried in slices of the batch. At last
    the plan's noise is measured on the sample, and the plan made anew where that is more than allowed.

    Where training runs under torch.autocast, call this within it: so do forward and loss here, then.

    Args:
        model: any module that :func:`attach` takes.
        sample: inputs (a tensor, or a tuple of them) and target, as a training step gets them.
        loss_fn: ``loss_fn(output, target)`` is what backward starts from.
        optimizer: its state counts towards the peak, also where it is not there yet.
        budget: bytes, or "2GiB", or a share of the plain step's peak, "50%"; None: as little as possible.
        noise: allowed relative gradient noise (default 1e-3).
        exact: nothing is lost.
        offload: whether tensors may be moved to a file in the temporary directory. Where the system holds
            that in memory, or caches it, the bytes leave the process and not the machine.
        recompute: whether tensors may be made again by repeating operators.
        time_limit: of a step, as a multiple of the plain step's time, such as 1.3; instead of a budget: as
            little memory as fits the time.
        arena: the peak counts the places of :func:`attach`'s arena.
        cache: a folder in which profiles are kept and found again; it may be deleted at any time. One is used
            again for the same model, weights, sample, loss, noise, optimizer, versions and machine; a change
            in what the loss or a module's forward calls is not noticed.
        on_progress: called with (done, total, what was done) while the sample's steps run.

    Returns:
        The plan; print it, ``save()`` it, pass it to :func:`attach`. Sizes are bytes, times seconds a step.

    Raises:
        BudgetError: no plan fits; says how much the smallest needs, what holds it, and what would fit.
            Or none takes so little time.
        OptionError: an argument is missing or out of range, the model is wrapped for several ranks or on
            neither CPU nor CUDA, or a profiler is running.
        OutputError: the cache's folder cannot be written.
    """
    sample, loss_fn = check_sample(sample, loss_fn)
    allowed = plannable(model, noise, exact)
    _check_time_limit(time_limit, budget)
    factor, share = (0.0, False) if budget is None else size_named(budget)
    budget_bytes = factor if factor and not share else None
    subject = Subject(
        model=model,
        sample=sample,
        loss_fn=loss_fn,
        optimizer=optimizer,
        noise=allowed,
        on_progress=on_progress,
    )
    profiled = functools.partial(profile_step, subject, budget_bytes)
    try:
        seen = profiled() if cache is None else cached(Path(cache), key_of(subject), profiled)
    except torch.OutOfMemoryError as error:
        raise BudgetError(
            f"the plain step of a batch of {batch_of(sample)}, which is run to measure it, does not fit the "
            f"device: {str(error).splitlines()[0]} Call squeezebox.max_batch() with a smaller sample: it "
            "plans for batches that plain training cannot hold."
        ) from error
    allowed_actions = {Action.OFFLOAD: offload, Action.RECOMPUTE: recompute}
    barred = [action for action, is_allowed in allowed_actions.items() if not is_allowed]
    seen = without(seen, barred)
    limit = None if budget is None else int(factor * plain_peak(seen) if share else factor)
    held = profile_with_places if arena else lambda seen: seen
    seen = held(seen)
    seconds = math.inf if time_limit is None else _seconds_left(seen, time_limit)

    @functools.cache
    def sliced(region: Region) -> StepProfile:
        return held(without(profile_step(subject, whole=seen, region=region), barred))

    def plan_for(lawful: float) -> StepPlan:
        plan = planned(model, seen, limit, lawful, batch_of(sample), seconds, sliced)
        return dataclasses.replace(plan, noise=allowed, arena=arena)

    return plan_within(allowed, plan_for, functools.partial(measured_noise, subject))


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

    Profiles the sample's batch and twice or half of it, foretells others on the line through both, and
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
        on_progress: see :func:`make_plan`; every profile begins anew.

    Returns:
        The batch, its plan, and the batch that plain training would hold. The plan's noise is foretold by
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

    def profiled(size: int) -> StepProfile:
        return profile_step(
            Subject(
                model=model,
                sample=resize(sample, batch, size),
                loss_fn=loss_fn,
                optimizer=optimizer,
                noise=allowed,
                on_progress=on_progress,
            )
        )

    known = {batch: profiled(batch)}
    limit = int(factor * plain_peak(known[batch]) if share else factor)

    def fits(size: int) -> bool:
        return fits_within(planner.at_batch(known, size).profile, Budget(peak_bytes=limit, noise=allowed))

    other = 2 * batch if fits(batch) or batch <= 2 else batch // 2  # batch normalisation refuses a single one
    known[other] = profiled(other)
    answer = planner.largest_batch(fits, batch)
    if answer and answer not in known:
        with contextlib.suppress(torch.OutOfMemoryError):  # plain, it is too large to be measured
            known[answer] = profiled(answer)
        if not fits(answer):
            most = answer
            answer = planner.largest_batch(lambda size: size < most and fits(size))
    answer = max(answer, 1)
    plan = planned(model, planner.at_batch(known, answer), limit, allowed, answer)
    return MaxBatch(
        batch=answer,
        plan=plan,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        plain_batch=planner.largest_batch(lambda size: plain_peak(planner.at_batch(known, size)) <= limit),
        measured=answer in known,
    )


def plannable(model: torch.nn.Module, noise: float | None, exact: bool) -> float:
    """The noise allowed; OptionError where no plan can be made."""
    if exact and noise is not None:
        raise OptionError("noise and exact exclude each other; give one of them.")
    if noise is not None:
        NoiseBudget(noise=noise)  # refuses what is out of range
    if foreign_hooks():
        raise OptionError("a plan cannot be made inside other saved-tensor hooks; leave their context first.")
    wrapped = any(isinstance(module, DistributedDataParallel) for module in model.modules())
    if wrapped or any(hasattr(parameter, "to_local") for parameter in model.parameters()):
        raise OptionError(
            "the model exchanges gradients with other ranks, and every rank would choose for itself how many "
            "steps to profile. Make the plan from the module before it is wrapped or sharded."
        )
    if device_of(model).type not in ("cpu", "cuda"):
        raise OptionError(f"plans are for the CPU and for CUDA; the model is on {device_of(model)}.")
    return 0.0 if exact else 1e-3 if noise is None else noise


def _seconds_left(seen: StepProfile, time_limit: float) -> float:
    """Seconds that a plan's choices may take; BudgetError if there are none."""
    overhead = seen.holding_seconds + seen.following_seconds
    seconds = (time_limit - 1.0) * seen.plain_seconds - overhead
    if seconds < 0.0:
        raise BudgetError(
            f"a step of this model takes {seen.plain_seconds:.3g} s, and {overhead:.3g} s more under any "
            f"plan: time_limit {time_limit:g} leaves no time. Allow at least "
            f"{1 + overhead / seen.plain_seconds:.2f}, or give a larger batch, on which that weighs less."
        )
    return seconds


def _check_time_limit(time_limit: float | None, budget: object) -> None:
    if time_limit is None:
        return
    if budget is not None:
        raise OptionError("a plan for a budget takes the least time already; give budget or time_limit.")
    if not 1.0 <= time_limit < math.inf:
        raise OptionError(
            f"time_limit {time_limit:g} is below 1 or not finite; it is a multiple of the plain step's time, "
            "such as 1.3."
        )


def plain_peak(seen: StepProfile) -> int:
    """The peak with every tensor kept."""
    return planner.peak(seen.profile, {key: keeping(nbytes) for key, nbytes in seen.saved_bytes.items()})


def planned(
    model: torch.nn.Module,
    seen: StepProfile,
    limit: int | None,
    noise: float,
    batch: int,
    seconds: float = math.inf,
    sliced: Callable[[Region], StepProfile] | None = None,
) -> StepPlan:
    """The fastest plan within ``limit`` bytes; without one, the smallest within ``seconds`` beyond plain."""
    used, chosen = _chosen(seen, limit, noise, batch, seconds, sliced)
    sizes = used.saved_bytes | used.small_bytes
    grown = {key: keeping(nbytes) for key, nbytes in used.small_bytes.items() if nbytes >= SMALL_BYTES}
    return StepPlan(
        model=type(model).__name__,
        budget_bytes=limit,
        noise=noise,
        plain_peak_bytes=plain_peak(seen),
        plain_seconds=seen.plain_seconds,
        predicted_peak_bytes=chosen.predicted_peak_bytes,
        predicted_seconds=used.plain_seconds + _overhead(used, chosen) + chosen.predicted_seconds,
        predicted_noise=chosen.predicted_noise,
        late_values=seen.late_values,
        region=used.region,
        peak=planner.planned_peak(used.profile, chosen) if used.profile.moments else None,
        tensors=tuple(
            PlannedTensor(key=key, saved_bytes=sizes[key], option=option)
            for key, option in (*chosen.choices.items(), *grown.items())
        ),
    )


def _overhead(seen: StepProfile, plan: Plan) -> float:
    """Seconds that a step takes longer for being under this plan at all."""
    again = (Action.RECOMPUTE, Action.REGENERATE)
    follows = any(option.action in again for option in plan.choices.values())
    return seen.holding_seconds + (seen.following_seconds if follows else 0.0)


def _chosen(
    seen: StepProfile,
    limit: int | None,
    noise: float,
    batch: int,
    seconds: float,
    sliced: Callable[[Region], StepProfile] | None,
) -> tuple[StepProfile, Plan]:
    """The profile to go by and its plan, sliced if that is needed; BudgetError with what would fit."""
    budget = Budget(peak_bytes=limit or 0, noise=noise)
    if limit is not None:
        with contextlib.suppress(BudgetError):
            return seen, planner.solve(seen.profile, budget)
    best = seen, planner.smallest(seen.profile, noise, seconds)
    for trial in _trials(*best, sliced, noise, seconds) if sliced is not None else ():
        if limit is not None and best[1].predicted_peak_bytes <= limit:
            break
        if _pays(seen, trial[1], best[1]):
            best = trial
    if limit is None:
        return best
    if best[1].predicted_peak_bytes > limit:
        raise BudgetError(explain(planner.shortage(best[0].profile, budget, best[1], batch)))
    with contextlib.suppress(BudgetError):
        return best[0], planner.solve(best[0].profile, budget)
    return best


def _trials(
    seen: StepProfile, plan: Plan, sliced: Callable[[Region], StepProfile], noise: float, seconds: float
) -> Iterator[tuple[StepProfile, Plan]]:
    """Profiles and least plans with more and more layers in more and more slices, while the peak falls."""
    lowest, slices = plan, 2
    for region in seen.regions:
        before = lowest
        while slices <= region.slices:
            trial = sliced(dataclasses.replace(region, slices=slices))
            try:
                left = seconds - (trial.plain_seconds - seen.plain_seconds)
                plan = planner.smallest(trial.profile, noise, left)
            except BudgetError:  # slices alone take too long
                break
            yield trial, plan
            if not _pays(seen, plan, lowest):
                break
            lowest, slices = plan, 2 * slices
        if not _pays(seen, lowest, before):
            return
        slices //= 2


def _pays(seen: StepProfile, plan: Plan, other: Plan) -> bool:
    """Whether the plan's peak is so far below the other's that it is worth its time."""
    fixed = seen.profile.base_bytes[-1]  # parameters, gradients, the optimizer's state
    return plan.predicted_peak_bytes - fixed < _PAYS * (other.predicted_peak_bytes - fixed)


def fits_within(profile: Profile, budget: Budget) -> bool:
    """Whether any plan does."""
    try:
        planner.solve(profile, budget)
    except BudgetError:
        return False
    return True


def size_named(size: int | str, name: str = "budget") -> tuple[float, bool]:
    """(bytes, False) of a number or "2GiB"; (share, True) of "50%"; ``name`` is the argument's."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*|%)", str(size).strip())
    unit = found[2].upper() if found else ""
    if not found or (unit and unit != "%" and unit not in BYTE_UNITS) or not float(found[1]) > 0:
        raise OptionError(f"{name} {size!r} is no size; give bytes, '2GiB', '800MB' or '50%'.")
    return float(found[1]) * (0.01 if unit == "%" else BYTE_UNITS[unit or "B"]), unit == "%"
