"""What a step under a plan is measured to have, and the places that an arena gets."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch

from squeezebox.bounds import Controller
from squeezebox.memory import within_room
from squeezebox.planning._profiles import run_step
from squeezebox.profiling import state_bytes
from squeezebox.reports import StepPlan
from squeezebox.session import begin
from squeezebox.steps import TrainingStep, restored, tensors_in

_REHEARSED_STEPS = 4  # of an arena, whose places should be large enough for the bounds that follow


@within_room("a step under the plan")
def measured_noise(step: TrainingStep, plan: StepPlan) -> float | None:
    """Of a step under the plan, with its weights as they are; None where no gradient is other than zero."""
    model, loss_fn, plan = step.model, step.loss_fn, dataclasses.replace(plan, weights=None)
    with restored(model, *[loss_fn] if isinstance(loss_fn, torch.nn.Module) else ()):
        engine = begin(model, step.optimizer, None, plan=plan)
        try:
            noise = engine.noise_of(lambda: run_step(step, engine.framed()))
            return None if math.isnan(noise) else noise
        finally:
            engine.detach()


@within_room("a step under the plan")
def measured_peak(step: TrainingStep, plan: StepPlan) -> int | None:
    """Of a step under the plan, with the state that the optimizer will have; None without a meter."""
    model, loss_fn, optimizer = step.model, step.loss_fn, step.optimizer
    present = sum(state.nbytes for state in tensors_in([*optimizer.state.values()])) if optimizer else 0
    with restored(model, *[loss_fn] if isinstance(loss_fn, torch.nn.Module) else ()):
        engine = begin(model, optimizer, None, plan=plan)
        try:
            model.zero_grad(set_to_none=True)
            run_step(step, engine.framed())
            engine.close_step()
            peak = engine.records.peak_bytes
        finally:
            engine.detach()
    return None if peak is None else peak + state_bytes(model, optimizer) - present


def rehearsed(step: TrainingStep, controller: Controller | None) -> Mapping[str, int]:
    """The places that an arena has after a few steps of the sample, with bounds that follow it."""
    model, loss_fn = step.model, step.loss_fn
    with restored(model, *[loss_fn] if isinstance(loss_fn, torch.nn.Module) else ()):
        engine = begin(model, step.optimizer, controller, arena=True)
        try:
            for _ in range(1 if controller is None else _REHEARSED_STEPS):
                model.zero_grad(set_to_none=True)
                run_step(step, engine.framed())
            engine.store.start_places(measured=False, guessed=False)
            return engine.store.places
        finally:
            engine.detach()
