"""What a compiled training step holds between forward and backward, as text and as plain values."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from squeezebox.reports._report import human_bytes
from squeezebox.schema import checked, load_json, plain_fields, save_json

_ROWS = 24


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
class CompiledReport:
    """Saved bytes of a compiled step. ``str()`` is a table.

    ``saved_bytes`` is what the stock compiler would hold between forward and backward, each storage once,
    ``packed_bytes`` what is held instead; parameters, inputs and results are in neither. ``tensors`` are
    those held now: the stock compiler may save others in their place. ``noise`` is the relative gradient
    noise measured when the step was made for a noise, else None.
    """

    saved_bytes: int
    packed_bytes: int
    tensors: tuple[CompiledTensor, ...]
    noise: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written by :meth:`save`."""
        return plain_fields(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it whole or not at all; OutputError if the path cannot be written."""
        save_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CompiledReport:
        """What :meth:`save` wrote; FormatError if the file is missing, damaged, or of another kind."""
        return load_json(
            path, "compiled report", "step.report().save(path)", lambda values: cls(**checked(cls, values))
        )

    def __str__(self) -> str:
        ratio = self.saved_bytes / max(self.packed_bytes, 1)
        held = f"{human_bytes(self.packed_bytes)} held ({ratio:.1f}x smaller)"
        noise = "" if self.noise is None else f", gradient noise {self.noise:.1e} measured"
        head = f"saved: {human_bytes(self.saved_bytes)}, {held}{noise}"
        rows = [_line(tensor) for tensor in self.tensors[:_ROWS]]
        hidden = len(self.tensors) - len(rows)
        return "\n".join([head, "", *rows, *([f"... and {hidden} smaller tensors"] if hidden > 0 else [])])


def _line(tensor: CompiledTensor) -> str:
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    bits = "itself" if tensor.bits is None else f"{tensor.bits} bit"
    name = f"{tensor.module}:{tensor.name}"
    return (
        f"{name:<36} {shape:>20} {tensor.dtype:>9} {human_bytes(tensor.saved_bytes):>10} "
        f"{human_bytes(tensor.packed_bytes):>10}  {bits}"
    )
