"""Closed steps as the report shows them, which ones gather statistics, and a session's state."""

from __future__ import annotations

import functools
import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from squeezebox import bounds
from squeezebox.bounds import ControllerState
from squeezebox.capture import Collector, Recorder, Row, Store
from squeezebox.memory import Peak
from squeezebox.reports import StepPlan, human_bytes, output_held
from squeezebox.schema import (
    ArenaRecord,
    BoundRecord,
    Check,
    FormatError,
    MemoryGrowthWarning,
    Role,
    StepRecord,
)
from squeezebox.session._policy import BoundPolicy
from squeezebox.steps import names_of

_HISTORY = 128  # refreshes whose bounds are remembered: those of 11,000 steps


@dataclass(kw_only=True, slots=True)
class Records:
    """What is known of a session's steps. ``latest`` makes the record of the last closed one."""

    store: Store
    policy: BoundPolicy
    notes: Mapping[str, None]
    latest: Callable[[], StepRecord] | None = None
    noise: float | None = None  # as measured
    update_noise: Callable[[], float | None] = lambda: None
    checks: list[Check] = field(default_factory=list)
    history: deque[BoundRecord] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    _peak_bytes: int | None = None  # of a usual step, all that lived before it included,
    _highest_bytes: int = 0  # of all of these,
    _peak: Peak | None = None  # of what it allocated,
    _refresh_peak_bytes: int | None = None  # and of one with statistics, or before there were kernels
    _peak_step: int | None = None  # the number of the one that counts
    _floor_bytes: int | None = None

    def note_peak(self, step: int, peak: Peak, baseline_bytes: int, *, usual: bool) -> None:
        """A step was measured, a usual one or a refresh; the baseline is what lived before it."""
        if usual or self._peak is None:
            self._peak_step = step
        if usual:
            self._peak, self._peak_bytes = peak, baseline_bytes + peak.total_bytes
            self._highest_bytes = max(self._highest_bytes, self._peak_bytes)
        else:
            self._refresh_peak_bytes = baseline_bytes + peak.total_bytes

    def note_statistics(self, step: int, collector: Collector, checks: tuple[Check, ...]) -> None:
        """A refresh has ended, and bounds are learned."""
        self.checks.extend(checks)
        self._floor_bytes = collector.floor_bytes
        self.history.append(bounds_of(step, self.store.rows))

    @property
    def peak_bytes(self) -> int | None:
        """Of the last step that was measured, one without statistics where there was one."""
        return self._refresh_peak_bytes if self._peak is None else self._peak_bytes

    def now(self, step: int, plan: StepPlan | None) -> Callable[[], StepRecord]:
        """Makes the record of the step that ends now."""
        small, borrowed = sum(self.store.small.values()), sum(self.store.borrowed.values())
        arena = self.store.reserve.record if self.store.reserve is not None else None
        return functools.partial(self._record, step, plan, self.store.rows, small, borrowed, arena)

    def predicted_noise(self, plan: StepPlan | None) -> float | None:
        """What the plan, or the error law, expects of the last step's bounds; nothing lossy is no noise."""
        return self._predicted_noise(plan, self.store.rows)

    def _predicted_noise(self, plan: StepPlan | None, rows: list[Row]) -> float | None:
        lossy, state = [row for row in rows if row.bound > 0.0], self.policy.state
        if not lossy:
            return 0.0
        known = {row.key: row.bound for row in lossy if state.is_of_unit(row.key, row.scaled)}
        return plan.predicted_noise if plan is not None else bounds.predicted_noise(state, known)

    def _record(
        self,
        step: int,
        plan: StepPlan | None,
        rows: list[Row],
        small: int,
        borrowed: int,
        arena: ArenaRecord | None,
    ) -> StepRecord:
        """Waits for a device."""
        use = self.store.blocks.settle() if self.store.blocks is not None else None
        costs = self.policy.state.sensitivities
        noises = (costs[row.key] * row.bound * row.bound if row.key in costs else None for row in rows)
        tensors = tuple(row.freeze(noise, use) for row, noise in zip(rows, noises, strict=True))
        peak = self._peak
        return StepRecord(
            step=step,
            tensors=tensors,
            saved_bytes=small + sum(tensor.saved_bytes for tensor in tensors),
            packed_bytes=small + sum(tensor.packed_bytes for tensor in tensors),
            borrowed_bytes=borrowed,
            noise=0.0 if self.policy.controller is None else self.noise,
            predicted_noise=self._predicted_noise(plan, rows),
            peak_bytes=self.peak_bytes,
            peak_step=self._peak_step,
            highest_peak_bytes=self._highest_bytes or self.peak_bytes,
            activation_peak_bytes=None if peak is None else peak.activation_bytes,
            split_bytes=None if peak is None else peak.split_bytes,
            refresh_peak_bytes=self._refresh_peak_bytes,
            floor_bytes=self._floor_bytes,
            budget_bytes=plan.budget_bytes if plan else None,
            predicted_peak_bytes=plan.predicted_peak_bytes if plan else None,
            predicted_seconds=plan.predicted_seconds if plan else None,
            arena=arena,
            offload=self.store.spill.record,
            update_noise=self.update_noise(),
            checks=tuple(self.checks),
            notes=(*self.notes, *self.store.notes),
        )


def bounds_of(step: int, rows: list[Row]) -> BoundRecord:
    """The bounds that a step's lossy tensors had."""
    found = {row.key: row.absolute_bound for row in rows if row.absolute_bound > 0.0}
    return BoundRecord(step=step, bounds=found)


_WINDOW = 16  # steps, of which the least counts: what comes and goes is not growth
_WINDOWS = 5
_LEAST_BYTES = 32 * 2**20
_LEAST_SHARE = 0.05


@dataclass(slots=True)
class Growth:
    """Watches the bytes that a process holds before each step; warns once.

    The alarm is raised when the least of each window of 16 steps is above the one before, over five windows,
    by 32 MiB and a twentieth altogether; it is added to ``notes``.
    """

    notes: dict[str, None]
    _told: bool = False
    _window: list[int] = field(default_factory=list)
    _least: list[int] = field(default_factory=list)

    def observe(self, nbytes: int | None) -> None:
        """Bytes held before a step; None: unknown."""
        if nbytes is None or self._told:
            return
        self._window.append(nbytes)
        if len(self._window) < _WINDOW:
            return
        self._least = [*self._least[1 - _WINDOWS :], min(self._window)]
        self._window.clear()
        first, last = self._least[0], self._least[-1]
        rises = all(earlier < later for earlier, later in zip(self._least, self._least[1:], strict=False))
        if len(self._least) == _WINDOWS and rises and last - first >= max(_LEAST_BYTES, _LEAST_SHARE * first):
            self._alarm(first, last)

    def _alarm(self, first: int, last: int) -> None:
        steps = _WINDOW * (_WINDOWS - 1)
        note = (
            f"memory held between steps grew from {human_bytes(first)} to {human_bytes(last)} in {steps} "
            f"steps, {human_bytes((last - first) / steps)} a step: look for what keeps tensors, such as "
            "losses that are gathered without .item()"
        )
        self.notes[note] = None
        self._told = True
        warnings.warn(note, MemoryGrowthWarning, stacklevel=2)


_UNEXPLAINED = (
    "perhaps its inputs are larger than the plan's sample, its loss is another, or something else took "
    "memory meanwhile"
)
_NAMED = 20  # times what a reason explains: smaller ones are left out


def note_excess(
    plan: StepPlan, peak_bytes: int, gradient_bytes: int, state_bytes: int, notes: dict[str, None]
) -> None:
    """Say why a step took more than its plan, if that is known; warns where it is above the budget.

    Gradients were there before the step; the plan counts them if it is for several backward passes. The
    optimizer's state is there now.
    """
    known: dict[str, int] = {}
    if gradient_bytes and plan.accumulate == 1:
        why = f"gradients of an earlier backward take {human_bytes(gradient_bytes)}: plan with accumulate="
        known[f"{why}, or call optimizer.zero_grad() before forward"] = gradient_bytes
    known[output_held(plan.output_bytes)] = plan.output_bytes
    planned = plan.peak.parts.state_bytes if plan.peak is not None and plan.optimizer is None else state_bytes
    if state_bytes > planned:
        why = f"the optimizer's state takes {human_bytes(state_bytes)}, planned were {human_bytes(planned)}"
        known[f"{why}: make the plan with this optimizer"] = state_bytes - planned
    excess, budget = peak_bytes - plan.predicted_peak_bytes, plan.budget_bytes or peak_bytes
    exceeds, explained = peak_bytes > budget, excess <= sum(known.values())
    if excess <= 0 or not (explained or exceeds):
        return
    reasons = [why for why, nbytes in known.items() if _NAMED * nbytes > excess]
    reasons += [] if explained else [_UNEXPLAINED]
    note = (
        f"a step took {human_bytes(peak_bytes)}, more than the {human_bytes(plan.predicted_peak_bytes)} of "
        f"its plan{f' and the budget of {human_bytes(budget)}' if exceeds else ''}; {'; '.join(reasons)}"
    )
    if exceeds and note not in notes:
        warnings.warn(note, MemoryGrowthWarning, stacklevel=2)
    notes[note] = None


_UNKNOWN_COUNT = 64  # lossy tensors of a model, before the first step has counted them
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0  # multiples of it spread evenly over the unit interval


class Refreshes:
    """Of one session.

    ``counts`` are a step's lossy tensors: True for those of weighted layers, False for others. Where
    ``sums_errors``, a refresh also measures the error of all tensors together. ``first`` is the step that
    the schedule begins with, which is the first whose tensors can be packed.
    """

    def __init__(self, policy: BoundPolicy, checks_per_refresh: int) -> None:
        self.counts = {True: _UNKNOWN_COUNT, False: _UNKNOWN_COUNT}
        self.collector: Collector | None = None  # of the running step, if that is a refresh
        self.sums_errors = True
        self.first = 0
        self._policy, self._checks_per_refresh = policy, checks_per_refresh

    def due(self, step: int) -> bool:
        """Whether this step gathers statistics."""
        controller = self._policy.controller
        return step >= self.first and controller is not None and controller.due(step - self.first)

    def postpone(self, store: Store, model: torch.nn.Module, step: int, *, waited: bool) -> None:
        """Begin with this step if the one before ``waited`` for kernels, or later if this one has none."""
        if waited:
            self.first = step
        if step == self.first and store.ready is not None:
            self.first += not all(map(store.ready, {each.dtype for each in model.parameters()}))

    def begin(self, recorder: Recorder, model: torch.nn.Module, step: int) -> None:
        """Gather them from now on, if they are due."""
        if self.due(step):
            found = Collector(recorder.store, names_of(model), self._is_checked, step)
            if not self.sums_errors:
                found.total.fail()
            self.collector = recorder.collector = found

    def end(self, recorder: Recorder) -> Collector | None:
        """Take the hooks off the graph; what they gathered, if they did."""
        found, self.collector, recorder.collector = self.collector, None, None
        if found is not None:
            found.close()
        return found

    def _is_checked(self, weighted: bool, number: int) -> bool:
        """Whether the lossy tensor of this running number is checked now; turns cover all evenly."""
        count = max(self.counts[weighted], 1)
        first = int(self._policy.state.updates * _GOLDEN % 1.0 * count)
        return number < count and (number - first) % count < self._checks_per_refresh


STATE_VERSION = 2


@dataclass(frozen=True, slots=True)
class State:
    """Where a session was. ``counts`` are its lossy tensors, weighted ones or not.

    ``regions`` counts what the model's own checkpointing saves in a step; statistics are gathered from the
    step ``first`` on.
    """

    controller: ControllerState
    step: int
    late_values: dict[str, Role]
    counts: dict[bool, int]
    regions: int
    first: int


def read_state(state: Mapping[str, Any]) -> State:
    """From plain values; FormatError if they are damaged or of a newer version."""
    version = state.get("version") if isinstance(state, Mapping) else None
    if version != STATE_VERSION:
        raise FormatError(
            f"session state has version {version}; this Squeezebox reads version {STATE_VERSION}. "
            "Upgrade squeezebox, or start a new session."
        )
    try:
        weighted, others = (int(count) for count in state["counts"])
        return State(
            controller=ControllerState.from_dict(dict(state["controller"])),
            step=int(state["step"]),
            late_values={str(key): Role(role) for key, role in state["late_values"].items()},
            counts={True: weighted, False: others},
            regions=int(state.get("regions", 0)),
            first=int(state.get("first", 0)),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"session state has fields {sorted(state)}, of which one is missing or damaged ({error}). "
            "Pass the object that state_dict() gave, or start a new session."
        ) from error
