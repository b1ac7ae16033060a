"""A closed step as the report shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from squeezebox.capture import Row
from squeezebox.codecs import ArenaUse
from squeezebox.reports import StepPlan
from squeezebox.schema import ArenaRecord, Check, StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """What is known of a step as a whole. ``peaks``: total, activations, idle in split blocks."""

    step: int
    small_bytes: int
    borrowed_bytes: int
    peaks: tuple[int | None, int | None, int | None]
    refresh_peak_bytes: int | None
    floor_bytes: int | None
    noise: float | None
    predicted_noise: float | None
    arena: ArenaRecord | None


def record_of(
    rows: Sequence[Row],
    use: ArenaUse | None,
    sensitivities: Mapping[str, float],
    totals: Totals,
    plan: StepPlan | None,
    checks: tuple[Check, ...],
    notes: tuple[str, ...],
) -> StepRecord:
    """The report's noun; ``use`` is that of a device's arena."""
    tensors = tuple(
        row.freeze(
            sensitivities[row.key] * row.bound**2 if row.key in sensitivities else None,
            use,
        )
        for row in rows
    )
    peak, activations, split = totals.peaks
    return StepRecord(
        step=totals.step,
        tensors=tensors,
        saved_bytes=totals.small_bytes + sum(tensor.saved_bytes for tensor in tensors),
        packed_bytes=totals.small_bytes + sum(tensor.packed_bytes for tensor in tensors),
        borrowed_bytes=totals.borrowed_bytes,
        noise=totals.noise,
        predicted_noise=totals.predicted_noise,
        peak_bytes=peak,
        activation_peak_bytes=activations,
        split_bytes=split,
        refresh_peak_bytes=totals.refresh_peak_bytes,
        floor_bytes=totals.floor_bytes,
        budget_bytes=plan.budget_bytes if plan else None,
        predicted_peak_bytes=plan.predicted_peak_bytes if plan else None,
        predicted_seconds=plan.predicted_seconds if plan else None,
        arena=totals.arena,
        checks=checks,
        notes=notes,
    )
