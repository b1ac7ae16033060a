"""A profiled step as text and as JSON."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

from squeezebox.reports._page import PHASES, UNITS, owner, timeline_html
from squeezebox.reports._report import human_bytes
from squeezebox.reports._timeline_trace import timeline_events
from squeezebox.schema import FormatError, StepTimeline, decoded, load_json, plain_fields, write_whole

TIMELINE_VERSION = 1
_ROWS = 16  # the slowest cells that text shows; JSON has all


@dataclass(frozen=True, slots=True)
class Timeline:
    """Where one step's time and memory went, phase by module. ``str()`` is a table."""

    figures: StepTimeline

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written by :meth:`save`."""
        return {"version": TIMELINE_VERSION, **plain_fields(self.figures)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it whole or not at all, for ``squeezebox report``; OutputError if it cannot be."""
        write_whole(path, json.dumps(self.to_dict(), allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Timeline:
        """What :meth:`save` wrote; FormatError if the file is missing, damaged, or of another version."""
        return load_json(path, "timeline", "session.timeline(step).save(path)", _from_dict)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that needs nothing but a browser; OutputError if the path cannot be written."""
        write_whole(path, timeline_html(self.figures))

    def to_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace for ui.perfetto.dev; OutputError if the path cannot be written."""
        write_whole(path, json.dumps(timeline_events(self.figures), allow_nan=False) + "\n")

    def __str__(self) -> str:
        figures, record = self.figures, self.figures.record
        limit = f" of {human_bytes(record.budget_bytes)}" if record.budget_bytes is not None else ""
        phases: Counter[str] = Counter()
        for cell in figures.cells:
            phases[cell.phase] += cell.seconds  # type: ignore[assignment]
        slowest = sorted(figures.cells, key=lambda cell: -cell.seconds)[:_ROWS]
        width = max((len(cell.module) for cell in slowest), default=0)
        return "\n".join(
            [
                f"{figures.model}: {figures.unprofiled_seconds:.3f} s, profiled {figures.seconds:.3f} s",
                f"peak   {owner(figures.peak)}{limit}",
                f"saved  {human_bytes(record.saved_bytes)}, held {human_bytes(record.packed_bytes)}",
                "time   "
                + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in phases.items() if seconds),
                "",
                *(
                    f"{cell.seconds * 1e3:9.2f} ms  {cell.phase:<9}  {cell.module:<{width}}  "
                    f"{human_bytes(cell.saved_bytes):>10} saved  {human_bytes(cell.packed_bytes):>10} held"
                    for cell in slowest
                ),
            ]
        )


def _from_dict(values: Any) -> Timeline:
    version = values.pop("version", None) if isinstance(values, dict) else None
    if version != TIMELINE_VERSION:
        raise FormatError(f"version is {version}, and this Squeezebox reads {TIMELINE_VERSION}")
    figures = decoded(StepTimeline, values)
    _check(figures)
    return Timeline(figures)


def _check(figures: StepTimeline) -> None:
    for cell in figures.cells:
        if cell.phase not in PHASES:
            raise FormatError(f"a cell's phase is {cell.phase!r}, none of {', '.join(PHASES)}")
    for forecast in figures.forecasts:
        if forecast.unit not in UNITS:
            raise FormatError(f"{forecast.name} has the unit {forecast.unit!r}, none of {', '.join(UNITS)}")
    for sample in (*figures.samples, figures.peak):
        if len(sample.nbytes) != len(figures.kinds):
            raise FormatError(
                f"a sample has {len(sample.nbytes)} numbers of bytes for {len(figures.kinds)} kinds"
            )
