"""From a sample to a plan: profile, solve, slice where that is needed."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from squeezebox import codecs, planner
from squeezebox.bounds import NoiseBudget
from squeezebox.capture import SMALL_BYTES, foreign_hooks, refuse_transforms
from squeezebox.memory import (
    DiskFolder,
    Elsewhere,
    disk_folder,
    disk_speed,
    offload_record,
    require_imports,
    usual_folder,
    within_room,
)
from squeezebox.planning._choices import (
    Choice,
    at_worst,
    fastest,
    leanest,
    measured_noise,
    plan_within,
    solved,
    with_room,
)
from squeezebox.planning._frozen import weights_plan, with_weights
from squeezebox.planning._kinds import check_kinds, check_time_limit
from squeezebox.planning._profiles import (
    cached,
    keeping,
    key_of,
    profile_step,
    without,
)
from squeezebox.planning._slicing import Slices
from squeezebox.planning._state_costs import state_costs
from squeezebox.planning._states import accumulating, check_states, hinting, optimizer_plan, with_states
from squeezebox.profiling import at_balanced_load
from squeezebox.reports import BYTE_UNITS, PlannedTensor, StepPlan, explain
from squeezebox.rewriting import proposed
from squeezebox.schema import (
    Action,
    Budget,
    BudgetError,
    OptionError,
    Part,
    Plan,
    PlanPoint,
    StepCurve,
    StepProfile,
)
from squeezebox.session import check_alone, profile_with_places
from squeezebox.steps import LossFunction, Progress, TrainingStep, batch_of, check_sample, device_of

_REWRITES_SECONDS, _REWRITES_STEPS = 5.0, 20  # for a refusal to look for them: the longer of these


def named_place(offload: bool | str | os.PathLike[str] | Elsewhere, model: torch.nn.Module) -> Elsewhere:
    """That of squeezebox.plan()'s argument.

    Raises:
        OptionError: it is in memory, missing or not writable; or a neighbour's, and the model on a device.
    """
    if isinstance(offload, bool):
        return usual_folder() if offload else DiskFolder("", "")  # which is no place
    if not isinstance(offload, Elsewhere | str | os.PathLike):
        raise OptionError(f"offload {offload!r} is neither True, False nor a folder; give one of them.")
    if not isinstance(offload, Elsewhere):
        return disk_folder(offload)
    if device_of(model).type != "cpu":
        raise OptionError(
            f"the model is on {device_of(model)}, whose tensors are moved to this host's memory, not to "
            f"{offload}. Give offload=True."
        )
    return offload


def with_folder(plan: StepPlan, folder: Elsewhere) -> StepPlan:
    """The plan, saying where it moves tensors to, if any, and what that takes."""
    saved = sum(each.saved_bytes for each in plan.tensors if each.option.codec == folder.kind)
    others = (plan.optimizer, plan.weights)
    moved = [saved, *(0 if each is None else each.moved_bytes for each in others)]
    if not any(moved):
        return plan
    record = offload_record(folder, sum(moved), direct=disk_speed(folder).direct)
    files = sum(nbytes > 0 for nbytes in moved)  # each has buffers of its own
    record = replace(record, buffer_bytes=files * record.buffer_bytes, cache_bytes=files * record.cache_bytes)
    return replace(plan, offload=record)


@within_room("planning this sample's step; squeezebox.find_batch() begins with smaller ones")
@at_balanced_load
def make_plan(
    model: torch.nn.Module,
    *,
    sample: tuple[Any, Any] | None,
    loss_fn: LossFunction | None,
    optimizer: torch.optim.Optimizer | None = None,
    budget: int | str | None = None,
    noise: float | None = None,
    exact: bool = False,
    offload: bool | str | os.PathLike[str] | Elsewhere = True,
    recompute: bool = True,
    time_limit: float | None = None,
    arena: bool = False,
    states: bool = False,
    clip: float | bool | None = None,
    accumulate: int = 1,
    update_noise: float | None = None,
    weight_noise: float | None = None,
    load: str | None = None,
    frontier: bool = False,
    cache: str | os.PathLike[str] | None = None,
    on_progress: Progress | None = None,
) -> StepPlan:
    """Choose for every saved tensor how to hold it, so that the step's peak stays under ``budget``.

    Runs a few steps on ``sample``. Gradients, buffers and random states are as before, and so are parameters,
    unless forward itself writes into them. First come statistics, then a step in which every way to hold
    every tensor is timed and weighed. Then the least time within the bytes at every position of forward and
    backward and within the noise is looked for, with the first layers in slices of the batch where that is
    faster, or the only way. At last the plan's noise is measured on the sample, and the plan is made once
    more where that is more than allowed.

    Where training runs under torch.autocast, call this within it: so do forward and loss here, then. Call
    ``model.train()`` first: ``from_pretrained`` returns models in ``eval()``, without dropout.

    Args:
        model: any module that :func:`attach` takes.
        sample: inputs (a tensor, a tuple of them, or a dict by the model's keywords) and target.
        loss_fn: ``loss_fn(output, target)`` is what backward starts from.
        optimizer: its state counts towards the peak, also where it is not there yet.
        budget: bytes, or "2GiB", or a share of the plain step's peak, "50%"; None: as little as possible.
        noise: allowed relative gradient noise (default 1e-3).
        exact: nothing is lost of a gradient.
        offload: whether tensors may be moved to a file, or the folder for it, which must be on a disk. The
            file is written and read past the system's page cache. Its price is measured: the disk's own
            speed, copies, and what computing loses meanwhile. The usual folder is the one for temporary
            files; where that is in memory (tmpfs), ``/var/tmp``, ``~/.cache/squeezebox`` or the working
            directory. The plan says which. Or a ``squeezebox.memory.Neighbour``: memory that another process
            lends. Gradients, optimizer state and weights do not go there, as it may end.
        recompute: whether tensors may be recomputed, by repeating operators.
        time_limit: of a step, as a multiple of the plain step's time, such as 1.3; instead of a budget: as
            little memory as fits the time.
        arena: the peak counts the places of :func:`attach`'s arena.
        states: whether gradients, the optimizer's state and frozen weights may be elsewhere too, exactly.
            Each parameter is then updated by itself: in backward, as soon as its gradient is there, or in
            ``optimizer.step()`` where ``clip`` or ``accumulate`` say that gradients are wanted until then.
            State, and gradients that wait, may be moved to the file, and so may frozen weights. For torch's
            SGD, Adam, AdamW, NAdam, RAdam, Adamax, RMSprop and Adagrad.
        clip: the norm that the loop clips gradients to, by torch's ``clip_grad_norm_`` or a trainer's option,
            or True: gradients wait for ``optimizer.step()``. GradScaler needs that too.
        accumulate: how many backward passes add up to one ``optimizer.step()``; from the second on, gradients
            are there from the start.
        update_noise: allowed relative squared error of a parameter's update; its optimizer state may then be
            packed in 16 or 8 bits an element, rounded stochastically, and needs no file. Adam's in 8 bits
            have 0.011, in 16 bits 0.0003. None: state stays exact.
        weight_noise: allowed squared error of a frozen weight over its squared norm; it may then be packed in
            8 or 4 bits an element, and needs no file. Normally distributed ones have 4e-5 and 0.012. None:
            weights are exact.
        load: how tokens choose experts while the step is measured. "balanced": in turn. "worst": so too, but
            the budget also holds for a step in which all choose the same ones, which is then measured under
            the plan. None: as the model's routers do.
        frontier: whether some plans of other budgets are looked for, too: what they take is in the plan, and
            notebooks draw it.
        cache: a folder in which profiles are kept and found again; it may be deleted at any time. One is used
            again for the same model, weights, sample, loss, noise, optimizer, versions and machine; a change
            in what the loss or a module's forward calls is not noticed.
        on_progress: called with (done, total, what was done) while the sample's steps run.

    Returns:
        The plan; print it, ``save()`` it, pass it to :func:`attach`. Sizes are bytes, times seconds a step.

    Raises:
        BudgetError: no plan fits; says how much the smallest needs, what holds it, and what would fit.
            Or none takes so little time; or the plain step, which is measured, does not fit the machine.
        OptionError: an argument is missing or out of range, ``offload`` names a folder in memory, the model
            is wrapped for several ranks or on neither CPU nor CUDA, or a profiler is running.
        OutputError: the cache's folder cannot be written.
    """
    check_kinds(model, noise, optimizer)
    sample, loss_fn = check_sample(sample, loss_fn)
    check_time_limit(time_limit, budget)
    factor, share = (0.0, False) if budget is None else size_named(budget)
    allowed = plannable(model, noise, exact)
    budget_bytes = factor if factor and not share else None
    folder = named_place(offload, model)
    step = TrainingStep(
        model=model,
        sample=sample,
        loss_fn=loss_fn,
        optimizer=optimizer,
        noise=allowed,
        on_progress=on_progress,
        folder=folder,
        moves_weights=states is True
        and (weight_noise is not None or (offload is not False and folder.keeps_state)),
        splits_weights=states is True,
        slices_gradients=states is True and not clip and accumulate == 1,
    )
    if load == "worst" and states:
        raise OptionError(
            "load='worst' measures a step under the plan, and states=True would update weights in it; give "
            "load='balanced'."
        )
    check_states(step, clip, accumulate, update_noise, weight_noise, wanted=states)
    codes = (
        state_costs(step.optimizer, update_noise, device_of(model)) if step.optimizer and update_noise else ()
    )
    profiled = functools.partial(profile_step, step, None if states else budget_bytes)
    seen = profiled() if cache is None else cached(Path(cache), key_of(step, load), profiled)
    allowed_actions = {Action.OFFLOAD: offload is not False, Action.RECOMPUTE: recompute}
    barred = [action for action, is_allowed in allowed_actions.items() if not is_allowed]
    adds_up = accumulate > 1 and not states
    whole_peak = plain_peak(accumulating(seen, model) if accumulate > 1 else seen)
    limit = None if budget is None else int(factor * whole_peak if share else factor)

    def held(seen: StepProfile) -> StepProfile:
        if states:
            clips = bool(clip)
            seen = with_weights(seen, step, weight_noise)
            seen = with_states(seen, step, whole_peak, clip=clips, accumulate=accumulate, codes=codes)
        elif adds_up:
            seen = accumulating(seen, model)
        seen = without(seen, barred)
        if folder.most_bytes is not None:
            seen = with_room(seen, folder.most_bytes)
        return profile_with_places(seen) if arena else seen

    bare, seen = without(seen, barred), held(seen)
    seconds = math.inf if time_limit is None else _seconds_left(seen, time_limit)
    slices = Slices(step, held, bare)

    def plan_for(limit: int | None, lawful: float) -> StepPlan:
        with hinting(step, bare if adds_up else seen, limit, lawful, whole_peak, accumulate, barred):
            plan = planned(model, seen, limit, lawful, batch_of(sample), seconds, slices, optimizer, frontier)
        plan = dataclasses.replace(
            plan,
            noise=allowed,
            arena=arena,
            accumulate=accumulate,
            without=tuple(action.value for action in barred),
            time_limit=time_limit,
        )
        return with_folder(plan, folder)

    def plan_below(limit: int | None) -> StepPlan:
        return plan_within(
            allowed, functools.partial(plan_for, limit), functools.partial(measured_noise, step)
        )

    try:
        found = at_worst(step, plan_below, limit) if load == "worst" else plan_below(limit)
    except BudgetError as error:
        raise _with_rewrites(error, step, seen.plain_seconds) from error.__cause__
    return dataclasses.replace(found, assumed_load=load or "")


def _with_rewrites(error: BudgetError, step: TrainingStep, plain_seconds: float) -> BudgetError:
    """The refusal, and what rewrites of the model would do."""
    found = proposed(step, max(_REWRITES_SECONDS, _REWRITES_STEPS * plain_seconds))
    return error if found is None else BudgetError(f"{error} {found.proposal}")


def plannable(model: torch.nn.Module, noise: float | None, exact: bool) -> float:
    """The noise allowed; OptionError where no plan can be made, BudgetError where numba finds no room."""
    check_kinds(model, noise)
    if exact and noise is not None:
        raise OptionError("noise and exact exclude each other; give one of them.")
    if noise is not None:
        NoiseBudget(noise=noise)  # refuses what is out of range
    refuse_transforms()
    if foreign_hooks():
        raise OptionError("a plan cannot be made inside other saved-tensor hooks; leave their context first.")
    wrapped = any(isinstance(module, DistributedDataParallel) for module in model.modules())
    if wrapped or any(hasattr(parameter, "to_local") for parameter in model.parameters()):
        raise OptionError(
            "the model exchanges gradients with other ranks, and every rank would choose for itself how many "
            "steps to profile. Make the plan from the module before it is wrapped or sharded."
        )
    if not hasattr(os, "pwritev"):
        raise OptionError(
            "plans try what moving tensors to a file takes, and this system cannot write at a place in a "
            "file. Run this on Linux, macOS or in Windows' WSL, or call squeezebox.attach() without a plan."
        )
    hooked = [name for name, each in model.named_parameters() if each._post_accumulate_grad_hooks]
    if hooked:
        check_alone(model)  # whose hooks they may be
        raise OptionError(
            f"'{hooked[0]}' has a hook for its accumulated gradient, which may update it, and planning takes "
            "steps on the sample. Plan before such hooks are registered."
        )
    if device_of(model).type not in ("cpu", "cuda"):
        raise OptionError(f"plans are for the CPU and for CUDA; the model is on {device_of(model)}.")
    require_imports("numba")
    if device_of(model).type == "cpu":
        for dtype in {parameter.dtype for parameter in model.parameters()}:
            codecs.load_kernels(dtype)  # before anything is timed, and before room is looked for
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


def plain_peak(seen: StepProfile) -> int:
    """The peak with every tensor kept."""
    if seen.plain_peak_bytes is not None:
        return seen.plain_peak_bytes
    return planner.peak(seen.profile, {key: keeping(nbytes) for key, nbytes in seen.saved_bytes.items()})


def planned(
    model: torch.nn.Module,
    seen: StepProfile,
    limit: int | None,
    noise: float,
    batch: int,
    seconds: float = math.inf,
    slices: Slices | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    frontier: bool = False,
) -> StepPlan:
    """The fastest plan within ``limit`` bytes; without one, the smallest within ``seconds`` beyond plain."""
    choice = _chosen(seen, limit, noise, batch, seconds, slices)
    used, chosen = choice.seen, choice.plan
    sizes = used.saved_bytes | used.small_bytes
    rows = {row.key for row in used.profile.tensors if row.part is not Part.SAVED}
    grown = {key: keeping(nbytes) for key, nbytes in used.small_bytes.items() if nbytes >= SMALL_BYTES}
    return StepPlan(
        model=type(model).__name__,
        budget_bytes=limit,
        noise=noise,
        plain_peak_bytes=plain_peak(seen),
        plain_seconds=seen.plain_seconds,
        clock_seconds=seen.clock_seconds,
        output_bytes=seen.output_bytes,
        predicted_peak_bytes=chosen.predicted_peak_bytes,
        predicted_seconds=choice.seconds,
        predicted_noise=chosen.predicted_noise,
        late_values=seen.late_values,
        region=used.region,
        peak=planner.planned_peak(used.profile, chosen) if used.profile.moments else None,
        tensors=tuple(
            PlannedTensor(key=key, saved_bytes=sizes[key], option=option)
            for key, option in (*chosen.choices.items(), *grown.items())
            if key not in rows
        ),
        optimizer=None
        if used.plain_peak_bytes is None or optimizer is None
        else optimizer_plan(used, chosen, model, optimizer),
        weights=weights_plan(used, chosen),
        curve=_curve(seen, used, chosen) if used.profile.moments else None,
        frontier=_frontier([seen] if used.region is None else [seen, used], noise, plain_peak(seen))
        if frontier
        else (),
    )


def _curve(seen: StepProfile, used: StepProfile, chosen: Plan) -> StepCurve:
    """A step with all rows kept, and one under the plan."""
    kept = {
        row.key: keeping(seen.saved_bytes[row.key])
        if row.part is Part.SAVED
        else next(option for option in row.options if option.action is Action.KEEP)
        for row in seen.profile.tensors
    }
    return StepCurve(
        plain_bytes=planner.over_step(seen.profile, kept),
        planned_bytes=planner.over_step(used.profile, chosen.choices),
    )


_POINTS = 6  # of the frontier


def _frontier(ways: Sequence[StepProfile], noise: float, highest: int) -> tuple[PlanPoint, ...]:
    """The fastest plans of these ways to work the step, from their lowest floor up to a peak.

    None has another one below its peak that takes no longer, as far as the clock tells.
    """
    lowest = min(planner.floor(way.profile, noise) for way in ways)
    points: list[PlanPoint] = []
    for share in range(1, _POINTS + 1):
        budget = Budget(peak_bytes=lowest + (highest - lowest) * share // _POINTS, noise=noise)
        found = [solved(way, budget, exchange=False) for way in ways]
        choices = [choice for choice in found if choice is not None]
        if choices:
            best = min(choices, key=lambda choice: choice.seconds)
            points.append(PlanPoint(peak_bytes=best.plan.predicted_peak_bytes, seconds=best.seconds))
    points.sort(key=lambda point: (point.peak_bytes, point.seconds))
    kept, clock = points[:1], ways[0].clock_seconds
    for point in points[1:]:
        if point.seconds < kept[-1].seconds - clock:
            kept.append(point)
    return tuple(kept)


def _chosen(
    seen: StepProfile, limit: int | None, noise: float, batch: int, seconds: float, slices: Slices | None
) -> Choice:
    """The fastest way that fits, or the leanest; BudgetError with what would fit."""
    if limit is not None:
        found = fastest(seen, Budget(peak_bytes=limit, noise=noise), batch, slices)
        if found is not None:
            return found
    least = leanest(seen, noise, batch, slices, seconds)
    lowest = least.plan.predicted_peak_bytes
    budget = Budget(peak_bytes=lowest if limit is None else limit, noise=noise)
    if lowest > budget.peak_bytes:
        lack = planner.shortage(least.seen.profile, budget, least.plan, batch)
        refusal = BudgetError(explain(lack, plain_peak(seen)))
        refusal.least_bytes = lowest
        raise refusal
    faster = solved(least.seen, budget)
    return faster if faster is not None and faster.seconds < least.seconds else least


def size_named(size: int | str, name: str = "budget") -> tuple[float, bool]:
    """(bytes, False) of a number or "2GiB"; (share, True) of "50%"; ``name`` is the argument's."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*|%)", str(size).strip())
    unit = found[2].upper() if found else ""
    if not found or (unit and unit != "%" and unit not in BYTE_UNITS) or not float(found[1]) > 0:
        raise OptionError(f"{name} {size!r} is no size; give bytes, '2GiB', '800MB' or '50%'.")
    if not unit and float(found[1]) < 1:
        share = f"{float(found[1]):.0%}"
        raise OptionError(f"{name} {size} is less than a byte; write '{share}' for such a share.")
    return float(found[1]) * (0.01 if unit == "%" else BYTE_UNITS[unit or "B"]), unit == "%"
