"""``squeezebox doctor``: what a step does needlessly, and whether packages are as they were installed."""

from __future__ import annotations

import functools
import json

import squeezebox
from squeezebox.cli._estimate import call_factory, load_factory
from squeezebox.cli._show import progress
from squeezebox.reports import EnvironmentCheck, RangeCheck, StepCheck
from squeezebox.schema import OptionError, SqueezeboxError

_ANY = 64  # arguments that a step may need, if a batch gives them


def examine_step(
    name: str, batch: str | None, as_device: bool, *, ranges: bool = False
) -> StepCheck | RangeCheck:
    """Check the step called ``module:callable``: what it does needlessly, or how far it reaches.

    Raises:
        OptionError: a name says nothing that can be called like this.
        SqueezeboxError: the step or its batch raised something.
    """
    with progress("checking") as on_progress:
        make = None if batch is None else load_factory(batch)
        step = load_factory(name, arguments=0 if batch is None else _ANY)
        check = functools.partial(
            squeezebox.check_step, step, batch=make, as_device=as_device, on_progress=on_progress
        )
        prove = functools.partial(squeezebox.check_ranges, step, batch=make)
        found: StepCheck | RangeCheck = call_factory(name, prove if ranges else check)
        return found


def examine_environment(packages: str | None) -> EnvironmentCheck:
    """Check packages joined by commas, or those for models that are installed.

    Raises:
        OptionError: no package is named, or one that is not installed.
    """
    names = None if packages is None else [name.strip() for name in packages.split(",") if name.strip()]
    if names == []:
        raise OptionError(
            f"--packages {packages!r} names no package; write --packages timm,transformers, or leave it out."
        )
    with progress("checking") as on_progress:
        return squeezebox.check_environment(names, on_progress=on_progress)


def show(step: StepCheck | RangeCheck | None, environment: EnvironmentCheck | None, as_json: bool) -> None:
    """Print what was found, both under their names where there are both.

    Raises:
        SqueezeboxError: after printing, where something is wrong with the environment.
    """
    found = {"step": step, "environment": environment}
    parts = {name: each for name, each in found.items() if each is not None}
    if as_json:
        values = {name: each.to_dict() for name, each in parts.items()}
        print(json.dumps(values if len(values) > 1 else next(iter(values.values())), indent=1))
    else:
        print("\n\n".join(map(str, parts.values())))
    if environment is not None and not environment.healthy:
        faults = environment.figures.faults
        names = ", ".join(dict.fromkeys(each.package for each in faults))
        raise SqueezeboxError(
            f"{len(faults)} thing{'s' if len(faults) > 1 else ''} wrong with {names}, named above. Where you "
            "did not change it yourself, install the package again: pip install --force-reinstall --no-deps."
        )
