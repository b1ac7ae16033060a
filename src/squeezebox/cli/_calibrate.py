"""``squeezebox calibrate``: the knobs' ranges from the command line, progress, and the findings."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import squeezebox
from squeezebox.cli._estimate import call_factory, load_call
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
        SqueezeboxError: the training raised something; or, after printing, no level is shown.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    knobs = {name: _range(name, text) for name, text in request.knobs.items()}
    with progress("trainings") as on_progress:
        trainings = functools.partial(
            squeezebox.calibrate,
            load_call(request.train, "run"),
            metric=request.metric,
            margin=request.margin,
            knobs=knobs,
            trainings=request.trainings,
            out=request.out,
            threads=request.threads,
            on_progress=on_progress,
        )
        found = call_factory(request.train, trainings)
    print(json.dumps(found.to_dict(), indent=1, allow_nan=False) if as_json else found)
    if found.options is None:
        raise SqueezeboxError(
            "no level is shown; give more --trainings or a wider --margin, and finished trainings are used "
            "again."
        )


def knobs_named(noise: str, update_noise: str, own: Sequence[str]) -> dict[str, str]:
    """Ranges as text, by the knob: the two that may be none, and NAME=LOW,HIGH of the user's own.

    Raises:
        OptionError: one of these has an option of its own, or is there twice.
    """
    usual = {"noise": noise, "update_noise": update_noise}
    found = {name: text for name, text in usual.items() if text != "none"}
    for name, _, text in (each.partition("=") for each in own):
        if name in usual:
            option = f"--{name.replace('_', '-')}"
            raise OptionError(f"--knob is for knobs of your own; give this one as {option} {text}.")
        if name in found:
            raise OptionError(f"--knob {name} is there twice; give each knob once.")
        found[name] = text
    return found


def _range(name: str, text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(","))
    except ValueError as error:
        raise OptionError(f"{name} {text!r}: give the tightest and the loosest, such as 1e-4,0.3.") from error
    return low, high
