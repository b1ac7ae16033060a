"""The largest batch for the memory there is: predicted from two small probes, then tried once."""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from squeezebox import planner
from squeezebox.memory import free_bytes, require_imports, within_room
from squeezebox.planning._choices import fits, measured_at_load
from squeezebox.planning._estimate import simulated
from squeezebox.planning._kinds import check_kinds
from squeezebox.planning._max_batch import Batches
from squeezebox.planning._plans import plain_peak, plannable, size_named
from squeezebox.planning._profiles import profile_step
from squeezebox.profiling import at_balanced_load, loads_named
from squeezebox.reports import FoundBatch, StepPlan, exact_bytes
from squeezebox.schema import (
    Budget,
    BudgetError,
    Kind,
    OptionError,
    PlanError,
    StepProfile,
    UnsupportedModelError,
)
from squeezebox.steps import (
    LossFunction,
    Progress,
    TrainingStep,
    batch_of,
    check_sample,
    described,
    device_of,
    held_by,
    nbytes_of,
    persistent,
)

_SAFE = 0.8  # of the budget: what a probe may take by a prediction that is not exact
_LOSSY = 3.0  # of a step with statistics, at most: its saved tensors and temporaries over a plain step's
_VAGUE = (Kind.SAVED, Kind.PACKED, Kind.TEMPORARY)
_UNKNOWN_BATCH = 2  # of the first probe, where fake tensors cannot run the model


_VARIES = (
    "what the model saves at batch {} changes from one step to the next, so find_batch() cannot plan "
    "for it. attach(noise=...) holds whatever comes; choose the batch by its report."
)


@within_room("the batches that find_batch() measures")
@at_balanced_load
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
    load: str | None = None,
    on_progress: Progress | None = None,
) -> FoundBatch:
    """The largest batch that trains in ``memory`` with a reserve, found by runs that are predicted to fit.

    The budget is the memory less the reserve. :func:`max_batch` answers the same for a budget, but profiles
    batches that need not fit the machine. Here nothing is run that is not predicted to fit. At most two
    batches are profiled: one that fits by a step on fake tensors (2, if these cannot run the model), with
    ample room for what statistics take besides; and one that fits by what the first one's profile held.
    The answer is run once, under its plan, and made smaller by what that needed more than predicted. What
    finds no room after all is tried with a smaller batch.

    The memory is what tensors take. On top of that, the first call of a process takes some hundreds of MiB
    for what planning imports and compiles, and profilers some tens of MiB for themselves. Without ``memory``
    all that is imported and compiled before the free memory is measured.

    Args:
        model: see :func:`plan`; so are ``loss_fn``, ``optimizer``, ``noise``, ``exact``, ``on_progress``.
        sample: inputs and target of any batch; others repeat or cut it, as :func:`max_batch` does.
        loss_fn: see above.
        memory: what the step may take, parameters, gradients and optimizer state included: bytes or "8GiB";
            None: what is free on the model's device, and what the model holds already.
        reserve: bytes to leave free, or a share of the memory, such as "10%".
        optimizer: see above.
        noise: see above.
        exact: see above.
        effective: samples of one update: they are divided into microbatches that fit, as alike as can be,
            whose gradients add up, which the plan has room for. Batch normalisation then sees microbatches.
        load: see above; with "worst", the answer is run with all tokens at the same experts. The first batch
            fits by an estimate of that load, or of the worst.
        on_progress: see above.

    Returns:
        Batch, plan and microbatches; attach the plan.

    Raises:
        BudgetError: not even a batch of 1 fits, or can be profiled in the memory; says what is missing.
            Or there is no room for what planning imports and compiles.
        OptionError: as :func:`max_batch`; reserve or effective out of range.
    """
    check_kinds(model, noise, optimizer)
    if load is not None:
        loads_named(load)
    sample, loss_fn = check_sample(sample, loss_fn)
    allowed, batch = plannable(model, noise, exact), batch_of(sample)
    if effective is not None and not hasattr(effective, "__index__"):
        raise OptionError(f"effective={effective!r} is no whole number; give the samples of one update.")
    if batch < 1 or (effective is not None and effective < 1):
        what = f"the sample has {described(sample[0])} as inputs" if batch < 1 else f"effective={effective}"
        raise OptionError(f"{what}, which is no batch.")
    if memory is None:
        _load(allowed > 0.0)
    memory_bytes, reserve_bytes = _room(model, optimizer, memory, reserve)
    limit = memory_bytes - reserve_bytes
    step = TrainingStep(
        model=model,
        sample=sample,
        loss_fn=loss_fn,
        optimizer=optimizer,
        noise=allowed,
        on_progress=on_progress,
    )
    known = probe(step, limit, load or "worst")

    free = reserve_bytes if memory is None else 0
    batches, found = _for_update(step, known, limit, effective or 1, free, load)
    plan = found.plan
    return FoundBatch(
        batch=found.batch,
        plan=plan,
        memory_bytes=memory_bytes,
        reserve_bytes=reserve_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        measured_peak_bytes=found.measured_peak_bytes,
        plain_batch=batches.plain(limit),
        probes=(*known, found.tried),
        microbatches=(found.batch,) if effective is None else _microbatches(effective, found.batch),
        frontier=batches.frontier(model, found.batch, plan, limit),
    )


class _Answer(NamedTuple):
    """A batch and its plan; what was run, and took: None where that had to be made smaller."""

    batch: int
    plan: StepPlan
    tried: int
    measured_peak_bytes: int | None


def _for_update(
    step: TrainingStep,
    known: dict[int, StepProfile],
    limit: int,
    wanted: int,
    reserve_bytes: int,
    load: str | None,
) -> tuple[Batches, _Answer]:
    """The answer for an update of ``wanted`` samples: with gradients of earlier ones, if it takes several."""
    first = step.of_size(min(known))
    batches = Batches(first, known, is_run=False)
    if batches.largest(limit, min(known)) >= wanted:
        found = _answered(step, batches, limit, wanted, reserve_bytes, load)
        if found.batch >= wanted:
            return batches, found
    batches = Batches(first, known, is_run=False, adds_up=wanted > 1)
    return batches, _answered(step, batches, limit, wanted, reserve_bytes, load)


def _answered(
    step: TrainingStep, batches: Batches, limit: int, wanted: int, reserve_bytes: int, load: str | None
) -> _Answer:
    """The largest batch within ``limit``, run once; ``wanted`` samples make an update."""
    answer, predicted = max(batches.largest(limit, min(batches.known)), 1), limit

    def planned() -> StepPlan:
        plan = batches.plan(step.model, answer, predicted)
        return replace(plan, accumulate=math.ceil(wanted / answer)) if batches.adds_up else plan

    while True:
        plan = planned()
        try:
            measured = _run_beside(reserve_bytes, step.of_size(answer), plan, load)
            break
        except BudgetError:  # there was less memory than said
            if answer == 1:
                raise
        except PlanError as error:  # what is saved grows faster than the batch
            if answer <= min(batches.known):
                raise UnsupportedModelError(_VARIES.format(answer)) from error
        except OptionError:
            if answer == 1:
                batches.plan(step.model, 2, predicted)  # which does not fit either, and says so
            raise
        predicted = int(_SAFE * predicted)
        answer = _smaller(batches, answer, predicted)
    tried = answer
    if measured is not None and measured > limit:
        predicted = limit * plan.predicted_peak_bytes // measured  # what may be, for so much more to fit
        answer = _smaller(batches, answer, predicted)
        plan, measured = planned(), None
    return _Answer(answer, plan, tried, measured)


def probe(step: TrainingStep, limit: int, load: str = "worst") -> dict[int, StepProfile]:
    """Profiles of at most two batches of the step's sample, made within ``limit`` bytes.

    The first is the sample's, or one that fits; the second the largest that is safe and may be asked for.

    Raises:
        BudgetError: not even the least batch is predicted to fit; or what is imported for it finds no room.
    """
    require_imports("numba", "torch._dynamo")
    first, seen = _begun(step, _first(step, limit, load))
    known = {first: seen}
    safe = planner.largest_batch(lambda size: _held(known[first], first, size) <= _SAFE * limit)
    budget = Budget(peak_bytes=limit, noise=step.noise)
    largest = planner.largest_batch(lambda size: fits(planner.at_batch(known, size), budget), first)
    second = min(largest, safe)
    if second in (0, first):
        second = first // 2
    if second > 1:  # batch normalisation refuses a single sample
        with contextlib.suppress(BudgetError):  # there is less memory than said
            known[second] = profile_step(step.of_size(second), metered=True)
    return known


def _begun(step: TrainingStep, size: int) -> tuple[int, StepProfile]:
    """The profile of this batch, or of half as many, and so on, where there is no room for it."""
    while True:
        try:
            return size, profile_step(step.of_size(size), metered=True)
        except BudgetError:
            if size == 1:
                raise
        size //= 2


@functools.cache
def _load(lossy: bool) -> None:
    """Import and compile what a search runs, by one for a network of few elements."""
    with torch.random.fork_rng(devices=[]):
        layers = torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)
    sample = torch.zeros(32, 64), torch.zeros(32, 2)
    find_batch(
        torch.nn.Sequential(*layers),
        sample,
        loss_fn=torch.nn.functional.mse_loss,
        memory=1 << 20,
        noise=1e-3 if lossy else None,
        exact=not lossy,
    )


def _run_beside(reserve_bytes: int, step: TrainingStep, plan: StepPlan, load: str | None) -> int | None:
    """What a step under the plan takes; BudgetError if it does not run with the reserve taken too."""
    with within_room("a step under the plan, and the reserve"):
        reserve = torch.empty(reserve_bytes, dtype=torch.uint8, device=device_of(step.model))
    measured = measured_at_load(step, plan, load)
    del reserve  # not before
    return measured


def _smaller(batches: Batches, batch: int, limit: int) -> int:
    return max(batches.largest(limit, min(batches.known), below=batch), 1)


def _held(seen: StepProfile, batch: int, size: int) -> float:
    """What a profile of ``size`` samples holds at most: parameters and state do not grow with the batch."""
    fixed = seen.profile.parameter_bytes + seen.profile.state_bytes
    return fixed + max(size / batch, 1.0) * (max(seen.peak_bytes, plain_peak(seen)) - fixed)


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
        size, is_share = size_named(memory, "memory")
        if is_share:
            raise OptionError(f"memory {memory!r} is a share of nothing known; give bytes or '8GiB'.")
        memory_bytes = int(size)
    size, is_share = (0.0, False) if reserve in (0, "0", "0%") else size_named(reserve, "reserve")
    reserve_bytes = int(size * memory_bytes if is_share else size)
    if reserve_bytes >= memory_bytes:
        raise OptionError(f"reserve {reserve!r} leaves nothing of {memory_bytes} bytes of memory.")
    return memory_bytes, reserve_bytes


def _first(step: TrainingStep, limit: int, load: str) -> int:
    """A batch to begin with whose profile is predicted to fit."""
    batch = step.batch
    tried: list[tuple[int, int]] = []
    with contextlib.suppress(OptionError):  # of what fake tensors cannot run, or a single sample
        for size in (batch >> halved for halved in range(batch.bit_length())):
            tried.append((size, _predicted(step.of_size(size), load)))
            if tried[-1][1] <= limit:
                return size
    if not tried:
        return min(batch, _UNKNOWN_BATCH)
    size, needed = tried[-1]
    raise BudgetError(
        f"not even a batch of {size} can be profiled: that may take {exact_bytes(needed)}, "
        f"{exact_bytes(needed - limit)} more than the {exact_bytes(limit)} there are without the reserve. "
        "Give more memory, or have squeezebox.max_batch(budget=...) plan for this much where there is more."
    )


def _predicted(step: TrainingStep, load: str) -> int:
    """What a profile of the step's sample may hold, by a plain step on fake tensors.

    Known exactly is what lasts, and gradients, of which a profile may compute one a second time.
    """
    found, _ = simulated(
        step.model,
        sample=step.sample,
        loss_fn=step.loss_fn,
        optimizer=step.optimizer or "sgd",
        run=False,
        load=load,
    )
    more = _LOSSY if step.noise else 1.0 / _SAFE
    storages = tuple(
        replace(each, nbytes=math.ceil(more * each.nbytes)) if each.kind in _VAGUE else each
        for each in found.trace.storages
    )
    gradient = max((each.nbytes for each in storages if each.kind is Kind.GRADIENT), default=0)
    return replace(found.trace, storages=storages).peak().nbytes + math.ceil((more - 1.0) * gradient)


def _microbatches(effective: int, batch: int) -> tuple[int, ...]:
    """As few as hold ``effective`` samples, of sizes that differ by one at most."""
    count = math.ceil(effective / batch)
    small, larger = divmod(effective, count)
    return (small + 1,) * larger + (small,) * (count - larger)
