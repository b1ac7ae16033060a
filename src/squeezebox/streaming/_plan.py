"""How high strips are: as high as the memory allows, measured on some of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from squeezebox.reports import human_bytes
from squeezebox.schema import BudgetError

_COARSEST = 64  # image rows to a multiple of which heights are rounded, at most
_SHARE = 0.9  # of the memory is aimed at: strips elsewhere may be some rows higher
ENOUGH = 0.95  # of the memory at most
_FIRST = 0.45  # of the memory is aimed at by what is known of strips that take less than a quarter of it


@dataclass(frozen=True, kw_only=True, slots=True)
class StripPlan:
    """A way over the image: strips of ``height`` rows each, which read ``halo`` more, on both sides together.

    ``width`` are a strip's columns; where these are not all, strips are tiles. All of them together take
    ``computed`` times the image's operations, as what lies around a strip is made for it once more.
    ``reduces`` and ``derives`` say whether it goes forward only, back too, or both at once. Of what later
    passes read of this one, ``kept_bytes`` stay in memory and ``disk_bytes`` in a file, gradients included;
    tensors of ``recomputed_bytes`` are recomputed. ``seconds`` are predicted of operators and of the disk's
    speed, both measured; None where these were not. ``strip_bytes`` is what a strip takes, measured.
    ``peak_bytes`` includes what all passes keep in memory, gradients and other values without rows too. Both
    are None where the height was given. ``spare_bytes`` of the memory stay free between operators, for what
    one of them takes at once.
    """

    reduces: bool
    derives: bool
    height: int
    width: int
    strips: int
    halo: int
    computed: float
    kept_bytes: int
    disk_bytes: int
    recomputed_bytes: int
    seconds: float | None
    strip_bytes: int | None
    peak_bytes: int | None
    spare_bytes: int = 0

    @property
    def handed(self) -> str:
        """What of this pass later ones read, in words."""
        parts = {"kept": self.kept_bytes, "on disk": self.disk_bytes, "recomputed": self.recomputed_bytes}
        words = [f"{human_bytes(nbytes)} {how}" for how, nbytes in parts.items() if nbytes]
        return f"; later passes read {', '.join(words)}" if words else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamPlan:
    """All ways over an image that a step takes; ``axis`` is the image's streamed dimension.

    ``disk_bytes`` and ``kept_bytes`` are what passes hand on, on disk or in memory. ``rowless_bytes`` is what
    has no rows at its highest moment, between passes: gradients, and what is computed of whole images, such
    as a classifier's head. It is measured, and None where the height was given. ``gathered`` are bytes of
    what has all rows there, by the operator that needs them at once. ``note`` says why no file is made.
    """

    axis: int
    rows: int
    columns: int
    disk_bytes: int
    kept_bytes: int
    rowless_bytes: int | None
    stages: tuple[StripPlan, ...]
    gathered: Mapping[str, int] = field(default_factory=dict)
    note: str = ""

    @property
    def seconds(self) -> float | None:
        """Predicted of all passes; None where operators were not timed."""
        seconds = [stage.seconds for stage in self.stages if stage.seconds is not None]
        return sum(seconds) if seconds else None

    def __str__(self) -> str:
        lines = [
            f"{self.rows} {'rows' if self.axis == -2 else 'columns'} of the image, {len(self.stages)} passes:"
        ]
        for stage in self.stages:
            kind = "forward" if not stage.derives else "forward and backward"
            peak = "" if stage.peak_bytes is None else f", about {human_bytes(stage.peak_bytes)}"
            size = f"strips of {stage.height}"
            if stage.width < self.columns:
                size = f"tiles of {stage.height} x {stage.width}"
            seconds = "" if stage.seconds is None else f", about {stage.seconds:.2f} s"
            lines.append(
                f"  {kind}: {stage.strips} {size} and a halo of {stage.halo}, {stage.computed:.2f} times the "
                f"operations{peak}{seconds}{stage.handed}"
            )
        if self.seconds is not None:
            lines.append(f"  predicted: {self.seconds:.2f} s")
        if self.rowless_bytes is not None:
            lines.append(f"  gradients and values without rows: at most {human_bytes(self.rowless_bytes)}")
        if self.gathered:
            most = max(self.gathered, key=self.gathered.__getitem__)
            total = human_bytes(sum(self.gathered.values()))
            lines.append(f"  of these, with all rows at once: {total}, most for {most}")
        if self.disk_bytes:
            lines.append(f"  stored on disk: {human_bytes(self.disk_bytes)}")
        if self.kept_bytes:
            lines.append(f"  kept in memory from one pass to the next: {human_bytes(self.kept_bytes)}")
        return "\n".join([*lines, f"  {self.note}"] if self.note else lines)


def fitting_height(
    measure: Callable[[int], int], rows: int, unit: int, memory_bytes: int, held_bytes: int
) -> tuple[int, int]:
    """About the greatest height whose strips fit, evenly spread, and the peak of such a strip.

    Peaks do not grow evenly: what needs most in a low strip, with many rows around, may be another operator
    than in a high one. So every height is measured before it is taken, and predicted from the two before it.
    As no operator needs less than nothing, a strip ``k`` times as high needs at most ``k`` times as much. As
    the peak is that of the operator that needs most, it grows by no less per row than it did so far.

    Args:
        measure: the peak, in bytes, of a strip of this height.
        rows: the image's rows.
        unit: heights of more rows than this are multiples of it.
        memory_bytes: what the peak may be.
        held_bytes: what else is there all the time.

    Raises:
        BudgetError: a strip of a single row needs more.
    """
    unit, room = min(unit, _COARSEST), memory_bytes - held_bytes
    first = best = (1, measure(1))
    if best[1] > room:
        raise _too_little(best[1], held_bytes, memory_bytes)
    height, ceiling = min(max(2 * unit, 16), rows), rows
    while height > best[0]:
        found = (height, measure(height))
        if found[1] <= ENOUGH * room:
            best, other = found, best
        else:
            other, ceiling = found, height - 1
        height = even(min(_predicted(first, best, other, room), ceiling), rows, unit)
        if height < min(1.1 * best[0], rows):
            break
    return best


def _predicted(first: tuple[int, int], best: tuple[int, int], other: tuple[int, int], room: int) -> int:
    """The height that should fit, by the steeper line to the best peak of two, or twice a safe one."""
    slope = max(_slope(best, other), _slope(best, first), 1.0)
    aim = room * (_SHARE if best[1] > room / 4 else _FIRST)
    safe = best[0] * max(2.0, aim / max(best[1], 1))
    return max(math.floor(min(best[0] + (aim - best[1]) / slope, safe)), 1)


def _slope(one: tuple[int, int], other: tuple[int, int]) -> float:
    return (one[1] - other[1]) / (one[0] - other[0]) if one[0] != other[0] else 0.0


def even(height: int, rows: int, unit: int) -> int:
    """About this height, or less, so that the last strip is about as high as the others."""
    if height >= rows:
        return rows
    most = _rounded(height, unit)
    spread = math.ceil(rows / math.ceil(rows / most))
    return min(math.ceil(spread / unit) * unit, most)


def _rounded(height: int, unit: int) -> int:
    """Down to a multiple of the unit, if there is one."""
    return height // unit * unit if height >= unit else height


def require_rowless(nbytes: int, memory_bytes: int, gathered: Mapping[str, int]) -> None:
    """Raise BudgetError where what has no rows needs more than the memory, whatever the strips' height."""
    if nbytes > memory_bytes:
        what = "such as a classifier's head"
        if gathered:
            what = f"such as all that {max(gathered, key=gathered.__getitem__)} needs at once"
        raise BudgetError(
            f"gradients, what passes hand on, and values without rows ({what}), need {human_bytes(nbytes)}, "
            f"more than the {human_bytes(memory_bytes)} of memory=. Give at least that, and what a strip "
            "needs."
        )


def _too_little(strip_bytes: int, held_bytes: int, memory_bytes: int) -> BudgetError:
    what = "gradients, values without rows and what passes hand on"
    held = f" in addition to {human_bytes(held_bytes)} of {what}" if held_bytes else ""
    return BudgetError(
        "a strip of one row, with the rows around that it depends on, needs "
        f"{human_bytes(strip_bytes)}{held}, more than the {human_bytes(memory_bytes)} of memory=. Give at "
        "least that, stream along the longer side of the image, set recompute=True, or take a model that "
        "sees less far."
    )
