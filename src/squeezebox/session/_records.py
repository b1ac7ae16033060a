"""Closed steps as the report shows them."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from squeezebox import bounds
from squeezebox.capture import Collector, Row, Store
from squeezebox.memory import Peak
from squeezebox.reports import StepPlan
from squeezebox.schema import ArenaRecord, BoundRecord, Check, StepRecord
from squeezebox.session._policy import BoundPolicy

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
    _peak_bytes: int | None = None  # of a step without statistics, all that lived before it included,
    _peak: Peak | None = None  # of what it allocated,
    _refresh_peak_bytes: int | None = None  # and of one with statistics
    _floor_bytes: int | None = None

    def note_peak(self, peak: Peak, baseline_bytes: int, *, of_refresh: bool) -> None:
        """A step was measured; the baseline is what lived before it."""
        if of_refresh:
            self._refresh_peak_bytes = baseline_bytes + peak.total_bytes
        else:
            self._peak, self._peak_bytes = peak, baseline_bytes + peak.total_bytes

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
        lossy = {row.key: row.bound for row in rows if row.bound > 0.0}
        if not lossy:
            return 0.0
        return plan.predicted_noise if plan is not None else bounds.predicted_noise(self.policy.state, lossy)

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
