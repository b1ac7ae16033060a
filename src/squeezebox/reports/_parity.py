"""What a comparison of two models finds, as text and as JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from squeezebox.reports._saved import SavedFigures
from squeezebox.schema import ParityFigures, PlaceParity

_ROWS = 20  # in text; JSON has all


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % score interval of a share of ``count`` samples (Wilson 1927).

    Of a mean of values from 0 to 1, such as each sample's own share, it is at least that wide.
    """
    z = statistics.NormalDist().inv_cdf(0.975)
    centre, reach = (
        share + z * z / (2 * count),
        z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)),
    )
    scale = 1 + z * z / count
    return max(0.0, (centre - reach) / scale), min(1.0, (centre + reach) / scale)


@dataclass(frozen=True, slots=True)
class Parity(SavedFigures):
    """Whether two systems agree, place by place. ``str()`` is a table of those that do not."""

    KIND, AGAIN = "parity", "squeezebox.parity(a, b, batches).save(path)"
    FIGURES = ParityFigures

    figures: ParityFigures

    @property
    def agrees(self) -> bool:
        """Whether every place that was compared is within what is allowed."""
        return self.first is None

    @property
    def first(self) -> PlaceParity | None:
        """The first place, in the order of execution, whose own difference is above what is allowed."""
        return next(iter(self.differing), None)

    @property
    def differing(self) -> tuple[PlaceParity, ...]:
        """All places that do not agree, in the order of execution."""
        return tuple(each for each in self.figures.places if not each.agrees)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        figures, first = self.figures, self.first
        passes = "forward and backward" if any(each.backward for each in figures.places) else "forward"
        yield (
            f"{_count(figures.batches, 'batch', 'batches')}, {_count(figures.samples, 'sample')}: "
            f"{_count(figures.layers, 'layer')} compared {passes}, tolerance {figures.tolerance:g}"
        )
        if first is None:
            largest = max((each.own or 0.0 for each in figures.places), default=0.0)
            yield "they agree" + (f"; the largest difference is {largest:.1e}" if largest else " to the bit")
        else:
            yield f"the first that differs is {first.layer}: {first.what}, by {_size(first.own, first.why)}"
            if figures.share is not None:
                yield f"without it {100 * figures.share:.1f} % of the final change is gone"
        yield from self._output()
        yield from figures.notes
        if self.differing:
            yield from _table(self.differing)

    def _output(self) -> Iterator[str]:
        figures = self.figures
        if figures.output:
            yield f"the final output differs by {figures.output:.1e}"
        if (
            figures.flipped is not None
            and figures.flipped_low is not None
            and figures.flipped_high is not None
        ):
            yield (
                f"{100 * figures.flipped:.2f} % of {_count(figures.predictions, 'prediction')} flipped "
                f"(95 % interval {100 * figures.flipped_low:.2f} % to {100 * figures.flipped_high:.2f} %)"
            )


def _table(places: tuple[PlaceParity, ...]) -> Iterator[str]:
    rows = [("layer", "what", "own", "free", "allowed")]
    rows += [
        (each.layer, each.what, _size(each.own, each.why), _size(each.free, "-"), f"{each.allowed:.1e}")
        for each in places[:_ROWS]
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    yield ""
    yield from ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    if len(places) > _ROWS:
        yield f"and {len(places) - _ROWS} more"


def _size(size: float | None, otherwise: str) -> str:
    return otherwise if size is None else f"{size:.1e}"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or f'{one}s'}"
