"""A caller's own training step, recorded as it runs: allocations, modules, phases, and the clock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from squeezebox.memory import parts_of
from squeezebox.profiling._ledgers import RealLedger
from squeezebox.profiling._record import Reading, StepMarks, states_of
from squeezebox.schema import Activity, Kind, StepTrace


def record_closure(
    model: torch.nn.Module,
    closure: Callable[[], object],
    *,
    optimizer: torch.optim.Optimizer | None,
    around: Callable[[StepMarks], AbstractContextManager[object]],
) -> StepTrace:
    """Run ``closure`` once, and say what it allocates, when, for whom, and how long it takes.

    Phases follow what runs: "forward" until backward begins, "loss" once the model has returned, "optimizer"
    from the end of backward on. Seconds are the host's, from the start of one operator to the next.

    Args:
        model: whose modules the timeline distinguishes.
        closure: forward, loss and backward, and the optimizer's step if it is to be seen.
        optimizer: whose state is named as such.
        around: is given the marks, and makes a context for the closure. Through it
            :meth:`StepMarks.begin` and :meth:`StepMarks.end` tell what time is spent on.

    Raises:
        OptionError: another profiler is active.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    ledger = RealLedger(device)
    try:
        step = StepMarks(model, ledger)
        step.before_each = _Phases(model, step).look
        known = [
            step.known(Kind.PARAMETER, model.parameters()),
            step.known(Kind.BUFFER, model.buffers()),
            step.known(Kind.GRADIENT, _gradients(model)),
            step.known(Kind.STATE, states_of(optimizer)),
        ]
        with around(step), step:
            step.begin(Activity.COMPUTING)
            closure()
            step.stop()
            step.note(Kind.GRADIENT, _gradients(model))
            step.note(Kind.STATE, states_of(optimizer))
        return Reading(step.running, step.notes).trace(known, ledger.events())
    finally:
        ledger.close()


class _Phases:
    """Which phase runs, seen from whether a module or autograd does."""

    def __init__(self, model: torch.nn.Module, step: StepMarks) -> None:
        self._model = model
        self._step = step
        self._began = False
        self._gradients = {
            gradient.untyped_storage().data_ptr(): StorageWeakRef(gradient.untyped_storage())
            for gradient in _gradients(model)
        }

    def look(self) -> None:
        """Turn to the phase that has begun, if one has."""
        step = self._step
        for address in [address for address, storage in self._gradients.items() if storage.expired()]:
            del self._gradients[address]
            step.gone(address)
        if torch._C._current_graph_task_id() != -1:
            if step.phase != "backward":
                step.turn("backward")
        elif step.in_forward:
            step.phase, self._began = "forward", True
        elif step.phase == "forward" and self._began:
            step.phase = "loss"
        elif step.phase == "backward":
            step.note(Kind.GRADIENT, _gradients(self._model))
            step.phase = "optimizer"


def _gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    gradients = (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    return [part for gradient in gradients for part in parts_of(gradient)]
