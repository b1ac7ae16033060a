"""The same choices for torch.compile: bits for every value of a compiled step."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from squeezebox import planner
from squeezebox.bounds import NoiseBudget
from squeezebox.capture import (
    BITS,
    BitRule,
    CompiledStep,
    HalfSteps,
    Saving,
    check_supported,
    compiled_part,
    refuse_transforms,
)
from squeezebox.compiling._budget import Fitted, within_budget
from squeezebox.compiling._states import Updating
from squeezebox.planning import STATISTICS_STEPS, check_kinds, check_states, named_place, within
from squeezebox.reports import StepPlan
from squeezebox.schema import (
    Action,
    AttachError,
    Option,
    OptionError,
    PlanError,
    Profile,
    TensorProfile,
    UnsupportedModelError,
)
from squeezebox.session import attached, begin
from squeezebox.steps import LossFunction, TrainingStep, check_sample, gradient_noise, restored

_LAW_BITS = (8, 4)  # with fewer, errors are no longer small, as the law takes them to be


def compile_model(
    model: torch.nn.Module,
    *,
    plan: StepPlan | None = None,
    noise: float | None = None,
    bits: int | None = None,
    budget: int | str | None = None,
    sample: tuple[Any, Any] | None = None,
    loss_fn: LossFunction | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    states: bool = False,
    update_noise: float | None = None,
    offload: bool | str | os.PathLike[str] = True,
    fullgraph: bool = False,
    options: Mapping[str, Any] | None = None,
) -> CompiledStep:
    """Compile ``model`` as torch.compile does, with the activations that it saves in fewer bits.

    Large saved values are held in 8, 4 or 2 bits an element and masks in one. Each row of elements (a channel
    of a sample, a token) has its own step, measured when it is packed, and every element comes back within
    half a step of its row: at most the row's range / (2^bits - 2) / 2 off, plus the rounding of its dtype.
    Zeros stay zero and signs stay; masks and indices are those that forward computed. Cheap operators are
    computed again in backward rather than saved. Of a row with NaN or infinity nothing finite comes back.

    Args:
        model: an eager module, on one device, not attached. It is left as it is.
        plan: from :func:`plan`. What it keeps is kept; what it packs gets the fewest bits that stay within
            the bound, in the mean square over the first batch, or is kept where 8 do not; what it would move
            to a file or recompute gets 8 bits, or is kept where the plan loses nothing.
        noise: allowed relative gradient noise on ``sample``: values get 8 or 4 bits or are kept, by the error
            law after a few eager steps. The step is compiled at once and its noise measured; where there is
            more than the law predicted (backward may compute several operators' inputs again from one
            tensor), it is compiled again with less, up to 4 times, and at last with every value kept.
        budget: bytes, "2GiB", or a share of the peak of torch.compile's own step, "50%". It is of parameters,
            buffers, the sample, and all that lives in addition in forward, loss and backward, with no
            gradients before. The step saves what keeps the peak under the budget in the least time, and
            computes the rest again. Nothing is lost, but with noise, which also allows values in 8 or 4
            bits. Where none of that fits, the first layers are worked in slices of the batch. Up to 9 steps
            are compiled, and their peaks measured on ``sample``, until one is within the budget; up to twice
            that with slices, and four times that with noise. All graphs of the model share the budget.
            Training inputs of other shapes save the same; those that would take more than the sample are
            refused, and so are branches that the sample does not take.
        sample: goes with noise or budget: inputs and target, as :func:`plan` takes them.
        loss_fn: goes with noise or budget: see :func:`plan`.
        optimizer: goes with states: of this model's parameters; call its own ``step()`` as usual.
        states: the budget counts the optimizer's states too. Each parameter is updated within the compiled
            backward, as soon as its gradient is there, and the gradient is gone then. States are in memory
            or in a file, as :func:`plan` would choose. ``close()`` ends that.
        update_noise: with states: allowed relative squared error of updates, see :func:`plan`.
        offload: with states: whether they may be in a file, or the folder for it.
        bits: 8, 4 or 2 for every value (default 8, without plan, noise and budget).
        fullgraph: refuse models with graph breaks.
        options: of Inductor, as for torch.compile.

    Returns:
        Call it as the model. ``report()`` says what is saved, and the noise measured. The model's own
        parameters are trained.

    Raises:
        OptionError: an argument is out of range or missing, or more than one of plan, noise, bits and budget,
            except for noise with a budget. Or states without a budget, optimizer or offload without states,
            or the optimizer's step is not parameter by parameter.
        BudgetError: no choice keeps the peak within the budget; it says which operator has the least.
        AttachError: the model is attached; also when called while it is.
        PlanError: the plan was made for another model.
        UnsupportedModelError: the model spans two devices or is compiled already.
    """
    if budget is None and (
        states or optimizer is not None or update_noise is not None or offload is not True
    ):
        raise OptionError("optimizer, states, update_noise and offload go with budget=; give that too.")
    if states is False and (optimizer is not None or offload is not True):
        raise OptionError("optimizer and offload say how states=True updates and moves; give that too.")
    check_kinds(model, noise, optimizer)
    _check_compile_options({"plan": plan, "noise": noise, "bits": bits, "budget": budget}, sample, loss_fn)
    refuse_transforms()
    _refuse_compiled(model)
    check_supported(model)
    _refuse_attached(model)
    check = functools.partial(_refuse_attached, model)

    def compiled(choose: Callable[..., BitRule], save: Saving | None = None, **more: Any) -> CompiledStep:
        return CompiledStep(model, choose, check, fullgraph=fullgraph, options=options, save=save, **more)

    if sample is not None and loss_fn is not None:
        sample, loss_fn = check_sample(sample, loss_fn)
        example = TrainingStep(model=model, sample=sample, loss_fn=loss_fn, optimizer=optimizer)
        if budget is not None:
            check_states(example, None, 1, update_noise, None, wanted=states)
            updates = None
            if states:
                example = replace(example, folder=named_place(offload, model))
                updates = functools.partial(
                    Updating, example, update_noise=update_noise, moves=offload is not False
                )
            return _within_budget(budget, noise, example, compiled, updates)
        if noise is not None:
            return _within(noise, example, compiled, lambda rule: Fitted(compiled(rule), example)).step
    if plan is None:
        return compiled(lambda args, kwargs: BitRule(default=bits or 8))
    _check_places(model, plan)
    return compiled(lambda args, kwargs: _planned_bits(plan, _half_steps(model, plan, args, kwargs)))


def _all_kept(*_: Any) -> BitRule:
    return BitRule(default=None)


def _check_compile_options(
    ways: Mapping[str, Any], sample: tuple[Any, Any] | None, loss_fn: LossFunction | None
) -> None:
    given = [name for name, value in ways.items() if value is not None]
    if len(given) > 1 and given != ["noise", "budget"]:
        raise OptionError(f"{' and '.join(given)} exclude each other; give one of them.")
    bits, noise, plan = ways["bits"], ways["noise"], ways["plan"]
    if plan is not None and not isinstance(plan, StepPlan):
        raise OptionError(f"plan {plan!r} is none; squeezebox.load_plan(path) reads one from its file.")
    if bits is not None and bits not in BITS:
        raise OptionError(f"bits is {bits!r}; values are packed in {', '.join(map(str, BITS))} bits.")
    if noise is not None and not 0.0 < noise < math.inf:
        raise OptionError(f"noise is {noise!r}; give a positive share of the gradient, such as 1e-2.")
    measured = noise is not None or ways["budget"] is not None
    if {sample is not None, loss_fn is not None} != {measured}:
        raise OptionError(
            "noise= or budget= goes with sample=(inputs, target) and loss_fn=; give all three or none."
        )


def _refuse_compiled(model: torch.nn.Module) -> None:
    part = compiled_part(model)
    if part is not None:
        raise UnsupportedModelError(
            f"module '{part}' is compiled by torch.compile already, and its graphs are made without packing. "
            "Pass the eager model to squeezebox.compile(), which compiles it as torch.compile does."
        )


def _refuse_attached(model: torch.nn.Module) -> None:
    if model in attached:
        raise AttachError(
            f"{type(model).__name__} is attached: its hooks cannot be compiled. Call detach() on its session "
            "before compiling it, or before the compiled step is called."
        )


def _check_places(model: torch.nn.Module, plan: StepPlan) -> None:
    """Every module that the plan names is one of the model's."""
    modules = dict(model.named_modules())
    for tensor in plan.tensors:
        path = tensor.key.rpartition(":")[0]
        if path not in modules:
            raise PlanError(
                f"the plan, made for {plan.model}, has a tensor '{tensor.key}', and this "
                f"{type(model).__name__} has no module '{path}': it was made for another model. Make a new "
                "one with squeezebox.plan()."
            )


def _half_steps(
    model: torch.nn.Module, plan: StepPlan, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> HalfSteps:
    """What each number of bits would mean for each of the plan's tensors, from one eager forward."""
    with restored(model), torch.enable_grad():
        engine = begin(model, None, None, plan=plan)
        found = HalfSteps()
        try:
            with engine.store.shown_to(found.onlooker):
                model(*args, **kwargs)
        finally:
            engine.detach()
    return found


def _planned_bits(plan: StepPlan, half_steps: HalfSteps) -> BitRule:
    """The fewest bits within each bound; None where the tensor is kept."""
    chosen: dict[str, int | None] = {}
    for tensor in plan.tensors:
        option, known = tensor.option, half_steps.by_key.get(tensor.key, {})
        if option.action in (Action.OFFLOAD, Action.RECOMPUTE, Action.REGENERATE):
            chosen[tensor.key] = 8 if plan.noise > 0.0 else None
        elif option.bound > 0.0:
            chosen[tensor.key] = min((bits for bits in known if known[bits] <= option.bound), default=None)
        elif option.action is Action.KEEP or option.codec == "lossless":
            chosen[tensor.key] = None
    return BitRule(default=None, by_key=chosen)


def _within_budget(
    budget: int | str,
    noise: float | None,
    example: TrainingStep,
    compiled: Callable[..., CompiledStep],
    updates: Callable[..., Updating] | None,
) -> CompiledStep:
    def make(rule: Callable[..., BitRule]) -> Fitted:
        checked = updates and functools.partial(updates, exact=rule is _all_kept)
        return within_budget(budget, example, functools.partial(compiled, rule), checked)

    return (make(_all_kept) if noise is None else _within(noise, example, compiled, make)).ready()


def _within(
    noise: float,
    example: TrainingStep,
    compiled: Callable[[Callable[..., BitRule]], CompiledStep],
    make: Callable[[Callable[..., BitRule]], Fitted],
) -> Fitted:
    """A step as ``make`` makes it whose noise on the example, measured, is not above ``noise``."""
    profile = _bit_profile(example)
    exact = example.gradients(compiled(_all_kept) if example.is_random() else example.model)

    def measured(rule: Callable[..., BitRule]) -> tuple[Fitted, float]:
        fitted = make(rule)
        fitted.step.noise = gradient_noise(exact, fitted.gradients())
        return fitted, fitted.step.noise

    def attempt(limit: float) -> tuple[Fitted, float, float]:
        rule, predicted = _fewest_bits(profile, limit)
        fitted, found = measured(lambda args, kwargs: rule)
        return fitted, predicted, found

    return within(noise, attempt) or measured(_all_kept)[0]


def _fewest_bits(profile: Profile, allowed: float) -> tuple[BitRule, float]:
    """The choice that holds least at no more noise by the error law, and its noise."""
    if not profile.tensors:
        return BitRule(default=None), 0.0
    chosen = planner.smallest(profile, allowed).choices
    by_key = {key: int(option.codec) if option.codec else None for key, option in chosen.items()}
    return BitRule(default=None, by_key=by_key), sum(option.noise for option in chosen.values())


def _bit_profile(example: TrainingStep) -> Profile:
    """Bytes and noise of every number of bits for every tensor."""
    with example.restored():
        engine = begin(example.model, None, NoiseBudget(noise=1.0))
        try:
            for _ in range(STATISTICS_STEPS):
                example.gradients(example.model)
            engine.close_step()
            found = HalfSteps()
            with engine.store.shown_to(found.onlooker):
                example.loss(example.model)
            sensitivities = engine.policy.state.sensitivities
        finally:
            engine.detach()
    tensors = tuple(
        TensorProfile(
            key=key,
            saved_at=0,
            first_use=1,
            last_use=1,
            options=_bit_options(found, key, sensitivities[key]),
        )
        for key in found.by_key
        if key in sensitivities
    )
    return Profile(base_bytes=(0, 0), tensors=tensors)


def _bit_options(half_steps: HalfSteps, key: str, sensitivity: float) -> tuple[Option, ...]:
    numel = half_steps.numel[key]
    keep = Option(action=Action.KEEP, held_bytes=half_steps.saved_bytes[key])
    return keep, *(
        Option(
            action=Action.COMPRESS,
            codec=str(bits),
            held_bytes=numel * bits // 8,
            noise=sensitivity * half_step**2,
        )
        for bits, half_step in half_steps.by_key[key].items()
        if bits in _LAW_BITS
    )
