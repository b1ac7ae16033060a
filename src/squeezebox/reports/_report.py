"""One step's record, eager or compiled, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from squeezebox.reports._notebook import bits_drawing, notebook
from squeezebox.reports._page import bits
from squeezebox.reports._saved import Saved
from squeezebox.schema import (
    ArenaRecord,
    Check,
    OffloadRecord,
    OptimizerPlan,
    SavedTensor,
    StepRecord,
    decoded,
    human_bytes,
    plain_fields,
)

_ROWS = 24  # the largest tensors that text shows; JSON has all


@dataclass(frozen=True, slots=True)
class Report(Saved):
    """A step's memory and noise, in total and per tensor. ``str()`` is a table; sizes are bytes."""

    KIND, AGAIN = "report", "session.report().save(path)"

    record: StepRecord

    @property
    def saved_bytes(self) -> int:
        """What plain PyTorch would hold between forward and backward, each storage once."""
        return self.record.saved_bytes

    @property
    def packed_bytes(self) -> int:
        """What is held instead."""
        return self.record.packed_bytes

    @property
    def peak_bytes(self) -> int | None:
        """Highest sum of live allocations in the last measured step; None before one was measured.

        Measured are the first two steps, those with larger inputs than any before, and one after statistics.
        """
        return self.record.peak_bytes

    @property
    def highest_peak_bytes(self) -> int | None:
        """The largest :attr:`peak_bytes` since the session began, such as of the largest batch."""
        return self.record.highest_peak_bytes

    @property
    def noise(self) -> float | None:
        """Measured squared gradient error over the squared gradient norm; None if not yet measured."""
        return self.record.noise

    @property
    def predicted_noise(self) -> float | None:
        """The same as the error law expects it; None before the first statistics."""
        return self.record.predicted_noise

    @property
    def update_noise(self) -> float | None:
        """Measured squared error of updates over their squared norm; None where no state is packed."""
        return self.record.update_noise

    @property
    def tensors(self) -> tuple[SavedTensor, ...]:
        """One row for every saved storage."""
        return self.record.tensors

    @property
    def checks(self) -> tuple[Check, ...]:
        """Measured and predicted error of single layers."""
        return self.record.checks

    def figures(self) -> dict[str, float]:
        """Numbers to log after a step, such as to TensorBoard; those that are not known are left out.

        Sizes are bytes, and noises squared errors over squared norms, as the properties of these names.
        """
        known = {
            "saved_bytes": self.saved_bytes,
            "packed_bytes": self.packed_bytes,
            "peak_bytes": self.peak_bytes,
            "noise": self.noise,
            "predicted_noise": self.predicted_noise,
            "update_noise": self.update_noise,
        }
        return {f"squeezebox/{name}": float(value) for name, value in known.items() if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written by :meth:`save`."""
        return plain_fields(self.record)

    @classmethod
    def from_dict(cls, values: Any, where: str = "") -> Report:
        """The result of such values; FormatError names the field that is wrong."""
        return cls(decoded(StepRecord, values, where))

    def __str__(self) -> str:
        return "\n".join([*_totals(self.record), "", *_table(self.record)])

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        modules = dict.fromkeys(tensor.module for tensor in self.tensors)
        groups = {name: [each for each in self.tensors if each.module == name] for name in modules}
        layers = {
            name or "(the model itself)": (bits(each), sum(tensor.saved_bytes for tensor in each))
            for name, each in groups.items()
        }
        return notebook(str(self), bits_drawing(layers))


def _totals(record: StepRecord) -> list[str]:
    ratio = record.saved_bytes / max(record.packed_bytes, 1)
    lines = [
        f"step {record.step}: {human_bytes(record.saved_bytes)} saved by plain PyTorch, "
        f"{human_bytes(record.packed_bytes)} held ({ratio:.1f}x smaller)",
        f"left alone (parameters, buffers, inputs): {human_bytes(record.borrowed_bytes)}",
    ]
    if record.peak_bytes is not None:
        at = record.peak_step
        when = "" if at in (None, record.step) else f" (step {at}'s, the last that was measured)"
        last, highest = map(human_bytes, (record.peak_bytes, record.highest_peak_bytes or record.peak_bytes))
        when += f", {highest} the highest so far" if highest != last else ""
        lines.append(f"peak of the step: {last}{when}")
    if record.activation_peak_bytes is not None:
        peak, floor = record.activation_peak_bytes, record.floor_bytes
        line = f"peak beyond parameters, gradients and optimizer state: {human_bytes(peak)}"
        if floor is not None and floor <= peak:  # it is of an earlier step, which may have held more
            line += f" (floor {human_bytes(floor)}: what one operator works on)"
        lines.append(line)
    if record.split_bytes is not None:
        lines.append(f"idle in split blocks of the allocator: {human_bytes(record.split_bytes)}")
    if record.refresh_peak_bytes is not None:
        lines.append(f"peak of a step that gathers statistics: {human_bytes(record.refresh_peak_bytes)}")
    if record.arena is not None:
        lines.append(_arena(record.arena))
    if record.offload is not None:
        lines.append(offloaded(record.offload, ["saved tensors"]))
    lines.append(
        f"gradient noise: measured {_figure(record.noise)}, predicted {_figure(record.predicted_noise)}"
    )
    if record.update_noise is not None:
        lines.append(f"update noise, of packed optimizer state: measured {_figure(record.update_noise)}")
    lines.extend(
        f"checked {check.key} at step {check.step}: measured / predicted "
        f"{check.measured / check.predicted:.2f}"
        for check in record.checks[-3:]
        if check.predicted > 0.0
    )
    lines.extend(record.notes)
    return lines


def _arena(arena: ArenaRecord) -> str:
    if not arena.nbytes:
        return "arena: nothing of varying size was packed before this step"
    return (
        f"arena of {human_bytes(arena.nbytes)}: {arena.tensors} packed tensors in it, {arena.spills} "
        f"({human_bytes(arena.spilled_bytes)}) spilled; {arena.total_spills} in all steps"
    )


def offloaded(offload: OffloadRecord, files: Sequence[str]) -> str:
    """Where tensors are moved to, and what memory that takes; ``files`` says what is in each file there."""
    kind = f" ({offload.filesystem})" if offload.filesystem else ""
    each = f" ({len(files)} files, each with its own)" if len(files) > 1 else ""
    return (
        f"{listed(files)} offloaded to {offload.folder}{kind}: {human_bytes(offload.file_bytes)}; on top of "
        f"the peak at most {human_bytes(offload.buffer_bytes)} of buffers and "
        f"{human_bytes(offload.cache_bytes)} of page cache{each}"
    )


def listed(words: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join([", ".join(words[:-1]), *words[-1:]] if len(words) > 1 else words)


def _table(record: StepRecord) -> list[str]:
    header = ("tensor", "role", "saved", "held", "codec", "bound", "noise")
    largest = sorted(record.tensors, key=lambda tensor: -tensor.saved_bytes)[:_ROWS]
    rows = [header, *(_row(tensor) for tensor in largest)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    hidden = len(record.tensors) - len(largest)
    return [*lines, f"... and {hidden} smaller tensors"] if hidden > 0 else lines


def _row(tensor: SavedTensor) -> tuple[str, ...]:
    return (
        tensor.key,
        tensor.role.value,
        human_bytes(tensor.saved_bytes),
        human_bytes(tensor.packed_bytes),
        tensor.codec,
        f"{tensor.bound:.3g}" if tensor.bound else "exact",
        _figure(tensor.noise_share),
    )


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledTensor:
    """One tensor that a compiled forward saves: ``bits`` an element, None where it is held itself.

    ``name`` is the compiled graph's, ``module`` the dotted path of the module that made it.
    """

    name: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    bits: int | None
    saved_bytes: int
    packed_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledReport(Saved):
    """Saved bytes of a compiled step. ``str()`` is a table.

    ``saved_bytes`` is what the stock compiler would hold between forward and backward, each storage once,
    ``packed_bytes`` what is held instead; parameters, inputs and results are in neither. ``tensors`` are
    those held now: the stock compiler may save others in their place. ``noise`` is the relative gradient
    noise measured when the step was made for a noise, else None. ``copied_bytes`` are of weights and images
    of convolutions that the compiler holds once more, in channels_last. ``optimizer`` says what becomes of
    gradients and optimizer state, where the step was made with ``states=True``. ``slices`` of the batch are
    what the first layers, up to a pooling, are worked in; 1 where they are compiled like the others.
    """

    KIND, AGAIN = "compiled report", "step.report().save(path)"

    saved_bytes: int
    packed_bytes: int
    tensors: tuple[CompiledTensor, ...]
    noise: float | None = None
    copied_bytes: int = 0
    optimizer: OptimizerPlan | None = None
    slices: int = 1

    def __str__(self) -> str:
        ratio = self.saved_bytes / max(self.packed_bytes, 1)
        held = f"{human_bytes(self.packed_bytes)} held ({ratio:.1f}x smaller)"
        noise = "" if self.noise is None else f", gradient noise {self.noise:.1e} measured"
        head = [f"saved: {human_bytes(self.saved_bytes)}, {held}{noise}"]
        if self.copied_bytes:
            head.append(
                f"and {human_bytes(self.copied_bytes)} of copies in channels_last; call "
                "to(memory_format=torch.channels_last) on the model and the images, and there are none"
            )
        if self.slices > 1:
            head.append(f"the first layers, up to a pooling, in {self.slices} slices of the batch")
        head += updates(self.optimizer) if self.optimizer is not None else ()
        rows = [_line(tensor) for tensor in self.tensors[:_ROWS]]
        hidden = len(self.tensors) - len(rows)
        return "\n".join([*head, "", *rows, *([f"... and {hidden} smaller tensors"] if hidden > 0 else [])])


def updates(plan: OptimizerPlan) -> Iterator[str]:
    """What becomes of gradients and state."""
    where = "backward, as soon as its gradient is there" if plan.in_backward else "optimizer.step()"
    yield f"each parameter is updated by itself, in {where}"
    if plan.split:
        yield (
            f"{len(plan.split)} weights as autocast reads them, in bfloat16; the other 16 bits are where "
            "their optimizer state is"
        )
    if plan.packed:
        yield (
            f"optimizer state of {len(plan.packed)} parameters in {bits_of(plan.packed)} bits: "
            f"{human_bytes(plan.packed_bytes)}, update noise {plan.update_noise:.1e}"
        )
    if plan.moved_bytes:
        total = human_bytes(plan.state_bytes + plan.gradient_bytes * (not plan.in_backward))
        yield (
            f"{human_bytes(plan.moved_bytes)} of {total} of optimizer state"
            f"{'' if plan.in_backward else ' and gradients'} in a file"
        )
    if plan.seconds:
        yield f"moving and packing these takes {1e3 * plan.seconds:.1f} ms a step"
    if plan.sliced:
        yield f"gradients of {len(plan.sliced)} large linear weights are made some rows at a time"


def bits_of(packed: Mapping[str, int]) -> str:
    """Those in use, in words."""
    return " or ".join(str(bits) for bits in sorted(set(packed.values())))


def _line(tensor: CompiledTensor) -> str:
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    bits = "itself" if tensor.bits is None else f"{tensor.bits} bit"
    name = f"{tensor.module}:{tensor.name}"
    return (
        f"{name:<36} {shape:>20} {tensor.dtype:>9} {human_bytes(tensor.saved_bytes):>10} "
        f"{human_bytes(tensor.packed_bytes):>10}  {bits}"
    )
