"""``squeezebox estimate --devices`` and ``--jobs``: tables, and whether it is a go."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import squeezebox
from squeezebox.cli._estimate import call_factory, load_factory, load_loss, parse_shape
from squeezebox.cli._model_names import load_model_factory
from squeezebox.cli._show import progress
from squeezebox.planning import SharedStep, shared
from squeezebox.reports import Estimate, Feasibility, Scenario
from squeezebox.schema import BudgetError, JobList, JobSpec


def described(
    model: str, input: str | None, batch: int | None, sample: str | None, loss: str | None, dtype: str | None
) -> dict[str, Any]:
    """A step as squeezebox.estimate() takes it, from what the command line names; ``dtype`` is the input's.

    Raises:
        OptionError: a name says nothing that there is.
    """
    with progress("loading the model"):
        made = None if sample is None else functools.partial(call_factory, sample, load_factory(sample))
        return {
            "model": load_model_factory(model),
            "input_shape": None if input is None else parse_shape(input),
            "batch": batch,
            "sample": made,
            "loss_fn": None if loss is None else load_loss(loss),
            "input_dtype": dtype,
        }


def estimated(as_json: bool, **step: Any) -> None:
    """Print what a step holds; OptionError where an argument is out of range."""
    with progress("estimating"):
        found = squeezebox.estimate(**step)
    _show(found, as_json)


def on_devices(devices: str, as_json: bool, **options: Any) -> None:
    """Print where a step fits.

    Raises:
        BudgetError: after printing, where no device can hold it.
        OptionError: an argument is out of range.
        FormatError: the file of devices is damaged.
    """
    with progress("estimating") as on_progress:
        found = squeezebox.feasibility(devices=devices, on_progress=on_progress, **options)
    _show(found, as_json)
    if not found.go:
        best = max(found.devices, key=lambda each: each.batch)
        raise BudgetError(
            f"no-go: a step of batch {found.batch} fits none of {len(found.devices)} devices. "
            + (
                f"The largest that does is {best.batch}, on '{best.device}'; give --batch {best.batch}."
                if best.batch
                else "Nor does any other batch; give a smaller model, or more memory."
            )
        )


def on_shared_devices(jobs: Path, devices: str, as_json: bool) -> None:
    """Print how the jobs of a file share each device.

    Raises:
        BudgetError: after printing, where no device holds all of them and completes some of each.
        OptionError: an argument is out of range.
        FormatError: a file is damaged.
    """
    specs = JobList.load(jobs).jobs
    with progress("estimating"):
        found = shared([_step(spec) for spec in specs], devices)
    _show(found, as_json)
    if not found.go:
        raise BudgetError(
            f"no-go: none of {len(found.devices)} devices holds all {len(specs)} jobs together and completes "
            "some of each. Take one away, or give it a smaller batch or more time."
        )


def _step(spec: JobSpec) -> SharedStep:
    named = [text or None for text in (spec.sample, spec.loss, spec.input_dtype)]
    step = described(spec.model, spec.input or None, spec.batch or None, *named)
    return SharedStep(spec=spec, model=step.pop("model"), described=step)


def _show(found: Estimate | Feasibility | Scenario, as_json: bool) -> None:
    print(json.dumps(found.to_dict(), indent=1) if as_json else found)
