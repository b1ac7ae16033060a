"""How high strips are: as high as the memory allows, measured on two of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from squeezebox.reports import human_bytes
from squeezebox.schema import BudgetError

_COARSEST = 64  # image rows to a multiple of which heights are rounded, at most
_SHARE = 0.9  # of the memory: what was measured on small strips is extrapolated


@dataclass(frozen=True, kw_only=True, slots=True)
class StripPlan:
    """A way over the image: strips of ``height`` rows each, which read ``halo`` more, on both sides together.

    ``reduces`` and ``derives`` say whether it goes forward only, back too, or both at once. ``peak_bytes`` is
    foretold, and None where the height was given.
    """

    reduces: bool
    derives: bool
    height: int
    strips: int
    halo: int
    peak_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamPlan:
    """All ways over an image that a step takes; ``axis`` is the image's streamed dimension.

    ``disk_bytes`` is what ``spool=`` stores.
    """

    axis: int
    rows: int
    disk_bytes: int
    stages: tuple[StripPlan, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.rows} {'rows' if self.axis == -2 else 'columns'} of the image, {len(self.stages)} passes:"
        ]
        for stage in self.stages:
            kind = "forward" if not stage.derives else "forward and backward"
            peak = "" if stage.peak_bytes is None else f", about {human_bytes(stage.peak_bytes)}"
            lines.append(
                f"  {kind}: {stage.strips} strips of {stage.height} and a halo of {stage.halo}{peak}"
            )
        if self.disk_bytes:
            lines.append(f"  stored on disk: {human_bytes(self.disk_bytes)}")
        return "\n".join(lines)


def fitting_height(measure: Callable[[int], int], rows: int, unit: int, memory_bytes: int) -> tuple[int, int]:
    """The greatest height whose strips fit, evenly spread, and the peak that is foretold for it.

    Args:
        measure: the peak, in bytes, of a strip of this height.
        rows: the image's rows.
        unit: heights of more rows than this are multiples of it.
        memory_bytes: what the peak may be.

    Raises:
        BudgetError: a strip of a single row needs more.
    """
    unit = min(unit, _COARSEST)
    least, other = 1, min(max(2 * unit, 16), rows)
    smallest = measure(least)
    if smallest > memory_bytes:
        raise BudgetError(
            f"a strip of one row, with the rows around that it depends on, needs {human_bytes(smallest)}, "
            f"more than the {human_bytes(memory_bytes)} of memory=. Give at least that, stream along the "
            "longer side of the image, set recompute=True, or take a model that sees less far."
        )
    if other == least:
        return least, smallest
    larger = measure(other)
    slope = max((larger - smallest) / (other - least), 1.0)
    room = max(_SHARE * memory_bytes - smallest, 0.0)
    height = max(least, min(rows, least + math.floor(room / slope)))
    if height < rows:
        height = math.ceil(rows / math.ceil(rows / _rounded(height, unit)))
        height = min(math.ceil(height / unit) * unit, _rounded(least + math.floor(room / slope), unit))
        height = max(height, least)
    return height, round(smallest + slope * (height - least))


def _rounded(height: int, unit: int) -> int:
    """Down to a multiple of the unit, if there is one."""
    return height // unit * unit if height >= unit else max(height, 1)
