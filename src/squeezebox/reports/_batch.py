"""The largest batch that fits, as sentences and as JSON."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from squeezebox.reports._plan import StepPlan
from squeezebox.reports._report import human_bytes
from squeezebox.schema import checked, load_json, plain_fields, save_json


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPoint:
    """A batch whose fastest plan within a budget has this peak, and this time in plain steps of the batch."""

    batch: int
    peak_bytes: int
    time_ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MaxBatch:
    """The largest batch whose plan fits the budget. ``str()`` is a sentence; sizes are bytes.

    ``plain_batch`` is the largest that plain training would hold, 0 if none. ``measured`` says that a step of
    this very batch was profiled; otherwise the plan lies on the line between two batches that were.
    ``frontier`` are batches from plain training's to this one.
    """

    batch: int
    plan: StepPlan
    predicted_peak_bytes: int
    plain_batch: int
    measured: bool
    frontier: tuple[BatchPoint, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written by :meth:`save`."""
        return plain_fields(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it whole or not at all; OutputError if the path cannot be written."""
        save_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> MaxBatch:
        """What :meth:`save` wrote; FormatError if the file is missing, damaged, or of another kind."""
        return load_json(
            path, "batch", "squeezebox.max_batch(...).save(path)", lambda values: cls(**checked(cls, values))
        )

    def __str__(self) -> str:
        plan = self.plan
        limit = human_bytes(plan.budget_bytes or 0)
        seen = "profiled at this batch" if self.measured else "between two profiled batches"
        return (
            f"{plan.model} trains with batch {self.batch} within {limit} at noise {plan.noise:g}: predicted "
            f"peak {human_bytes(self.predicted_peak_bytes)}, {plan.predicted_seconds:.3f} s a step ({seen}); "
            f"plain training would hold batch {self.plain_batch}."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundBatch:
    """The largest batch for some memory, less a reserve. ``str()`` is some sentences; sizes are bytes.

    ``probes`` are the batches that were run to find it, the last one under the plan.
    ``measured_peak_bytes`` is what that took, or None where the answer had to be smaller. ``microbatches``
    are the sizes whose gradients add up to one update; their losses weigh as much as they have samples.
    ``frontier`` are batches from plain training's to this one.
    """

    batch: int
    plan: StepPlan
    memory_bytes: int
    reserve_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int | None
    plain_batch: int
    probes: tuple[int, ...]
    microbatches: tuple[int, ...]
    frontier: tuple[BatchPoint, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written by :meth:`save`."""
        return plain_fields(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it whole or not at all; OutputError if the path cannot be written."""
        save_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FoundBatch:
        """What :meth:`save` wrote; FormatError if the file is missing, damaged, or of another kind."""
        return load_json(
            path, "batch", "squeezebox.find_batch(...).save(path)", lambda values: cls(**checked(cls, values))
        )

    def __str__(self) -> str:
        seen = self.measured_peak_bytes
        trial = f"measured {human_bytes(seen)}" if seen is not None else "not run"
        count, effective = len(self.microbatches), sum(self.microbatches)
        return (
            f"{self.plan.model} trains with batch {self.batch} within {human_bytes(self.memory_bytes)}, of "
            f"which {human_bytes(self.reserve_bytes)} stay free: predicted peak "
            f"{human_bytes(self.predicted_peak_bytes)}, {trial}; plain training would hold batch "
            f"{self.plain_batch}. An update of {effective} takes {count} of at most {self.microbatches[0]}. "
            f"Probes: {', '.join(map(str, self.probes))}."
        )
