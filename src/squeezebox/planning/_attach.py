"""From a caller's options to a session."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, TypeVar, cast

import torch

from squeezebox import codecs
from squeezebox.bounds import Comet, Controller, NoiseBudget
from squeezebox.memory import Elsewhere
from squeezebox.planning._choices import rehearsed
from squeezebox.planning._kinds import check_kinds
from squeezebox.planning._plans import make_plan, named_place
from squeezebox.planning._state_costs import packed_updates
from squeezebox.profiling import state_bytes
from squeezebox.reports import StepPlan, human_bytes
from squeezebox.rewriting import PLAIN_ONLY
from squeezebox.rewriting import rewrite as rewritten_by_sample
from squeezebox.schema import Action, AttachError, OptionError
from squeezebox.session import Balanced, Engine, Replanning, Session, begin, plan_with_places, shapes_of
from squeezebox.steps import LossFunction, TrainingStep, check_sample

Function = TypeVar("Function", bound=Callable[..., Any])
_FAMILIES = {"small": "entropy", "fast": "planes"}  # of codecs


def _rewriting_first(function: Function) -> Function:
    """The function with an argument ``rewrite``: its model is rewritten before, and not where it fails.

    The function raises OptionError where there is a plan already, or neither sample nor loss.
    """

    @functools.wraps(function)
    def wrapped(model: torch.nn.Module, *, rewrite: bool = False, **options: Any) -> Session:
        if not rewrite:
            attached: Session = function(model, **options)
            return attached
        if options.get("plan") is not None:
            raise OptionError(
                "a plan is for the model that was measured, which rewrite=True would change. Call "
                "squeezebox.rewrite() first, make a plan of what it leaves, and attach that without rewrite."
            )
        rewritten = rewritten_by_sample(
            model,
            sample=options.get("sample"),
            loss_fn=options.get("loss_fn"),
            optimizer=options.get("optimizer") or "sgd",
            without=PLAIN_ONLY,
        )
        try:
            session: Session = function(model, rewrite=True, **options)
        except BaseException:
            rewritten.undo()
            raise
        session.rewritten = rewritten
        return session

    return cast("Function", wrapped)


@_rewriting_first
def attach(
    model: torch.nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    noise: float | None = None,
    controller: Controller | None = None,
    exact: bool = False,
    budget: int | str | None = None,
    sample: tuple[Any, Any] | None = None,
    loss_fn: LossFunction | None = None,
    accumulate: int = 1,
    plan: StepPlan | Sequence[StepPlan] | None = None,
    on_mismatch: str = "refuse",
    checks_per_refresh: int = 1,
    arena: bool = False,
    codec: str | None = None,
    speed: str = "small",
    checks: bool = False,
    update_noise: float | None = None,
    offload: bool | str | os.PathLike[str] | Elsewhere = True,
    rewrite: bool = False,
) -> Session:
    """Hold what training ``model`` saves between forward and backward in fewer bytes.

    The training loop stays as it is. Every tensor that autograd saves in ``model``'s forward is packed
    when it is saved and unpacked when backward asks for it: losslessly where backward reads only a sign,
    a mask or an index, within an elementwise error bound where it reads values. On a CPU whose kernels were
    never compiled, a process compiles them in the background, and tensors are held exactly until then, which
    the log and the report say; with a plan, a budget or an arena the first step waits instead.

    Args:
        model: any module, on one device. DistributedDataParallel and FSDP2 modules too.
        optimizer: read for its momentum (COMET) and its state's size; changed only by a plan with
            ``states=True`` and with ``update_noise``.
        noise: allowed relative gradient noise, the squared error of all parameter gradients over their
            squared norm (default 1e-3).
        controller: any bound controller instead of ``noise``, such as ``squeezebox.bounds.Comet()``.
        exact: only lossless savings; losses and gradients equal plain PyTorch's to the bit.
        budget: bytes that the step's peak stays under, in the least time: see :func:`plan`.
        sample: see :func:`plan`.
        loss_fn: see :func:`plan`.
        accumulate: for a budget: see :func:`plan`.
        plan: such a plan made before; goes without noise, controller, exact and budget. Or several for the
            same step and budget, such as with and without ``offload``: the one that is fastest is in force,
            and where a disk or a link becomes slower or faster, another one takes its place.
        on_mismatch: what a forward does whose inputs are larger than the plan's, or not of its kind. "refuse"
            raises PlanError at the first tensor that the plan does not know. "replan" makes a plan for these
            inputs before it runs them, within the limits of the first one, with the sample's target cut or
            repeated to their sizes; plans are kept, and a forward takes the first that covers it. Where none
            can be made (no sample and loss_fn, inputs by place and by keyword, an earlier forward waiting for
            its backward, a loss that the target does not fit), tensors that the plan does not know are held
            exactly, and the report's notes say so. A plan with ``states=True`` is refused.
        checks_per_refresh: how many weighted layers, and how many other tensors, are compared with their
            exact values at each refresh; each holds its exact tensor and a second gradient for that step.
        arena: packed tensors whose size varies have places that are as large in every step, so that all
            steps take the same bytes; results are the same. Sizes are the plan's, whose peak counts them; or
            those of a few steps on ``sample`` with ``loss_fn``, after which the model is as before; or
            else those of the first step, with ``noise`` of the first two. What does not fit is left in memory
            of its own, counted in the report, and has a larger place from the next step on. On a device an
            arena is there anyway; there, tensors moved to the host have their places in one block.
        codec: which of ``squeezebox.codecs`` holds values within their bounds, such as one of your own (see
            :func:`squeezebox.codecs.register`). Where an operator may read a sign that it does not preserve,
            or a bound is in units of each channel's or row's deviation, the usual codec does.
        speed: how values are packed on a CPU. "small" codes them by entropy. "fast" lays them out in planes:
            about one bit an element more, packed and unpacked in a fraction of the time. A plan takes what
            pays, tensor by tensor.
        checks: look for saved tensors that are overwritten between forward and backward where autograd does
            not see it, as through ``.data``: checksums of all that are held themselves, parameters included,
            are taken when they are saved and compared when backward reads them. For finding faults; steps
            take longer.
        update_noise: allowed relative squared error of a parameter's update: the optimizer's state is packed
            in the fewest bits that have no more, 16 or 8 an element (see :func:`plan`). The loop stays as it
            is, with clipping, GradScaler and accumulation. None: state stays exact.
        offload: for a budget as in :func:`plan`; for a plan, where tensors are moved to instead of where it
            says, such as the ``squeezebox.memory.Neighbour`` that it was made with.
        rewrite: first compute parts of the model in ways that need less memory, as
            :func:`squeezebox.rewrite` finds and checks them on ``sample`` with ``loss_fn``. The session's
            ``rewritten`` has the table; ``detach()`` takes them back.

    Returns:
        The session, with ``report()``, ``step()``, ``measure_noise()``, ``state_dict()``, ``detach()``.

    Raises:
        OptionError: an argument of another kind; an optimizer whose state is more than a plan's budget has
            room for; noise not positive and finite, more than one of noise,
            controller and exact, an unknown codec, or one together with a plan, a budget or exact, or COMET's
            controller without an optimizer.
        AttachError: the model, a part of it or a whole that it is part of, has a session already; or numba or
            Blosc2, which packing needs, is not installed.
        BudgetError: no plan fits the budget; later too, from the model's forward, with "replan". Or the
            plan, made without ``arena``, has no room for one.
        CaptureError: from backward, with ``checks``: a saved tensor was overwritten; names its module,
            operator and line.
        UnsupportedModelError: the model spans two devices, is on neither CPU nor CUDA, or is compiled; later
            too, from its forward: the plan recomputes tensors from what fully_shard has taken away.
    """
    _require_packages()
    balanced = _balanced(plan, plain=not arena and on_mismatch != "replan")
    plan = cast("StepPlan | None", plan) if balanced is None else balanced.plan
    _check_kinds(model, noise, controller, plan, checks_per_refresh)
    _check_state_fits(plan, model, optimizer)
    if on_mismatch not in ("refuse", "replan"):
        raise OptionError(f"on_mismatch {on_mismatch!r} is neither 'refuse' nor 'replan'.")
    _check_state(
        update_noise, 1 if budget is not None else accumulate, planned=plan is not None or budget is not None
    )
    _check_codec(codec, speed, chosen_elsewhere=exact or plan is not None or budget is not None)
    place = _place(offload, model, planned=plan is not None or budget is not None)
    replan = on_mismatch == "replan"
    if replan and plan is None and budget is None:
        raise OptionError("on_mismatch='replan' is for a plan or a budget; give one of them.")
    rehearse = arena and plan is None and budget is None
    measures = budget is not None or replan or rehearse or rewrite
    if not measures and (sample is not None or loss_fn is not None):
        raise OptionError("sample and loss_fn are for a budget; give budget too, or call squeezebox.plan().")
    if budget is not None:
        if plan is not None or controller is not None:
            raise OptionError("budget makes a plan of its own; give it without plan and controller.")
        plan = make_plan(
            model,
            sample=sample,
            loss_fn=loss_fn,
            optimizer=optimizer,
            budget=budget,
            noise=noise,
            exact=exact,
            arena=arena,
            offload=offload,
            accumulate=accumulate,
        )
        noise, exact = None, False
    if plan is not None and (noise is not None or controller is not None or exact):
        raise OptionError("plan says what is lost already; give it without noise, controller and exact.")
    if plan is not None and arena and not plan.arena:
        plan = plan_with_places(plan)
    chosen = None if plan is not None else _controller(noise, controller, exact, optimizer is not None)
    where = offload if place is None else place
    replanning = _replanning(model, plan, sample, loss_fn, optimizer, where) if plan and replan else None
    places: Mapping[str, int] = {}
    if rehearse and (sample is not None or loss_fn is not None):
        sample, loss_fn = check_sample(sample, loss_fn)
        step = TrainingStep(model=model, sample=sample, loss_fn=loss_fn, optimizer=optimizer, noise=0.0)
        places = rehearsed(step, chosen)
    engine = begin(
        model,
        optimizer,
        chosen,
        plan=plan,
        place=place,
        balanced=balanced,
        replanning=replanning,
        checks_per_refresh=checks_per_refresh,
        arena=arena,
        places=places,
        codec=None if codec is None else codecs.get(codec),
        family=_FAMILIES[speed],
        checks=checks,
        waits=plan is not None or arena,  # for bytes that were promised
    )
    if update_noise is not None:
        _pack_state(engine, model, optimizer, update_noise)
    return Session(engine)


def _pack_state(
    engine: Engine, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, update_noise: float
) -> None:
    try:
        engine.update_by(packed_updates(model, optimizer, update_noise))
    except BaseException:
        engine.detach()
        raise


def _place(
    offload: bool | str | os.PathLike[str] | Elsewhere, model: torch.nn.Module, *, planned: bool
) -> Elsewhere | None:
    """Where a plan's tensors are moved to, if that is named; OptionError without a plan."""
    if isinstance(offload, bool):
        return None
    if not planned:
        raise OptionError("offload says where a plan moves tensors to; give budget or plan too.")
    return named_place(offload, model)


def _balanced(plan: StepPlan | Sequence[StepPlan] | None, *, plain: bool) -> Balanced | None:
    """Several plans, if they are; OptionError where they cannot take turns."""
    if not isinstance(plan, list | tuple):
        return None
    if not plain:
        raise OptionError(
            "several plans take turns without arena=True and on_mismatch='replan'; leave these out, or give "
            "one plan."
        )
    return Balanced(plan)


def _check_kinds(model: object, noise: object, controller: object, plan: object, checks: object) -> None:
    """Refuse what would fail in the first step, or go unnoticed."""
    check_kinds(model, noise)
    if controller is not None and not hasattr(controller, "due"):
        raise OptionError(
            f"controller {controller!r} is none; give an object such as squeezebox.bounds.Comet()."
        )
    if plan is not None and not isinstance(plan, StepPlan):
        raise OptionError(f"plan {plan!r} is none; squeezebox.load_plan(path) reads one from its file.")
    if not isinstance(checks, int) or checks < 0:
        raise OptionError(f"checks_per_refresh {checks!r} is no whole number from 0 on.")


_SPARE = 0.05  # of the planned state: counters of steps take a little


def _check_state_fits(
    plan: StepPlan | None, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> None:
    """Refuse an optimizer whose state is more than the plan counts, and more than its budget has room for."""
    if plan is None or plan.budget_bytes is None or plan.peak is None:
        return
    planned, found, own = plan.peak.parts.state_bytes, 0, plan.optimizer
    if own is not None and own.name != type(optimizer).__name__:
        return  # which is refused in any case
    with contextlib.suppress(OptionError):  # one that has to step before that is known
        found = state_bytes(model, optimizer if isinstance(optimizer, torch.optim.Optimizer) else None)
    if own is not None and own.state_bytes:
        found = planned * found // own.state_bytes  # the rest is elsewhere
    peak = plan.predicted_peak_bytes + found - planned
    if found > (1 + _SPARE) * planned and peak > plan.budget_bytes:
        raise OptionError(
            f"the plan counts {human_bytes(planned)} of optimizer state and {type(optimizer).__name__} takes "
            f"{human_bytes(found)}, so that the peak would be {human_bytes(peak)} of a budget of "
            f"{human_bytes(plan.budget_bytes)}. Make the plan with this optimizer."
        )


def _check_state(update_noise: object, accumulate: object, *, planned: bool) -> None:
    if accumulate != 1:
        raise OptionError("accumulate is for a budget; give budget too, or make the plan with it.")
    if update_noise is not None and planned:
        raise OptionError(
            "a plan says what becomes of the optimizer's state; give update_noise to squeezebox.plan() with "
            "states=True, or without plan and budget."
        )


def _check_codec(codec: str | None, speed: str, *, chosen_elsewhere: bool) -> None:
    """Refuse a codec where a plan names them or nothing is lost, and two ways of naming one."""
    if speed not in _FAMILIES:
        raise OptionError(f"speed {speed!r} is neither 'small' nor 'fast'.")
    if codec is not None and speed != "small":
        raise OptionError("codec and speed='fast' each name a codec; give one of them.")
    for name, given in (("codec", codec is not None), ("speed", speed != "small")):
        if given and chosen_elsewhere:
            raise OptionError(f"{name} is for noise or a controller; give it without plan, budget and exact.")


def _require_packages() -> None:
    """Refuse at once what the first step would end in; loads nothing."""
    missing = [name for name in ("blosc2", "numba") if find_spec(name) is None]
    if missing:
        raise AttachError(
            f"squeezebox packs with {' and '.join(missing)}, which Python does not find here; "
            f"pip install {' '.join(missing)}."
        )


def _replanning(
    model: torch.nn.Module,
    plan: StepPlan,
    sample: tuple[Any, Any] | None,
    loss_fn: LossFunction | None,
    optimizer: torch.optim.Optimizer | None,
    offload: bool | str | os.PathLike[str] | Elsewhere,
) -> Replanning:
    """Holds the sample's shapes and target, not its inputs; cannot plan without sample and loss."""
    if sample is None or loss_fn is None:
        return Replanning(plans={})
    if plan.optimizer is not None:
        raise OptionError(
            "on_mismatch='replan' makes plans without states=True, and this one has it; make the plan for "
            "the largest inputs, or without states=True."
        )
    exact = plan.noise == 0.0
    if offload is True and Action.OFFLOAD.value in plan.without:
        offload = False
    elif offload is True and plan.offload is not None:
        offload = plan.offload.folder
    make = functools.partial(
        make_plan,
        model,
        loss_fn=loss_fn,
        optimizer=optimizer,
        budget=plan.budget_bytes,
        noise=None if exact else plan.noise,
        exact=exact,
        arena=plan.arena,
        accumulate=plan.accumulate,
        offload=offload,
        recompute=Action.RECOMPUTE.value not in plan.without,
        time_limit=plan.time_limit,
    )
    shapes = shapes_of(sample[0])
    return Replanning(plans={shapes: plan}, sample=shapes, target=sample[1], planner=make)


def _controller(
    noise: float | None, controller: Controller | None, exact: bool, has_optimizer: bool
) -> Controller | None:
    given = [name for name, value in (("noise", noise), ("controller", controller)) if value is not None]
    if exact:
        given.append("exact")
    if len(given) > 1:
        raise OptionError(f"{' and '.join(given)} exclude each other; give one of them.")
    if exact:
        return None
    if isinstance(controller, Comet) and not has_optimizer:
        raise OptionError(
            "COMET's rule accepts a share of the optimizer's momentum, and no optimizer was given; "
            "pass optimizer=, or noise= instead of the controller."
        )
    return controller if controller is not None else NoiseBudget(noise=1e-3 if noise is None else noise)
