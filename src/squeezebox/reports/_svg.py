"""A pipeline's drawing as one self-contained SVG."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from squeezebox.reports._chart import ChartKind, ChartSpan, PipelineChart
from squeezebox.reports._style import COLOURS, style
from squeezebox.reports._tiles import Paint, Tile, tiles

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
