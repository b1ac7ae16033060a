"""Arguments of ``squeezebox plan`` and ``max-batch``: what a training step is."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import squeezebox
from squeezebox.cli._estimate import call_factory, load_factory, load_loss, parse_shape, require_step
from squeezebox.cli._show import progress
from squeezebox.profiling import optimizer_named
from squeezebox.reports import FoundBatch, MaxBatch, Rewrites, StepPlan, require_writable
from squeezebox.schema import OptionError
from squeezebox.steps import random_inputs, stand_in


@dataclass(frozen=True)
class Step:
    """A training step as the command line names it."""

    factory: str
    input: str | None
    batch: int | None
    sample: str | None
    loss: str | None
    optimizer: str
    usual_batch: int = 32
    input_dtype: str | None = None

    def load(self) -> dict[str, Any]:
        """Model, sample, loss and optimizer by their names in squeezebox.plan()."""
        make_sample, make_optimizer = self.maker(), optimizer_named(self.optimizer)
        model = load_model(self.factory)
        return {
            "model": model,
            "sample": make_sample(model),
            "loss_fn": stand_in if self.loss is None else load_loss(self.loss),
            "optimizer": make_optimizer(model.parameters()),
        }

    def maker(self) -> Callable[[torch.nn.Module], Any]:
        """What makes the sample, for a model.

        Raises:
            OptionError: shape or batch is out of range, or there is a sample too.
        """
        require_step(self.input, self.batch)
        if self.sample is not None:
            if (self.input, self.batch, self.input_dtype) != (None, None, None):
                raise OptionError("--sample says --input and --batch already; give it without these.")
            return lambda model: load_sample(str(self.sample))
        batch = self.usual_batch if self.batch is None else self.batch
        shape = (batch, *parse_shape("3x224x224" if self.input is None else self.input))
        return lambda model: (random_inputs(model, shape, self.input_dtype), None)


def load_model(factory: str) -> torch.nn.Module:
    """What ``module:callable`` returns, in training mode.

    Raises:
        OptionError: there is none, or it is no module.
    """
    model = call_factory(factory, load_factory(factory))
    if not isinstance(model, torch.nn.Module):
        raise OptionError(
            f"'{factory}' returned a {type(model).__name__}, not a torch.nn.Module; name a function or class "
            "that returns the model."
        )
    return model.train()


def load_sample(name: str) -> Any:
    """What ``module:callable`` returns.

    Raises:
        SqueezeboxError: there is none, or it fails.
    """
    return call_factory(name, load_factory(name))


def make(step: Step, *, cache: bool, out: str | None, **options: Any) -> StepPlan:
    """The plan, written to ``out`` if there is one; options are those of squeezebox.plan().

    Raises:
        OptionError: an argument is out of range or names nothing.
        BudgetError: no plan fits.
        OutputError: ``out`` cannot be written; found before anything is run.
    """
    if out is not None:
        require_writable(out)
    with progress("running the sample") as on_progress:
        loaded = step.load()
        plan = squeezebox.plan(
            **loaded, **options, cache=cache_folder() if cache else None, on_progress=on_progress
        )
    if out is not None:
        plan.save(out)
    return plan


def found_rewrites(step: Step, *, without: tuple[str, ...], out: str) -> Rewrites:
    """What squeezebox.rewrite() finds, written to ``out``.

    Raises:
        OptionError: an argument is out of range or names nothing.
        OutputError: ``out`` cannot be written; found before anything is run.
    """
    require_writable(out)
    with progress("estimating and checking rewrites"):
        found = squeezebox.rewrite(**step.load(), without=without).rewrites
    found.save(out)
    return found


def largest_batch(step: Step, **options: Any) -> MaxBatch:
    """The largest batch within the budget; options are those of squeezebox.max_batch().

    Raises:
        OptionError: an argument is out of range or names nothing.
        BudgetError: not even a batch of 1 fits.
    """
    with progress("running the sample") as on_progress:
        loaded = step.load()
        return squeezebox.max_batch(**loaded, **options, on_progress=on_progress)


def found_batch(step: Step, *, out: str | None, **options: Any) -> FoundBatch:
    """The largest batch that trains in the memory, its plan written to ``out``; see squeezebox.find_batch().

    Raises:
        OptionError: an argument is out of range or names nothing.
        BudgetError: not even a batch of 1 fits.
        OutputError: ``out`` cannot be written; found before anything is run.
    """
    if out is not None:
        require_writable(out)
    with progress("running the sample") as on_progress:
        loaded = step.load()
        found = squeezebox.find_batch(**loaded, **options, on_progress=on_progress)
    if out is not None:
        found.plan.save(out)
    return found


def cache_folder() -> Path | None:
    """Where this user's profiles are kept; None where no such folder can be written."""
    home, system = Path.home(), platform.system()
    usual = {"Darwin": home / "Library" / "Caches", "Windows": home / "AppData" / "Local"}
    named = os.environ.get("XDG_CACHE_HOME", "") or usual.get(system, home / ".cache")
    folder = Path(named) / "squeezebox" / "profiles"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None
