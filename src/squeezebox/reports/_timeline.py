"""A profiled step as text and as JSON."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from squeezebox.reports._report import plain, write_whole
from squeezebox.schema import StepTimeline

TIMELINE_VERSION = 1


@dataclass(frozen=True, slots=True)
class Timeline:
    """Where one step's time and memory went: phase by module. ``str()`` is a table."""

    figures: StepTimeline

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written by :meth:`to_json`."""
        return {"version": TIMELINE_VERSION, **plain(self.figures)}

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write it whole or not at all; OutputError if the path cannot be written."""
        write_whole(path, json.dumps(self.to_dict()) + "\n")
