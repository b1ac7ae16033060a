"""A compiled step whose peak, measured, is within a budget."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from squeezebox.capture import CompiledStep, Saving
from squeezebox.memory import Operator, PeakMeter, Recording
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


def within_budget(
    budget: int | str, example: TrainingStep, compiled: Callable[[Saving], CompiledStep]
) -> CompiledStep:
    """The first of some steps whose measured peak is in the budget.

    Each is planned with what was measured at the kernels of those before it.

    Raises:
        BudgetError: none of them is.
    """
    size, is_share = size_named(budget)
    best = tried = _attempt(Saving(None), example, compiled)
    budget_bytes = int(size * tried.peak_bytes) if is_share else int(size)
    search: _Search | None = None
    for _ in range(_ATTEMPTS):
        if tried.peak_bytes <= budget_bytes:
            break
        search = search or _Search(tried.saving, budget_bytes)
        saving = search.next(tried, _ran(example, tried.step))
        if saving is None:
            break
        tried = _attempt(saving, example, compiled)
        best = min(best, tried, key=lambda each: each.peak_bytes)
    if best.peak_bytes > budget_bytes:
        raise _too_little(budget_bytes, best)
    tried.saving.peak_bytes = tried.step.peak_bytes = tried.peak_bytes
    return tried.step


class _Search:
    """Choices for a budget, each by what the steps before it measured."""

    def __init__(self, saving: Saving, budget_bytes: int) -> None:
        (self._joint, _), self._starts = saving.known(), saving.starts
        self._budget_bytes = budget_bytes
        self._above = dict[frozenset[Any], int]()  # bytes of measured peaks above the budget

    def next(self, tried: _Attempt, ran: Iterable[Operator]) -> Saving | None:
        """One that was not tried; None where all that are found were, and are above the budget."""
        saved = tried.saving.known()[1].saved
        self._joint.learn(saved, ran)
        self._above[saved] = tried.peak_bytes - self._budget_bytes
        limit = self._joint.choice(saved, sys.maxsize).peak_bytes - self._above[saved]
        while True:
            choice = self._joint.search([*self._starts, saved], limit)
            if choice.saved not in self._above:
                return Saving(choice)
            if choice.peak_bytes > limit:
                return None
            limit -= max(self._above[choice.saved], limit // 32)


def _attempt(saving: Saving, example: TrainingStep, compiled: Callable[[Saving], CompiledStep]) -> _Attempt:
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


def _too_little(budget_bytes: int, best: _Attempt) -> BudgetError:
    _, choice = best.saving.known()
    copied = best.step.report().copied_bytes
    layout = f"call to(memory_format=torch.channels_last), which spares {human_bytes(copied)} of copies, or "
    return BudgetError(
        f"the compiled step takes at least {human_bytes(best.peak_bytes)}, when {choice.owner} runs, and the "
        f"budget is {human_bytes(budget_bytes)}. Give that much, or a smaller batch, or "
        f"{layout if copied else ''}squeezebox.attach(budget=) the eager model: its plans move tensors away."
    )
