"""What a training step would hold, as text and as JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from squeezebox.reports._report import human_bytes
from squeezebox.schema import Call, Peak, decoded, load_json, plain_fields, save_json

_WHERE = ("phase", "module", "operator")  # of the peak's call, which a file has by themselves too


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
        """Plain values, as written by :meth:`save`."""
        return plain_fields(self) | {"peak": _peak(self.peak)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the estimate whole or not at all; OutputError if the path cannot be written."""
        save_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Estimate:
        """What :meth:`save` wrote; FormatError if the file is missing, damaged, or of another kind."""
        return load_json(path, "estimate", "squeezebox.estimate(...).save(path)", _from_dict)

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


def _peak(peak: Peak) -> dict[str, Any]:
    """Its fields, and what :func:`owner` says of its call, one by one."""
    where = {name: getattr(peak.call, name, None) for name in _WHERE}
    return {**plain_fields(peak), **where}


def _from_dict(values: Any) -> Estimate:
    peak = values.get("peak") if isinstance(values, dict) else None
    if isinstance(peak, dict):
        values["peak"] = {name: each for name, each in peak.items() if name not in _WHERE}
    made: Estimate = decoded(Estimate, values)
    return made
