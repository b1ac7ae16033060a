"""A drawing's rectangles: one an action, or one a kind where there are too many actions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from squeezebox.reports._chart import ChartKind, ChartSpan, PipelineChart

SHADES = 4  # of each colour
_ORDER = {kind: number for number, kind in enumerate(ChartKind)}


class Paint(NamedTuple):
    """A colour: of what kind, and how pale, from 0."""

    kind: ChartKind
    shade: int


class Tile(NamedTuple):
    """A rectangle: from when to when in seconds, from where to where in shares of its row's height."""

    paint: Paint
    start: float
    end: float
    low: float = 0.0
    high: float = 1.0


def paints(chart: PipelineChart) -> dict[tuple[int, int], int]:
    """The shade of each stage and batch: by a rank's stages if it has several, else by turns of batches."""
    loops = chart.loops()
    several = any(loops.values())
    keys = {(span.stage, span.batch) for row in chart.rows for span in row}
    return {(stage, batch): loops[stage] % SHADES if several else batch % 2 for stage, batch in keys}


def tiles(chart: PipelineChart, limit: int) -> tuple[list[list[Tile]], bool]:
    """Every rank's rectangles, and whether each is one action.

    More than ``limit`` are merged: actions of a short while become rectangles on top of each other, as high
    as their kind's share of that while, so that a colour's area is still its seconds.
    """
    shades = paints(chart)
    actions = sum(map(len, chart.rows))
    if actions <= limit:
        return [[_alone(span, shades) for span in row] for row in chart.rows], True
    while_seconds = chart.seconds * len(chart.rows) / limit
    while True:
        rows = [list(_merged(row, shades, while_seconds)) for row in chart.rows]
        number = sum(map(len, rows))
        if number <= max(limit, 2 * len(rows)):
            return rows, False
        while_seconds *= max(1.1, number / limit)


def _alone(span: ChartSpan, shades: dict[tuple[int, int], int]) -> Tile:
    return Tile(Paint(span.kind, shades[span.stage, span.batch]), span.start, span.end)


def _merged(row: Sequence[ChartSpan], shades: dict[tuple[int, int], int], seconds: float) -> Iterator[Tile]:
    group: list[Tile] = []
    for tile in (_alone(span, shades) for span in row):
        if group and tile.end - group[0].start > seconds:
            yield from _stacked(group)
            group = []
        group.append(tile)
    yield from _stacked(group)


def _stacked(group: Sequence[Tile]) -> Iterable[Tile]:
    """One rectangle a colour, all as long as the group; what is left above them is waiting."""
    if len(group) < 2:
        yield from group
        return
    start, end = group[0].start, group[-1].end
    shares: dict[Paint, float] = defaultdict(float)
    for tile in group:
        shares[tile.paint] += (tile.end - tile.start) / max(end - start, 1e-300)
    low = 0.0
    for paint, share in sorted(shares.items(), key=lambda item: (_ORDER[item[0].kind], item[0].shade)):
        if share > 0.0:
            yield Tile(paint, start, end, low, low + share)
            low += share
