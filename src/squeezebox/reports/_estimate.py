"""What a training step would hold, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from squeezebox.reports._report import human_bytes, write_whole
from squeezebox.schema import Call, Peak


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The predicted memory of a plain PyTorch training step; all sizes in bytes. ``str()`` is a table.

    ``input_shape`` and ``batch`` are those of the first input; ``input_bytes`` count all, and the target.
    ``gradient_bytes`` are all gradients, of which some may not be there yet at the peak. ``saved_bytes`` is
    what a report calls saved: each storage once, without parameters, buffers and the input. ``saved`` splits
    it by role. ``peak_bytes`` counts everything, at the worst moment of a step
    whose optimizer state is there already; ``peak_phase`` says when that is: ``"forward"``, ``"loss"``,
    ``"backward"`` or ``"optimizer"``. ``peak`` says what is live then, and what is running. ``why_real``: why
    the step was taken on real tensors, "" where fake ones did.
    """

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

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written by :meth:`to_json`."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        plain = {"input_shape": list(self.input_shape), "saved": dict(self.saved)}
        return {**values, **plain, "peak": peak_fields(self.peak)}

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the estimate whole or not at all.

        Raises:
            OutputError: the path cannot be written.
        """
        write_whole(path, json.dumps(self.to_dict(), indent=1) + "\n")

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


def peak_fields(peak: Peak) -> dict[str, Any]:
    """Plain values: bytes of each kind, which add up to ``nbytes``, and phase, module and operator."""
    where = peak.call
    return {
        "nbytes": peak.nbytes,
        "by_kind": {kind.value: nbytes for kind, nbytes in peak.by_kind.items()},
        "phase": where.phase if where else None,
        "module": where.module if where else None,
        "operator": where.operator if where else None,
    }
