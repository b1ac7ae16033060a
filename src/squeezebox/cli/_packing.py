"""``squeezebox memory pack``: a file of buffers in, their offsets out."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from squeezebox.cli._show import progress
from squeezebox.cli._values import require_apart
from squeezebox.memory import layout, layout_csv, read_buffers, search, somas
from squeezebox.reports import exact_bytes, parse_size, require_writable, write_whole
from squeezebox.schema import BudgetError, OptionError

_PACKERS = {"search": search, "somas": somas}


@dataclass(frozen=True)
class Request:
    """What the command line names."""

    file: Path
    capacity: str | None
    seconds: float
    packer: str
    alignment: int
    out: Path | None


@dataclass(frozen=True)
class Figures:
    """What came of it; ``ratio`` is height over lower bound."""

    buffers: int
    packer: str
    height_bytes: int
    lower_bound_bytes: int
    ratio: float
    capacity_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def require_fit(self) -> None:
        """Make sure that the height is within the capacity.

        Raises:
            BudgetError: it is not; says by how much, and whether anything could be done.
        """
        if self.capacity_bytes is None or self.height_bytes <= self.capacity_bytes:
            return
        short = self.height_bytes - self.capacity_bytes
        advice = "Give the search more --seconds, or more capacity."
        if self.lower_bound_bytes > self.capacity_bytes:
            least = self.lower_bound_bytes - self.capacity_bytes
            advice = f"No packing fits: at least {exact_bytes(least)} are missing. Give more capacity."
        raise BudgetError(
            f"the capacity of {exact_bytes(self.capacity_bytes)} falls {exact_bytes(short)} short of the "
            f"{exact_bytes(self.height_bytes)} found. {advice}"
        )

    def __str__(self) -> str:
        lines = [
            f"{self.buffers} buffers, packer '{self.packer}'",
            f"height       {exact_bytes(self.height_bytes)}",
            f"lower bound  {exact_bytes(self.lower_bound_bytes)}",
            f"ratio        {self.ratio:.4f}",
        ]
        if self.capacity_bytes is not None:
            fits = "suffices" if self.height_bytes <= self.capacity_bytes else "does not suffice"
            lines.append(f"capacity     {exact_bytes(self.capacity_bytes)}, which {fits}")
        return "\n".join(lines)


def run(request: Request) -> Figures:
    """Pack the file's buffers, and write their offsets if they fit.

    Raises:
        FormatError: the file is missing or damaged.
        OptionError: an option is out of range.
        OutputError: ``out`` cannot be written; found before anything is packed.
    """
    if request.packer not in _PACKERS:
        raise OptionError(f"--packer {request.packer}: there is none of that name; give search or somas.")
    if not 0.0 <= request.seconds < math.inf:
        raise OptionError(f"--seconds {request.seconds:g}: give a number of seconds from 0.")
    capacity = None if request.capacity is None else parse_size("--capacity", request.capacity)
    require_apart({"--out": request.out}, {"FILE.csv": request.file})
    if request.out is not None:
        require_writable(request.out)
    buffers = read_buffers(request.file)
    with progress("packing"):
        result = layout(
            buffers, packer=_PACKERS[request.packer], seconds=request.seconds, alignment=request.alignment
        )
    if request.out is not None and (capacity is None or result.nbytes <= capacity):
        write_whole(request.out, layout_csv(buffers, result))
    return Figures(
        buffers=len(buffers),
        packer=result.packer,
        height_bytes=result.nbytes,
        lower_bound_bytes=result.lower_bound_bytes,
        ratio=result.nbytes / max(result.lower_bound_bytes, 1) if result.nbytes else 1.0,
        capacity_bytes=capacity,
    )
