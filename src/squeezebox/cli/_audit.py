"""``squeezebox audit``: arms and factors from their names, progress, and the findings."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import squeezebox
from squeezebox.cli._estimate import call_factory, load_call
from squeezebox.cli._show import progress
from squeezebox.schema import OptionError, SqueezeboxError


@dataclass(frozen=True)
class Request:
    """What the command line names."""

    train: str
    arms: str
    seeds: int
    factors: str
    noise: float | None
    margin: float
    workers: int
    threads: int | None
    steps: int
    out: Path


def run(request: Request, *, as_json: bool) -> None:
    """Make the trainings that are missing, and print what all of them tell.

    Raises:
        OptionError: an argument is out of range or names nothing, or ``out`` is of another audit.
        OutputError: ``out`` cannot be written.
        SqueezeboxError: the training raised something; or, after printing, a control was not equal.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    factors = () if request.factors == "none" else tuple(request.factors.split(","))
    with progress("trainings") as on_progress:
        trainings = functools.partial(
            squeezebox.audit,
            load_call(request.train, "run"),
            out=request.out,
            arms=arms_named(request.arms, request.noise),
            seeds=request.seeds,
            factors=factors,
            margin=request.margin,
            workers=request.workers,
            threads=request.threads,
            steps=request.steps,
            on_progress=on_progress,
        )
        found = call_factory(request.train, trainings)
    print(json.dumps(found.to_dict(), indent=1, allow_nan=False) if as_json else found)
    if not found.sound:
        arms = ", ".join(control.arm for control in found.controls if not control.equal)
        raise SqueezeboxError(
            f"the same training twice was not equal to the bit ({arms}), so what was found is not of "
            "the factors alone. Draw every random number from the run's generators or torch's global one, or "
            "see above which operator differs."
        )


def arms_named(names: str, noise: float | None) -> dict[str, Mapping[str, Any] | None]:
    """``plain,squeezed,exact,noise=1e-2,plan=plan.json`` as options of attach, by name.

    Raises:
        OptionError: a name says no way to train, or is there twice; or the noise is of no arm.
        FormatError: a plan's file is missing or damaged.
    """
    if noise is not None and "squeezed" not in names.split(","):
        raise OptionError(
            f"--noise {noise:g} is of the arm squeezed, and --arms {names} has none; write "
            f"noise={noise:g} there, or leave it out."
        )
    found: dict[str, Mapping[str, Any] | None] = {}
    for name in names.split(","):
        if name in found:
            raise OptionError(f"--arms {names}: {name} is there twice; the control trains each arm again.")
        found[name] = _options(name, 1e-3 if noise is None else noise)
    return found


def _options(name: str, noise: float) -> Mapping[str, Any] | None:
    known: dict[str, Mapping[str, Any] | None] = {
        "plain": None,
        "squeezed": {"noise": noise},
        "exact": {"exact": True},
    }
    if name in known:
        return known[name]
    kind, _, value = name.partition("=")
    if kind == "plan" and value:
        return {"plan": squeezebox.load_plan(value)}
    try:
        if kind == "noise":
            return {"noise": float(value)}
    except ValueError:
        pass
    raise OptionError(
        f"--arms: '{name}' is none of plain, squeezed, exact, noise=1e-2 and plan=plan.json; write "
        "plain,squeezed, or call squeezebox.audit(arms=...) for any other options of attach."
    )
