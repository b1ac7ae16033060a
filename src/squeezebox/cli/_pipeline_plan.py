"""``squeezebox pipeline plan``: a model measured here, and how several ranks would train it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from squeezebox.cli._estimate import load_loss, parse_shape, require_step
from squeezebox.cli._plan import load_model, load_sample, random_inputs, stand_in
from squeezebox.cli._progress import progress
from squeezebox.planning import plan_pipeline
from squeezebox.profiling import optimizer_named
from squeezebox.reports import parse_size, require_writable
from squeezebox.schema import Link, OptionError, PipelinePlan


@dataclass(frozen=True)
class Request:
    """What the command line names."""

    factory: str
    input: str
    input_dtype: str | None
    batch: int
    sample: str | None
    loss: str | None
    optimizer: str
    ranks: int
    memory: str
    microbatches: str | None
    schedules: str
    policies: str
    noise: float
    depth: int | None
    threads: int
    bandwidth: str | None
    latency: float


def make(request: Request, out: Path) -> list[PipelinePlan]:
    """All plans that fit, the fastest first, which is also written to ``out``.

    Raises:
        OptionError: an argument is out of range or names nothing.
        BudgetError: no plan fits.
        OutputError: ``out`` cannot be written; found before anything is run.
    """
    require_step(request.input, request.batch)
    if request.loss is not None and request.sample is None:
        raise OptionError("--loss needs targets: also give --sample module:callable, or leave it out.")
    require_writable(out)
    torch.set_num_threads(max(request.threads, 1))
    with progress("measuring blocks") as on_progress:
        model = load_model(request.factory)
        if request.sample is None:
            shape = (request.batch, *parse_shape(request.input))
            sample = random_inputs(model, shape, request.input_dtype), None
        else:
            sample = load_sample(request.sample)
        plans = plan_pipeline(
            model,
            sample=sample,
            loss_fn=stand_in if request.loss is None else load_loss(request.loss),
            ranks=request.ranks,
            memory_bytes=parse_size("--memory", request.memory),
            optimizer=optimizer_of(request.optimizer, model, None),
            microbatches=None if request.microbatches is None else _integers(request.microbatches),
            schedules=request.schedules.split(","),
            policies=request.policies.split(","),
            noise=request.noise,
            depths=None if request.depth is None else [request.depth],
            link=_link(request),
            on_progress=on_progress,
        )
    plans = [dataclasses.replace(plan, model=request.factory, loss=request.loss or "") for plan in plans]
    plans[0].save(out)
    return plans


def optimizer_of(name: str, model: nn.Module, rate: float | None) -> torch.optim.Optimizer:
    """An optimizer of all of the model's parameters, with its usual learning rate or another.

    Raises:
        OptionError: there is none of that name, or the rate is not above 0.
    """
    optimizer = optimizer_named(name)(model.parameters())
    if rate is not None:
        if not rate > 0.0:
            raise OptionError(f"--lr {rate}: give a learning rate above 0.")
        for group in optimizer.param_groups:
            group["lr"] = rate
    return optimizer


def _integers(text: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError as error:
        raise OptionError(f"--microbatches {text}: write sizes such as 1,2,4.") from error


def _link(request: Request) -> Link | None:
    if request.bandwidth is None:
        return None
    return Link(
        bytes_per_second=parse_size("--bandwidth", request.bandwidth), latency_seconds=request.latency
    )
