"""A pipeline's drawing as one self-contained SVG, on light and on dark."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from html import escape
from typing import NamedTuple


class ChartKind(Enum):
    """What an action does, in a drawing's words."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT = "input gradient"
    WEIGHT = "weight gradient"
    UPDATE = "update"


class ChartSpan(NamedTuple):
    """An action, and from when to when it runs, in seconds; an update's microbatch is its batch."""

    kind: ChartKind
    stage: int
    microbatch: int
    batch: int
    start: float
    end: float

    def __str__(self) -> str:
        what = "batch" if self.kind is ChartKind.UPDATE else "microbatch"
        return f"{self.kind.value} of {what} {self.microbatch} at stage {self.stage}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineChart:
    """What every rank does when, its actions in order, and what to write above it.

    ``activation_bytes``, a number a stage, are what a microbatch leaves there from its forward to the end of
    its backward.
    """

    title: str
    notes: tuple[str, ...]
    rows: tuple[tuple[ChartSpan, ...], ...]
    activation_bytes: tuple[int, ...] | None = None

    @property
    def seconds(self) -> float:
        """From 0 to the last action's end."""
        return max((span.end for row in self.rows for span in row), default=0.0)

    def loops(self) -> dict[int, int]:
        """Each stage's place among those of its rank."""
        owned = (sorted({span.stage for span in row}) for row in self.rows)
        return {stage: place for stages in owned for place, stage in enumerate(stages)}

    def live(self, rank: int) -> Iterator[tuple[float, int, int]]:
        """When a rank's live microbatches change, how many there are from then on, and their bytes."""
        count = held = 0
        for span in self.rows[rank]:
            if span.kind in _FREES or span.kind is ChartKind.FORWARD:
                forward = span.kind is ChartKind.FORWARD
                change = 1 if forward else -1
                count += change
                held += change * (self.activation_bytes[span.stage] if self.activation_bytes else 0)
                yield span.start if forward else span.end, count, held


_FREES = (ChartKind.BACKWARD, ChartKind.WEIGHT)


# From strong to pale; numbers on them are nearly black in both schemes.
COLOURS = {
    ChartKind.FORWARD: ("#5b9bf5", "#8bbaf9", "#b3d2fb", "#d0e3fd"),
    ChartKind.BACKWARD: ("#55b567", "#84cc92", "#acdfb6", "#cdeed3"),
    ChartKind.INPUT: ("#ab85e6", "#c4a8ef", "#d9c6f6", "#e8dcfa"),
    ChartKind.WEIGHT: ("#efa92f", "#f4c169", "#f8d799", "#fbe8c3"),
    ChartKind.UPDATE: ("#d6455d",),
}
_LIGHT = {"page": "#ffffff", "waiting": "#eef0f3", "grid": "#c3c9d1", "ink": "#1b1f24"}
_DARK = {"page": "#14171c", "waiting": "#262c35", "grid": "#4a525e", "ink": "#e6e9ee"}


def style(shortest: float) -> str:
    """CSS for a drawing whose narrowest action is ``shortest`` pixels wide.

    Updates get an outline, by which those that take no time are seen too.
    """
    edge, mark = (0.8 if shortest >= 4.0 else 0.0), min(2.0, max(0.1, 0.3 * shortest))
    rules = [
        ".pipeline text{font:12px system-ui,'DejaVu Sans',sans-serif}",
        ".pipeline .title{font-size:16px;font-weight:600}",
        ".pipeline .tick{text-anchor:middle}.pipeline .rank{text-anchor:end}",
        f".pipeline path{{stroke-width:{edge:g}}}.pipeline .grid{{stroke-width:1}}",
        f".pipeline path.update-0{{stroke:{COLOURS[ChartKind.UPDATE][0]};stroke-width:{mark:.3g}}}",
        *(
            f".pipeline .{kind.name.lower()}-{shade}{{fill:{colour}}}"
            for kind, colours in COLOURS.items()
            for shade, colour in enumerate(colours)
        ),
        _scheme(_LIGHT, edge),
        f"@media (prefers-color-scheme:dark){{{_scheme(_DARK, edge)}}}",
        ".pipeline .number{fill:#14171c;font-size:10px;text-anchor:middle;pointer-events:none}",
    ]
    return "\n".join(rules)


def _scheme(colours: dict[str, str], edge: float) -> str:
    kinds = [kind.name.lower() for kind in COLOURS if kind is not ChartKind.UPDATE]
    outlined = ",".join(f".pipeline path[class^={kind}]" for kind in kinds)
    outlines = f"{outlined}{{stroke:{colours['page']}}}" if edge else ""
    return (
        f".pipeline .page{{fill:{colours['page']}}}.pipeline .waiting{{fill:{colours['waiting']}}}"
        f".pipeline .grid{{stroke:{colours['grid']}}}.pipeline text{{fill:{colours['ink']}}}{outlines}"
    )


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
        are_least = while_seconds >= chart.seconds  # one group a row
        if are_least or number <= max(limit, 2 * len(rows)):
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


_TILES = 140_000  # about 25 bytes each
_TOOLTIPS = 4_000  # about 200 bytes each
_MERGED = "Too many actions to draw each one: a colour's height is its share of the time."
_LEFT, _RIGHT, _LINE = 70.0, 24.0, 18.0
_DIGIT, _LABEL = 6.0, 11.0  # a digit's width, and the height of a row that holds one


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    """Where things are, in pixels: the plot's width, its top, and from one row to the next."""

    scale: float
    width: float
    top: float
    pitch: float
    ranks: int

    @property
    def row(self) -> float:
        return self.pitch - (3.0 if self.pitch >= 12.0 else 1.0 if self.pitch >= 5.0 else 0.0)

    @property
    def bottom(self) -> float:
        return self.top + self.pitch * self.ranks


def draw_svg(chart: PipelineChart) -> str:
    """The chart as SVG: a row a rank, a rectangle an action, seconds from left to right.

    Microbatches are numbered where the numbers fit; up to 4000 actions have tooltips. The file stays below
    5 MB: beyond 140,000 actions, those of a short while are merged into rectangles as high as each kind's
    share of it, and the drawing says so. Follows the reader's light or dark scheme.
    """
    rows, whole = tiles(chart, _TILES)
    notes = chart.notes if whole else (*chart.notes, _MERGED)
    frame = _frame(chart, len(notes))
    width, height = frame.width + _LEFT + _RIGHT, frame.bottom + 32.0
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pipeline" width="{width:.0f}" '
        f'height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" role="img">',
        f"<title>{escape(chart.title)}</title>",
        f"<style>{style(frame.scale * _shortest(chart))}</style>",
        '<rect class="page" width="100%" height="100%"/>',
        *_heading(chart.title, notes),
        *_legend(
            rows, len(notes), "later stages of a rank" if any(chart.loops().values()) else "every other batch"
        ),
        *_axis(chart.seconds, frame),
        *_labels(frame),
    ]
    singly = whole and sum(map(len, rows)) <= _TOOLTIPS
    for rank, row in enumerate(rows):
        lines.append(f'<g transform="translate({_LEFT:g} {_number(frame.top + rank * frame.pitch)})">')
        lines.extend(_single(chart.rows[rank], row, frame) if singly else _massed(row, frame))
        lines.append("</g>")
    return "\n".join([*lines, "</svg>", ""])


def _frame(chart: PipelineChart, notes: int) -> _Frame:
    seconds, ranks = chart.seconds or 1.0, len(chart.rows)
    width = min(max(22.0 * seconds / _shortest(chart), 640.0), 1600.0)
    return _Frame(
        scale=width / seconds,
        width=width,
        top=34.0 + _LINE * (notes + 2),
        pitch=min(max(1000.0 / max(ranks, 1), 2.0), 25.0),
        ranks=ranks,
    )


def _shortest(chart: PipelineChart) -> float:
    return min(
        (span.end - span.start for row in chart.rows for span in row if span.end > span.start), default=1.0
    )


def _heading(title: str, notes: tuple[str, ...]) -> Iterator[str]:
    yield f'<text class="title" x="{_LEFT:g}" y="28">{escape(title)}</text>'
    for number, note in enumerate(notes):
        yield f'<text x="{_LEFT:g}" y="{34 + _LINE * (number + 1):g}">{escape(note)}</text>'


def _legend(rows: list[list[Tile]], notes: int, pale: str) -> Iterator[str]:
    seen = {tile.paint for row in rows for tile in row}
    x, y = _LEFT, 34.0 + _LINE * (notes + 1) + 8.0
    for kind in (kind for kind in ChartKind if any(paint.kind is kind for paint in seen)):
        shades = sorted(paint.shade for paint in seen if paint.kind is kind)
        for shade in shades if kind is not ChartKind.UPDATE else shades[:1]:
            name = _class(Paint(kind, shade))
            yield f'<rect class="{name}" x="{x:g}" y="{y - 10:g}" width="12" height="12"/>'
            x += 14.0
        yield f'<text x="{x + 4:g}" y="{y:g}">{kind.value}</text>'
        x += 24.0 + 7.0 * len(kind.value)
    if any(paint.shade for paint in seen):
        yield f'<text x="{x:g}" y="{y:g}">(paler: {pale})</text>'


def _axis(seconds: float, frame: _Frame) -> Iterator[str]:
    height = frame.bottom - frame.top
    yield (
        f'<rect class="waiting" x="{_LEFT:g}" y="{frame.top:g}" width="{_number(frame.width)}" '
        f'height="{_number(height)}"/>'
    )
    step = nice_step(seconds / 10.0)
    for number in range(int(seconds / step * (1.0 + 1e-9)) + 1):
        x = _number(_LEFT + number * step * frame.scale)
        unit = " s" if number == 0 else ""
        yield f'<path class="grid" d="M{x} {frame.top:g}V{_number(frame.bottom + 4)}"/>'
        yield f'<text class="tick" x="{x}" y="{_number(frame.bottom + 18)}">{number * step:.6g}{unit}</text>'


def _labels(frame: _Frame) -> Iterator[str]:
    every = max(1, round(nice_step(14.0 / frame.pitch)))
    for rank in range(0, frame.ranks, every):
        y = frame.top + rank * frame.pitch + frame.row / 2.0 + 4.0
        yield f'<text class="rank" x="{_LEFT - 8:g}" y="{_number(y)}">rank {rank}</text>'


def nice_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... (and their tenths) that is at least so much; 1 for 0 or less."""
    if least <= 0.0:
        return 1.0
    power = float(f"1e{int(f'{least:e}'.partition('e')[2])}")
    return next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= least * (1.0 - 1e-9))


def _single(spans: tuple[ChartSpan, ...], row: list[Tile], frame: _Frame) -> Iterator[str]:
    """A path with a tooltip for every action, updates on top, and its microbatch where that fits."""
    for span, tile in sorted(zip(spans, row, strict=True), key=lambda each: _is_update(each[1].paint)):
        tip = f"{span}: {span.start:.6g} s to {span.end:.6g} s"
        yield f'<path class="{_class(tile.paint)}" d="{_outline(tile, frame)}"><title>{tip}</title></path>'
    yield from _numbers(spans, frame)


def _numbers(spans: tuple[ChartSpan, ...], frame: _Frame) -> Iterator[str]:
    if frame.row < _LABEL:
        return
    for span in spans:
        text, middle = str(span.microbatch), (span.start + span.end) / 2.0
        if (span.end - span.start) * frame.scale >= _DIGIT * len(text) + 3.0:
            x, y = _number(middle * frame.scale), _number(frame.row / 2.0 + 4.0)
            yield f'<text class="number" x="{x}" y="{y}">{text}</text>'


def _massed(row: list[Tile], frame: _Frame) -> Iterator[str]:
    """A path for every colour, updates on top."""
    outlines: dict[Paint, list[str]] = defaultdict(list)
    for tile in row:
        outlines[tile.paint].append(_outline(tile, frame))
    for paint, each in sorted(outlines.items(), key=lambda item: _is_update(item[0])):
        yield f'<path class="{_class(paint)}" d="{"".join(each)}"/>'


def _outline(tile: Tile, frame: _Frame) -> str:
    """``M x y h width v height h -width z``."""
    left, right = round(tile.start * frame.scale, 2), round(tile.end * frame.scale, 2)
    bottom, top = frame.row * (1.0 - tile.low), frame.row * (1.0 - tile.high)
    width = _number(right - left)
    return f"M{_number(left)} {_number(top)}h{width}v{_number(bottom - top)}h-{width}z"


def _is_update(paint: Paint) -> bool:
    return paint.kind is ChartKind.UPDATE


def _class(paint: Paint) -> str:
    return f"{paint.kind.name.lower()}-{min(paint.shade, len(COLOURS[paint.kind]) - 1)}"


def _number(value: float) -> str:
    """At most two decimals, and no more than needed."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return text.removeprefix("0") if text.startswith("0.") else text
