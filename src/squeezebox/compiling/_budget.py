"""A compiled step whose peak, measured, is within a budget."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from squeezebox.capture import CompiledStep, Saving
from squeezebox.compiling._states import Updating
from squeezebox.memory import PeakMeter, Ran, Recording
from squeezebox.planning import size_named
from squeezebox.reports import human_bytes
from squeezebox.schema import BudgetError, CaptureError
from squeezebox.steps import TrainingStep, device_of, held_by, nbytes_of, tensors_in, ungraded

_ATTEMPTS = 8
_MISSES = 3  # attempts in a row for which the model finds nothing within the budget
_SLICES = 8  # of the batch, for the first layers where nothing else is within the budget


@dataclass(frozen=True, slots=True)
class Fitted:
    """A step as it was made for an example.

    Attributes:
        updating: of the optimizer's parameters, which begins when the step is ready; or None.
        room: bytes for the optimizer's states.
    """

    step: CompiledStep
    example: TrainingStep
    updating: Updating | None = None
    room: int = 0

    def gradients(self) -> list[torch.Tensor]:
        """On the example."""
        if self.updating is not None:
            return self.updating.gradients(self.step)
        return self.example.gradients(self.step)

    def ready(self) -> CompiledStep:
        """The step, which updates from now on what it is to update."""
        if self.updating is not None:
            assert self.step.peak_bytes is not None
            self.step.peak_bytes += self.updating.begin(self.step, self.room)
        return self.step


@dataclass(frozen=True, slots=True)
class _Attempt:
    step: CompiledStep
    saving: Saving
    peak_bytes: int  # without the optimizer's states
    least_bytes: int  # of what the step begins with, and of gradients at its end


def within_budget(
    budget: int | str,
    example: TrainingStep,
    compiled: Callable[..., CompiledStep],
    updates: Callable[[CompiledStep], Updating] | None = None,
) -> Fitted:
    """The first of some steps whose measured peak is in the budget.

    Each is planned with what was measured at the kernels of those before it. With ``updates``, which gets
    torch.compile's own step, the optimizer's states count as well, and gradients are used up in backward.
    Where none is within the budget, first layers are tried in slices of the batch. At last, the step holds
    freed memory for later tensors, if its peak is within the budget then too: new pages take time.

    Raises:
        BudgetError: none of them is.
    """
    size, is_share = size_named(budget)
    tried = _attempt(Saving(), example, compiled)
    plain_bytes, updating = tried.peak_bytes, None
    if updates is not None:
        updating = updates(tried.step)
        plain_bytes, compiled = updating.plain_peak(plain_bytes), updating.spending(compiled)
        tried = _attempt(Saving(), example, compiled, updating)
    budget_bytes = int(size * plain_bytes) if is_share else int(size)
    if budget_bytes < tried.least_bytes:
        raise _none_possible(budget_bytes, tried.least_bytes, updating is not None)
    best = _searched(tried, budget_bytes, example, compiled, updating)
    least_bytes = updating.states.least_bytes if updating is not None else 0
    if best.peak_bytes + least_bytes > budget_bytes:
        slicing = functools.partial(compiled, slices=_SLICES)
        tried = _attempt(Saving(), example, slicing, updating)
        if tried.step.slices > 1:
            sliced = _searched(tried, budget_bytes, example, slicing, updating)
            best = min(best, sliced, key=lambda each: each.peak_bytes)
    if best.peak_bytes + least_bytes > budget_bytes:
        raise _too_little(budget_bytes, best.peak_bytes + least_bytes, best)
    reusing = functools.partial(compiled, slices=best.step.slices, reuse=True)
    tried = _attempt(best.saving.again(), example, reusing, updating)
    if tried.peak_bytes <= (budget_bytes if updating is None else best.peak_bytes):  # the rest is for states
        best = tried
    best.saving.peak_bytes = best.step.peak_bytes = best.peak_bytes
    return Fitted(best.step, example, updating, budget_bytes - best.peak_bytes)


def _searched(
    tried: _Attempt,
    budget_bytes: int,
    example: TrainingStep,
    compiled: Callable[..., CompiledStep],
    updating: Updating | None,
) -> _Attempt:
    """The first attempt that is within the budget, from one on; or the lowest."""
    search, best = _Search(tried.saving, budget_bytes, updating), tried
    for _ in range(_ATTEMPTS):
        if tried.peak_bytes <= search.limit_bytes:
            break
        saving = search.next(tried, _ran(example, tried.step, updating))
        if saving is None:
            break
        tried = _attempt(saving, example, compiled, updating)
        best = min(best, tried, key=lambda each: each.peak_bytes)
    return best


class _Search:
    """Choices for a budget, each by what the steps before it measured.

    Attributes:
        limit_bytes: what is left of the budget for the graph, without the optimizer's states.
    """

    def __init__(self, saving: Saving, budget_bytes: int, updating: Updating | None) -> None:
        self._saving, self._starts = saving, saving.starts()
        self._joint, self._plain = saving.known()
        self._budget_bytes, self._updating = budget_bytes, updating
        self.limit_bytes = budget_bytes - (updating.states.nbytes if updating is not None else 0)
        self._peaks = dict[frozenset[Any], int]()  # as measured
        self._misses = 0

    def next(self, tried: _Attempt, ran: Ran) -> Saving | None:
        """One that was not tried; None where those that are found were, or are above the budget each time."""
        saved = (tried.saving.choice or self._plain).saved
        expected = self._joint.choice(saved, sys.maxsize).peak_bytes
        self._joint.learn(saved, ran)
        found = self._joint.choice(saved, sys.maxsize).peak_bytes
        besides = tried.peak_bytes - found
        if not self._peaks and self._updating is not None:
            self.limit_bytes = self._budget_bytes - self._room(self._updating, saved, besides)
        limit = self.limit_bytes - besides
        below = limit - max(found - expected, 0) // 2 if self._peaks else limit  # the next may be as wrong
        self._peaks[saved] = tried.peak_bytes
        untried = self._untried(saved, below) or self._untried(saved, limit)
        if untried is None:
            return None
        assert untried.choice is not None
        self._misses = self._misses + 1 if untried.choice.peak_bytes > limit else 0
        return None if self._misses > _MISSES else untried

    def _untried(self, saved: frozenset[Any], limit: int) -> Saving | None:
        """What is found for this limit, or for less where that was tried; None where all is above it."""
        while True:
            choice = self._joint.search([*self._starts, saved], limit)
            if choice.saved not in self._peaks:
                return self._saving.chosen(choice)
            if choice.peak_bytes > limit:
                return None
            limit -= max(self._peaks[choice.saved] - self.limit_bytes, limit // 32)

    def _room(self, updating: Updating, saved: frozenset[Any], besides: int) -> int:
        """Of the budget for the states: what takes the least time for them and the graph together."""
        found = list[tuple[float, int]]()
        for room in updating.rooms():
            limit = self._budget_bytes - room - besides
            choice = self._joint.search([*self._starts, saved], limit)
            if choice.peak_bytes <= limit:
                left = self._budget_bytes - besides - choice.peak_bytes
                found.append((choice.seconds + updating.seconds(left), room))
        return min(found)[1] if found else updating.states.least_bytes


def _attempt(
    saving: Saving,
    example: TrainingStep,
    compiled: Callable[..., CompiledStep],
    updating: Updating | None = None,
) -> _Attempt:
    step, meter = compiled(saving), PeakMeter(device_of(example.model))
    _take(example, step, lambda: True, updating)  # compiles
    gradients = _take(example, step, meter.start, updating)
    own = nbytes_of([*held_by(example.model), *tensors_in(example.sample)])
    return _Attempt(step, saving, own + meter.stop(()).total_bytes, own + gradients)


def _ran(example: TrainingStep, step: CompiledStep, updating: Updating | None) -> Ran:
    recording = Recording(device_of(example.model), operators=True)
    _take(example, step, recording.start, updating)
    return recording.operators()


def _take(
    example: TrainingStep,
    step: CompiledStep,
    start: Callable[[], bool],
    updating: Updating | None,
) -> int:
    """A step from no gradients on, of which what was started sees all; bytes of gradients at its end."""
    rehearsing = contextlib.nullcontext() if updating is None else updating.rehearsing()
    with example.restored(), rehearsing:
        example.model.zero_grad(set_to_none=True)
        if not start():
            raise CaptureError("a profiler is active, and budget= measures with torch's own; end it first.")
        loss = example.loss(step)
        with ungraded(loss, example.model):
            loss.backward()
        return nbytes_of(each.grad for each in example.model.parameters() if each.grad is not None)


def _none_possible(budget_bytes: int, least_bytes: int, is_updating: bool) -> BudgetError:
    change = "" if is_updating else "optimizer= and states=True, which leave no gradients, or "
    return BudgetError(
        f"parameters, {'' if is_updating else 'gradients at the end, '}buffers and the sample alone take "
        f"{human_bytes(least_bytes)}, and the budget is {human_bytes(budget_bytes)}. Give more, or {change}"
        "squeezebox.attach(budget=) the eager model: its plans move tensors away."
    )


def _too_little(budget_bytes: int, least_bytes: int, best: _Attempt) -> BudgetError:
    _, choice = best.saving.known()
    copied = best.step.report().copied_bytes
    layout = f"call to(memory_format=torch.channels_last), which spares {human_bytes(copied)} of copies, or "
    return BudgetError(
        f"the least compiled step that was found takes {human_bytes(least_bytes)}, when {choice.owner} runs, "
        f"and the budget is {human_bytes(budget_bytes)}. Give that much, or a smaller batch, or "
        f"{layout if copied else ''}squeezebox.attach(budget=) the eager model: its plans move tensors away."
    )
