"""A compiled step whose peak, measured, is within a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from squeezebox.capture import CompiledStep, Saving
from squeezebox.memory import PeakMeter
from squeezebox.planning import size_named
from squeezebox.reports import human_bytes
from squeezebox.schema import BudgetError, CaptureError
from squeezebox.steps import TrainingStep, device_of, held_by, nbytes_of, restored, tensors_in, ungraded

_ATTEMPTS = 8


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
    best = tried = _attempt(None, example, compiled)
    budget_bytes = int(size * tried.peak_bytes) if is_share else int(size)
    limit, seen = budget_bytes - tried.peak_bytes + _planned(tried), {tried.saved}
    for _ in range(_ATTEMPTS):
        if tried.peak_bytes <= budget_bytes:
            tried.saving.closed = True
            tried.step.peak_bytes = tried.peak_bytes
            return tried.step
        tried = _attempt(limit, example, compiled)
        best = min(best, tried, key=lambda each: each.peak_bytes)
        if tried.saved in seen:
            break
        seen.add(tried.saved)
        limit -= max(tried.peak_bytes - budget_bytes, 0)
    raise _too_little(budget_bytes, best)


def _attempt(
    limit_bytes: int | None, example: TrainingStep, compiled: Callable[[Saving], CompiledStep]
) -> _Attempt:
    saving = Saving(limit_bytes)
    step = compiled(saving)
    example.gradients(step)  # compiles
    return _Attempt(step, saving, _peak(example, step))


def _peak(example: TrainingStep, step: CompiledStep) -> int:
    """Bytes of parameters, buffers and the sample, and the most that lives in addition to them."""
    held = nbytes_of([*held_by(example.model), *tensors_in(example.sample)])
    meter = PeakMeter(device_of(example.model))
    with restored(example.model):
        example.model.zero_grad(set_to_none=True)
        if not meter.start():
            raise CaptureError("a profiler is active, and budget= measures with torch's own; end it first.")
        try:
            loss = example.loss(step)
            with ungraded(loss, example.model):
                loss.backward()
        finally:
            peak = meter.stop(()).total_bytes
    return held + peak


def _planned(attempt: _Attempt) -> int:
    return attempt.saving.choice.peak_bytes if attempt.saving.choice is not None else 0


def _too_little(budget_bytes: int, best: _Attempt) -> BudgetError:
    choice = best.saving.choice
    owner = f", when {choice.owner} runs" if choice is not None else ""
    return BudgetError(
        f"the compiled step takes at least {human_bytes(best.peak_bytes)}{owner}, and the budget is "
        f"{human_bytes(budget_bytes)}. Give that much, or a smaller batch, or squeezebox.attach(budget=) the "
        "eager model: its plans move tensors away."
    )
