"""The largest batch that fits, as a sentence and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from squeezebox.reports._plan import StepPlan
from squeezebox.reports._report import human_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class MaxBatch:
    """The largest batch whose plan fits the budget. ``str()`` is a sentence; sizes are bytes.

    ``plain_batch`` is the largest that plain training would hold, 0 if none. ``measured`` says that a step of
    this very batch was profiled; otherwise the plan lies on the line between two batches that were.
    """

    batch: int
    plan: StepPlan
    predicted_peak_bytes: int
    plain_batch: int
    measured: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "batch": self.batch,
            "plain_batch": self.plain_batch,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "measured": self.measured,
            "plan": self.plan.to_dict(),
        }

    def __str__(self) -> str:
        plan = self.plan
        limit = human_bytes(plan.budget_bytes or 0)
        seen = "profiled at this batch" if self.measured else "between two profiled batches"
        return (
            f"{plan.model} trains with batch {self.batch} within {limit} at noise {plan.noise:g}: predicted "
            f"peak {human_bytes(self.predicted_peak_bytes)}, {plan.predicted_seconds:.3f} s a step ({seen}); "
            f"plain training would hold batch {self.plain_batch}."
        )
