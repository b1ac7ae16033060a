"""Arguments of ``squeezebox plan`` and ``max-batch``: what a training step is."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.utils._pytree import tree_leaves

import squeezebox
from squeezebox.cli._estimate import call_factory, load_factory, load_loss, parse_shape, require_step
from squeezebox.cli._show import progress
from squeezebox.profiling import optimizer_named
from squeezebox.reports import FoundBatch, MaxBatch, Rewrites, StepPlan, require_writable
from squeezebox.schema import OptionError


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
        make_sample, make_optimizer = self._maker(), optimizer_named(self.optimizer)
        model = load_model(self.factory)
        return {
            "model": model,
            "sample": make_sample(model),
            "loss_fn": stand_in if self.loss is None else load_loss(self.loss),
            "optimizer": make_optimizer(model.parameters()),
        }

    def _maker(self) -> Callable[[torch.nn.Module], Any]:
        """What makes the sample, for a model."""
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


def random_inputs(model: torch.nn.Module, shape: tuple[int, ...], dtype: str | None) -> torch.Tensor:
    """Random inputs: tokens for a model that embeds them, where asked for or for a shape like 128.

    Raises:
        OptionError: torch has no such dtype, or none that it can fill.
    """
    wanted = getattr(torch, dtype or "float32", None)
    if not isinstance(wanted, torch.dtype):
        raise OptionError(f"--input-dtype {dtype}: torch has no such dtype; write int64, say.")
    embeddings = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    if embeddings and (len(shape) == 2 if dtype is None else not wanted.is_floating_point):
        tokens = torch.randint(0, embeddings[0].num_embeddings, shape)
        return tokens if dtype is None else tokens.to(wanted)
    try:
        return torch.randn(shape).to(wanted) if wanted.is_floating_point else torch.zeros(shape, dtype=wanted)
    except (NotImplementedError, RuntimeError) as error:
        raise OptionError(f"--input-dtype {dtype}: torch cannot fill such a tensor: {error}") from error


def make(step: Step, *, cache: bool, out: str, **options: Any) -> StepPlan:
    """The plan, written to ``out``; options are those of squeezebox.plan().

    Raises:
        OptionError: an argument is out of range or names nothing.
        BudgetError: no plan fits.
        OutputError: ``out`` cannot be written; found before anything is run.
    """
    require_writable(out)
    with progress("running the sample") as on_progress:
        loaded = step.load()
        plan = squeezebox.plan(
            **loaded, **options, cache=cache_folder() if cache else None, on_progress=on_progress
        )
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


def stand_in(output: Any, target: Any = None) -> torch.Tensor:
    """The sum of what stands in for a loss of every output that a gradient can flow from."""
    leaves = tree_leaves(list(output.values()) if isinstance(output, dict) else output)
    losses = [_loss_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not losses:
        raise OptionError(
            f"the model's output ({type(output).__name__}) has no tensor that requires gradients; name its "
            "loss with --loss module:callable, or unfreeze a parameter."
        )
    return torch.stack(losses).sum() if len(losses) > 1 else losses[0]


def _loss_of(output: torch.Tensor) -> torch.Tensor:
    """Cross-entropy against arbitrary classes where the output has classes last, else the mean square."""
    if output.dim() in (2, 3) and output.shape[-1] > 1:
        rows = output.flatten(0, -2)
        return functional.cross_entropy(rows, torch.arange(len(rows), device=rows.device) % rows.shape[-1])
    return output.square().mean()
