"""``squeezebox gradients measure``: processes that train with several exchanges of gradients in turns."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass

import torch

from squeezebox import compile_kernels
from squeezebox.cli._plan import Step
from squeezebox.cli._processes import Place, on_ranks
from squeezebox.cli._show import progress
from squeezebox.cli._values import link_of
from squeezebox.gradients import ExchangedStep, joined, measure_exchange
from squeezebox.profiling import optimizer_named
from squeezebox.reports import MeasuredExchange, require_writable
from squeezebox.schema import OptionError
from squeezebox.steps import TrainingStep, check_loss, check_sample, explained


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line names."""

    step: Step
    noise: float
    ratio: float
    bandwidth: str | None
    latency: float
    rounds: int


def run(request: Request, ranks: int, out: str | None) -> MeasuredExchange | None:
    """Measure on processes of this machine, or as the rank that torchrun has started.

    Returns:
        The figures, also written to ``out``; None on all ranks of torchrun but the first.

    Raises:
        OptionError: an argument is out of range or names nothing.
        OutputError: ``out`` cannot be written; found before anything is run.
        RankError: a rank was lost.
    """
    _check(request, ranks)
    if out is not None:
        require_writable(out)
    _loaded(request.step)  # what is wrong with it is said before processes start
    with progress("training with each exchange"):
        compile_kernels()
        lost = "it trains a dozen copies of the model. Take a smaller model, or more memory."
        found = on_ranks(_rank, ranks, request, lost=lost)
    if found is not None and out is not None:
        found.save(out)
    return found


def _check(request: Request, ranks: int) -> None:
    if ranks < 2:
        raise OptionError(f"--ranks {ranks}: gradients go between ranks; give 2 or more.")
    if request.rounds < 1:
        raise OptionError(f"--rounds {request.rounds}: give 1 or more measured steps.")
    if not 0.0 < request.noise < 1.0:
        raise OptionError(f"--noise {request.noise:g}: give a share of the squared gradient between 0 and 1.")
    if not request.ratio > 1.0:
        raise OptionError(f"--ratio {request.ratio:g}: give how many times fewer bytes go, above 1.")
    link_of(request.bandwidth, request.latency)


def _rank(place: Place | None, request: Request) -> MeasuredExchange | None:
    with contextlib.redirect_stdout(sys.stderr), joined(place) as rank:
        torch.manual_seed(rank)
        found = measure_exchange(
            _loaded(request.step),
            noise=request.noise,
            ratio=request.ratio,
            rounds=request.rounds,
            link=link_of(request.bandwidth, request.latency),
        )
    return found if rank == 0 else None


def _loaded(step: Step) -> ExchangedStep:
    """A rank's own step, whose forward has run once."""
    loaded = step.load()
    sample, loss_fn = check_sample(loaded["sample"], loaded["loss_fn"])
    own = TrainingStep(model=loaded["model"], sample=sample, loss_fn=loss_fn)
    with contextlib.redirect_stdout(sys.stderr), explained(*sample):
        check_loss(own.loss(own.model))
    return ExchangedStep(
        model=own.model,
        inputs=sample[0],
        target=sample[1],
        loss_fn=loss_fn,
        optimizer=optimizer_named(step.optimizer),
    )
