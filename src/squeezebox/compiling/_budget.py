"""A compiled step whose peak, measured, is within a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from squeezebox.capture import CompiledStep, Saving
from squeezebox.memory import Operator, PeakMeter, Recording
from squeezebox.planning import size_named
from squeezebox.reports import human_bytes
from squeezebox.schema import BudgetError, CaptureError
from squeezebox.steps import TrainingStep, device_of, held_by, nbytes_of, restored, tensors_in, ungraded

_ATTEMPTS = 8
_BEYOND = 2  # times that no choice was planned to be under the limit, before it is believed


@dataclass(frozen=True, slots=True)
class _Attempt:
    step: CompiledStep
    saving: Saving
    peak_bytes: int

    @property
    def saved(self) -> frozenset[str]:
        choice = self.saving.choice
        return frozenset(node.name for node in choice.saved) if choice is not None else frozenset()


def within_budget(
    budget: int | str, example: TrainingStep, compiled: Callable[[Saving], CompiledStep]
) -> CompiledStep:
    """The first of some steps whose measured peak is in the budget; each is planned for less than the last.

    Raises:
        BudgetError: none of them is.
    """
    size, is_share = size_named(budget)
    best = tried = _attempt(None, {}, example, compiled)
    budget_bytes = int(size * tried.peak_bytes) if is_share else int(size)
    seen, spare, beyond = {tried.saved}, 0, 0
    for _ in range(_ATTEMPTS):
        if tried.peak_bytes <= budget_bytes:
            tried.saving.close()
            tried.step.peak_bytes = tried.peak_bytes
            return tried.step
        errors = tried.saving.learned(_ran(example, tried.step))
        limit = budget_bytes - tried.peak_bytes + _planned(tried) - spare
        tried = _attempt(limit, errors, example, compiled)
        best = min(best, tried, key=lambda each: each.peak_bytes)
        beyond += _planned(tried) > limit
        if beyond == _BEYOND and tried.peak_bytes > budget_bytes:
            break
        if tried.saved in seen:
            spare += max(tried.peak_bytes - budget_bytes, 0)
        seen.add(tried.saved)
    raise _too_little(budget_bytes, best)


def _attempt(
    limit_bytes: int | None,
    errors: Mapping[Any, int],
    example: TrainingStep,
    compiled: Callable[[Saving], CompiledStep],
) -> _Attempt:
    saving = Saving(limit_bytes, errors)
    step = compiled(saving)
    example.gradients(step)  # compiles
    return _Attempt(step, saving, _peak(example, step))


def _peak(example: TrainingStep, step: CompiledStep) -> int:
    """Bytes of parameters, buffers and the sample, and the most that lives in addition to them."""
    meter = PeakMeter(device_of(example.model))
    _take(example, step, meter.start)
    return nbytes_of([*held_by(example.model), *tensors_in(example.sample)]) + meter.stop(()).total_bytes


def _ran(example: TrainingStep, step: CompiledStep) -> list[Operator]:
    recording = Recording(device_of(example.model), operators=True)
    _take(example, step, recording.start)
    return recording.operators()


def _take(example: TrainingStep, step: CompiledStep, start: Callable[[], bool]) -> None:
    """A step from no gradients on, of which what was started sees all."""
    with restored(example.model):
        example.model.zero_grad(set_to_none=True)
        if not start():
            raise CaptureError("a profiler is active, and budget= measures with torch's own; end it first.")
        loss = example.loss(step)
        with ungraded(loss, example.model):
            loss.backward()


def _planned(attempt: _Attempt) -> int:
    return attempt.saving.choice.peak_bytes if attempt.saving.choice is not None else 0


def _too_little(budget_bytes: int, best: _Attempt) -> BudgetError:
    choice = best.saving.choice
    owner = f", when {choice.owner} runs" if choice is not None else ""
    copied = nbytes_of(_copied_weights(best.step.module))
    layout = f"call to(memory_format=torch.channels_last), which spares {human_bytes(copied)} of copies, or "
    return BudgetError(
        f"the compiled step takes at least {human_bytes(best.peak_bytes)}{owner}, and the budget is "
        f"{human_bytes(budget_bytes)}. Give that much, or a smaller batch, or {layout if copied else ''}"
        "squeezebox.attach(budget=) the eager model: its plans move tensors away."
    )


def _copied_weights(model: torch.nn.Module) -> list[torch.Tensor]:
    """Of convolutions on a CPU: Inductor copies them into channels_last, and holds the copies to backward."""
    held = (each for each in model.parameters() if each.dim() == 4 and each.device.type == "cpu")
    return [each for each in held if not each.is_contiguous(memory_format=torch.channels_last)]
