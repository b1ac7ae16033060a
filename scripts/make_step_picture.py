#!/usr/bin/env python3
"""Draw docs/step.svg, the README's picture: a step's memory before and after, from the newest report of ways.

Goes in: benchmarks/reports/ways-<date>.json. Comes out: docs/step.svg, readable at a width of 400 pixels.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import _figures  # noqa: E402

PICTURE = ROOT / "docs" / "step.svg"
COLOURS = ("#b0b0b0", "#ccbb44", "#4477aa", "#ee6677")  # Paul Tol's bright scheme, and grey
LABELS = {"there throughout": "weights, optimizer's state"}
WIDTH, HEIGHT = 480, 318
PANEL, LEFT, GAP = 205, 20, 30
TOP, BOTTOM = 46, 236
MIB = 2**20

SHARES = {"forward": 0.4, "backward": 0.5, "optimizer": 0.1}  # of a panel's width

Sample = tuple[float, str, list[int]]  # where in the panel from 0 to 1, phase, bytes of every part


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(picture(), encoding="utf-8")
    print(PICTURE.relative_to(ROOT))


def picture() -> str:
    """The whole drawing."""
    report = _figures.newest()["ways"]
    step = json.loads(report.path.with_suffix(".json").read_text(encoding="utf-8"))["results"]["step"]
    before, after = (read(step[name]) for name in ("before", "after"))
    highest = max(sum(parts) for _, _, parts in (*before, *after))
    about = (
        f"Memory over one training step of a small GPT, plain and with Squeezebox. From {report.path.stem}."
    )
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
            'role="img" font-family="sans-serif" font-size="15" fill="#222">',
            f"<title>{about}</title>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#fff"/>',
            *panel("plain PyTorch", before, LEFT, highest),
            *panel("with Squeezebox", after, LEFT + PANEL + GAP, highest),
            *legend(step["parts"]),
            "</svg>\n",
        )
    )


def read(lines: Sequence[str]) -> list[Sample]:
    """What the report says, a sample a line, evenly spaced within its phase: clocks say little here."""
    rows = [line.split() for line in lines]
    phases = ["forward" if row[1] == "loss" else row[1] for row in rows]
    starts = dict(zip(SHARES, accumulate(SHARES.values(), initial=0.0), strict=False))
    samples, seen = [], Counter[str]()
    for phase, (_, _, *parts) in zip(phases, rows, strict=True):
        place = starts[phase] + SHARES[phase] * seen[phase] / phases.count(phase)
        seen[phase] += 1
        samples.append((place, phase, [int(each) for each in parts]))
    return samples


def columns(samples: Sequence[Sample]) -> list[list[int]]:
    """Bytes of every part for each pixel: its highest sample, or the last one before it."""
    found: list[list[int]] = [[] for _ in range(PANEL)]
    for share, _, parts in samples:
        at = min(int(share * PANEL), PANEL - 1)
        found[at] = max(found[at], parts, key=sum)
    last = samples[0][2]
    for at, parts in enumerate(found):
        found[at] = parts or last
        last = found[at]
    return found


def panel(title: str, samples: Sequence[Sample], left: int, highest: int) -> Iterator[str]:
    """One step: parts on top of each other, the peak, and the phases."""
    pixels = (BOTTOM - TOP) / highest
    heights = columns(samples)
    for part in reversed(range(len(COLOURS))):
        tops = [BOTTOM - pixels * sum(each[: part + 1]) for each in heights]
        line = "".join(f"V{top:.0f}h1" for top in tops)
        yield f'<path d="M{left} {BOTTOM}{line}V{BOTTOM}z" fill="{COLOURS[part]}"/>'
    peak = max(sum(parts) for _, _, parts in samples)
    top = BOTTOM - pixels * peak
    yield f'<path d="M{left} {top:.0f}h{PANEL}" stroke="#222" stroke-dasharray="4 3"/>'
    yield f'<text x="{left}" y="18" font-weight="bold">{title}</text>'
    yield f'<text x="{left + PANEL}" y="{top - 6:.0f}" text-anchor="end">peak {peak / MIB:.1f} MiB</text>'
    yield from phases(samples, left)


def phases(samples: Sequence[Sample], left: int) -> Iterator[str]:
    """Where backward and the update begin."""
    begun = {phase: share for share, phase, _ in reversed(samples)}
    backward, update = begun["backward"], begun["optimizer"]
    for share in (backward, update):
        yield f'<path d="M{left + PANEL * share:.0f} {BOTTOM}v8" stroke="#222"/>'
    for name, start, end in (("forward", 0.0, backward), ("backward", backward, update)):
        middle = left + PANEL * (start + end) / 2
        yield f'<text x="{middle:.0f}" y="{BOTTOM + 18}" text-anchor="middle">{name}</text>'


def legend(parts: Sequence[str]) -> Iterator[str]:
    """A colour a part, two in a row."""
    for at, (part, colour) in enumerate(zip(parts, COLOURS, strict=True)):
        x, y = LEFT + at % 2 * (PANEL + GAP), 270 + at // 2 * 24
        yield f'<rect x="{x}" y="{y}" width="14" height="14" fill="{colour}"/>'
        yield f'<text x="{x + 20}" y="{y + 13}">{LABELS.get(part, part)}</text>'


if __name__ == "__main__":
    main()
