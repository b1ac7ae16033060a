"""What a training step would hold, and the largest batch that fits, as sentences and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from squeezebox.reports._plan import StepPlan
from squeezebox.reports._saved import Saved
from squeezebox.schema import Call, Peak, checked, human_bytes, plain_fields

_WHERE = ("phase", "module", "operator")  # of the peak's call, which a file has by themselves too


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate(Saved):
    """The predicted memory of a plain PyTorch training step; all sizes in bytes. ``str()`` is a table.

    ``input_shape`` and ``batch`` are those of the first input; ``input_bytes`` count all, and the target.
    ``gradient_bytes`` are all gradients, of which some may not be there yet at the peak. ``saved_bytes`` is
    what a report calls saved: each storage once, without parameters, buffers and the input. ``saved`` splits
    it by role. ``peak_bytes`` counts everything, at the worst moment of a step
    whose optimizer state is there already; ``peak_phase`` says when that is: ``"forward"``, ``"loss"``,
    ``"backward"`` or ``"optimizer"``. ``peak`` says what is live then, and what is running. ``why_real``: why
    the step was taken on real tensors, "" where fake ones did. ``assumed_load``: how routers were taken to
    choose, "" where no size follows from that.
    """

    KIND, AGAIN = "estimate", "squeezebox.estimate(...).save(path)"

    input_shape: tuple[int, ...]
    batch: int
    optimizer: str
    parameter_bytes: int
    gradient_bytes: int
    buffer_bytes: int
    optimizer_bytes: int
    input_bytes: int
    saved_bytes: int
    saved: Mapping[str, int]
    peak_bytes: int
    peak_phase: str
    peak: Peak
    why_real: str = ""
    assumed_load: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written by :meth:`save`."""
        return plain_fields(self) | {"peak": _peak(self.peak)}

    @classmethod
    def from_dict(cls, values: Any, where: str = "") -> Estimate:
        """The result of such values; FormatError names the field that is wrong."""
        peak = values.get("peak") if isinstance(values, dict) else None
        if isinstance(peak, dict):
            values["peak"] = {name: each for name, each in peak.items() if name not in _WHERE}
        return cls(**checked(cls, values, where))

    def __str__(self) -> str:
        shape = "x".join(str(size) for size in (self.batch, *self.input_shape))
        rows = [
            ("parameters", self.parameter_bytes),
            ("gradients", self.gradient_bytes),
            ("buffers", self.buffer_bytes),
            (f"optimizer state ({self.optimizer})", self.optimizer_bytes),
            (f"input {shape}", self.input_bytes),
            ("saved for backward", self.saved_bytes),
            *((f"  {role}", nbytes) for role, nbytes in self.saved.items()),
            (f"peak of the step (in {self.peak_phase})", self.peak_bytes),
            *((f"  {kind.value}", nbytes) for kind, nbytes in self.peak.by_kind.items() if nbytes),
        ]
        width = max(len(label) for label, _ in rows)
        lines = [f"{label:<{width}}  {human_bytes(nbytes):>10}" for label, nbytes in rows]
        lines.append(f"The peak is in {owner(self.peak.call)}.")
        if self.assumed_load:
            lines.append(
                f"Sizes follow from what a router chooses: its load is taken to be {self.assumed_load}."
            )
        if self.why_real:
            lines.append(f"A copy of the model took the step on the sample: {self.why_real}.")
        return "\n".join(lines)


def owner(call: Call | None) -> str:
    """``backward of 'layer1.0.conv2' (convolution_backward)``."""
    if call is None:
        return "what was there before the step"
    if call.phase == "optimizer":
        return f"the optimizer's step ({call.operator})"
    if call.phase == "loss":
        return f"the loss ({call.operator})"
    of = f"'{call.module}'" if call.module else "the model itself, or the loss"
    return f"{call.phase} of {of} ({call.operator})"


def _peak(peak: Peak) -> dict[str, Any]:
    """Its fields, and what :func:`owner` says of its call, one by one."""
    where = {name: getattr(peak.call, name, None) for name in _WHERE}
    return {**plain_fields(peak), **where}


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPoint:
    """A batch whose fastest plan within a budget has this peak, and this time in plain steps of the batch."""

    batch: int
    peak_bytes: int
    time_ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MaxBatch(Saved):
    """The largest batch whose plan fits the budget. ``str()`` is a sentence; sizes are bytes.

    ``plain_batch`` is the largest that plain training would hold, 0 if none. ``measured`` says that a step of
    this very batch was profiled; otherwise the plan lies on the line between two batches that were.
    ``frontier`` are batches from plain training's to this one.
    """

    KIND, AGAIN = "batch", "squeezebox.max_batch(...).save(path)"

    batch: int
    plan: StepPlan
    predicted_peak_bytes: int
    plain_batch: int
    measured: bool
    frontier: tuple[BatchPoint, ...] = ()

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
class FoundBatch(Saved):
    """The largest batch for some memory, less a reserve. ``str()`` is some sentences; sizes are bytes.

    ``probes`` are the batches that were run to find it, the last one under the plan.
    ``measured_peak_bytes`` is what that took, or None where the answer had to be smaller. ``microbatches``
    are the sizes whose gradients add up to one update; their losses weigh as much as they have samples.
    ``frontier`` are batches from plain training's to this one.
    """

    KIND, AGAIN = "batch", "squeezebox.find_batch(...).save(path)"

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
