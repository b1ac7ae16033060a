"""``squeezebox calibrate``: the knobs' ranges from the command line, progress, and the findings."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import squeezebox
from squeezebox.cli._estimate import load_call
from squeezebox.cli._show import progress
from squeezebox.schema import OptionError, SqueezeboxError


@dataclass(frozen=True)
class Request:
    """What the command line names."""

    train: str
    margin: float
    metric: str
    knobs: Mapping[str, str]
    trainings: int
    threads: int | None
    out: Path


def run(request: Request, *, as_json: bool) -> None:
    """Make the trainings that are missing, and print what they show.

    Raises:
        OptionError: an argument is out of range or names nothing, or ``out`` is of other trainings.
        OutputError: ``out`` cannot be written.
        SqueezeboxError: after printing, where no level is shown.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    knobs = {name: _range(name, text) for name, text in request.knobs.items() if text != "none"}
    with progress("trainings") as on_progress:
        found = squeezebox.calibrate(
            load_call(request.train, "run"),
            metric=request.metric,
            margin=request.margin,
            knobs=knobs,
            trainings=request.trainings,
            out=request.out,
            threads=request.threads,
            on_progress=on_progress,
        )
    print(json.dumps(found.to_dict(), indent=1, allow_nan=False) if as_json else found)
    if found.options is None:
        raise SqueezeboxError(
            "no level is shown; give more --trainings or a wider --margin, and finished trainings are used "
            "again."
        )


def _range(name: str, text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(","))
    except ValueError as error:
        raise OptionError(f"{name} {text!r}: give the tightest and the loosest, such as 1e-4,0.3.") from error
    return low, high
