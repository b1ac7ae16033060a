"""Drawings for notebooks: SVG without scripts, in the reader's own colour, as wide as there is room."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import accumulate

from squeezebox.reports._svg import nice_step
from squeezebox.schema import PlanPoint, StepCurve, human_bytes

_WIDTH, _HEIGHT = 400.0, 246.0  # at this width, letters are of 12 pixels
_LEFT, _TOP, _RIGHT, _BOTTOM = 74.0, 34.0, 384.0, 186.0
_PLAIN, _PLANNED, _BUDGET = "#8a8f98", "#3f88e0", "#d6455d"  # seen on white and on black
_MOST_LAYERS = 16
_LONGEST = 22  # letters of a layer's name


def notebook(text: str, *drawings: str) -> str:
    """Drawings side by side where there is room, and a text below that scrolls where it is wide."""
    row = "".join(f'<div style="flex:1 1 340px;max-width:560px">{each}</div>' for each in drawings if each)
    return (
        f'<div class="squeezebox"><div style="display:flex;flex-wrap:wrap;gap:12px">{row}</div>'
        f'<pre style="overflow-x:auto;white-space:pre;line-height:1.3">{escape(text)}</pre></div>'
    )


def page_frame(page: str) -> str:
    """A whole page within a notebook, without access to it."""
    return (
        f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts" style="width:100%;height:720px;border:0">'
        "</iframe>"
    )


def memory_drawing(curve: StepCurve, budget_bytes: int | None) -> str:
    """A step's memory, plain and under the plan on top of each other, and the budget."""
    plain, planned = (
        [nbytes for phase in each.values() for nbytes in phase]
        for each in (curve.plain_bytes, curve.planned_bytes)
    )
    highest = max(*plain, *planned, budget_bytes or 0, 1)

    def area(values: Sequence[int], colour: str, name: str) -> str:
        step = (_RIGHT - _LEFT) / len(values)
        line = "".join(f"V{_y(nbytes / highest):.1f}h{step:.3f}" for nbytes in values)
        return (
            f'<path d="M{_LEFT:g} {_BOTTOM:g}{line}V{_BOTTOM:g}z" fill="{colour}" fill-opacity=".45" '
            f'stroke="{colour}"><title>{name}: peak {human_bytes(max(values))}</title></path>'
        )

    parts = [*_byte_axis(highest), area(plain, _PLAIN, "plain"), area(planned, _PLANNED, "planned")]
    if budget_bytes is not None:
        y = _y(budget_bytes / highest)
        parts.append(f'<path d="M{_LEFT:g} {y:.1f}H{_RIGHT:g}" stroke="{_BUDGET}" stroke-dasharray="5 3"/>')
    parts += _phases({phase: len(values) for phase, values in curve.plain_bytes.items()})
    keys = [(_PLAIN, f"plain {human_bytes(max(plain))}"), (_PLANNED, f"planned {human_bytes(max(planned))}")]
    keys += [] if budget_bytes is None else [(_BUDGET, "budget")]
    return _drawing("Memory over the step", [*parts, *_legend(keys)], _HEIGHT)


def frontier_drawing(points: Sequence[PlanPoint], chosen: PlanPoint, plain: PlanPoint) -> str:
    """Time against peak of the fastest plans, the chosen one and the plain step among them."""
    everything = [*points, chosen, plain]
    highest = max(point.peak_bytes for point in everything)
    slowest = 1.1 * max(point.seconds for point in everything) / plain.seconds

    def place(point: PlanPoint) -> tuple[float, float]:
        share = point.seconds / plain.seconds / slowest
        return _LEFT + share * (_RIGHT - _LEFT), _y(point.peak_bytes / highest)

    parts = list(_byte_axis(highest))
    step = nice_step(slowest / 5)
    for number in range(int(slowest / step) + 1):
        x = _LEFT + number * step / slowest * (_RIGHT - _LEFT)
        parts.append(
            f'<text x="{x:.1f}" y="{_BOTTOM + 16:g}" text-anchor="middle">{number * step:.4g}</text>'
        )
    middle = (_LEFT + _RIGHT) / 2
    parts.append(f'<text x="{middle:g}" y="{_BOTTOM + 34:g}" text-anchor="middle">time over plain</text>')
    for point, colour, radius in (
        *((point, _BUDGET, 3) for point in points),
        (plain, _PLAIN, 6),
        (chosen, _PLANNED, 6),
    ):
        x, y = place(point)
        tip = f"{human_bytes(point.peak_bytes)} at {point.seconds / plain.seconds:.2f} of plain's time"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"><title>{tip}</title></circle>'
        )
    keys = [(_PLANNED, "this plan"), (_BUDGET, "other budgets"), (_PLAIN, "plain")]
    return _drawing("Peak against time", [*parts, *_legend(keys)], _HEIGHT)


def bits_drawing(layers: Mapping[str, tuple[float, int]]) -> str:
    """Bits held for each element, a bar a layer; of each name also the bytes that plain training saves.

    Of many layers, those that save most are drawn, in their order.
    """
    largest = sorted(layers, key=lambda name: -layers[name][1])[:_MOST_LAYERS]
    shown = {name: bits for name, (bits, _) in layers.items() if name in largest}
    left, most = 170.0, max([*shown.values(), 1.0])
    parts, y = list[str](), 30.0
    for name, bits in shown.items():
        width = (_WIDTH - left - 44.0) * bits / most
        label = name if len(name) <= _LONGEST else f"...{name[3 - _LONGEST :]}"
        parts += [
            f'<text x="{left - 6:g}" y="{y + 11:g}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{left:g}" y="{y:g}" width="{width:.1f}" height="14" fill="{_PLANNED}">'
            f"<title>{escape(name)}: {bits:.2f} bits an element</title></rect>",
            f'<text x="{left + width + 4:.1f}" y="{y + 11:g}">{bits:.1f}</text>',
        ]
        y += 19.0
    hidden = len(layers) - len(shown)
    if hidden:
        parts.append(f'<text x="{left:g}" y="{y + 12:g}">and {hidden} layers that save less</text>')
        y += 19.0
    return _drawing("Bits held for each element, by layer", parts, y + 6.0) if shown else ""


def _y(share: float) -> float:
    return _BOTTOM - share * (_BOTTOM - _TOP)


def _byte_axis(highest: int) -> Iterator[str]:
    """Lines at round sizes."""
    unit = 1024 ** max((power for power in range(5) if highest >= 2 * 1024**power), default=0)
    step = nice_step(highest / unit / 4)
    for number in range(int(highest / unit / step) + 1):
        y = _y(number * step * unit / highest)
        yield f'<path d="M{_LEFT:g} {y:.1f}H{_RIGHT:g}" stroke="currentColor" stroke-opacity=".25"/>'
        size = human_bytes(int(number * step * unit)).replace(".00 ", " ")
        yield f'<text x="{_LEFT - 6:g}" y="{y + 4:.1f}" text-anchor="end">{size}</text>'


def _phases(shares: Mapping[str, int]) -> Iterator[str]:
    """Their names below, and lines between them."""
    whole, ends = sum(shares.values()), list(accumulate(shares.values(), initial=0))
    for name, start, end in zip(shares, ends, ends[1:], strict=False):
        x, middle = (_LEFT + at / whole * (_RIGHT - _LEFT) for at in (end, (start + end) / 2))
        if end < whole:
            yield f'<path d="M{x:.1f} {_TOP:g}V{_BOTTOM + 6:g}" stroke="currentColor" stroke-opacity=".4"/>'
        label = "update" if name == "optimizer" else name
        yield f'<text x="{middle:.1f}" y="{_BOTTOM + 16:g}" text-anchor="middle">{label}</text>'


def _legend(keys: Iterable[tuple[str, str]]) -> Iterator[str]:
    x = 12.0
    for colour, name in keys:
        yield f'<rect x="{x:g}" y="{_HEIGHT - 16:g}" width="11" height="11" fill="{colour}"/>'
        yield f'<text x="{x + 15:g}" y="{_HEIGHT - 6:g}">{name}</text>'
        x += 32.0 + 6.6 * len(name)


def _drawing(title: str, parts: Iterable[str], height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}" role="img" '
        'style="width:100%;height:auto" font-family="system-ui,sans-serif" font-size="12" '
        f'fill="currentColor"><title>{title}</title>'
        f'<text x="12" y="18" font-size="14" font-weight="600">{title}</text>{"".join(parts)}</svg>'
    )
