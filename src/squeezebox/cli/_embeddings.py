"""``squeezebox embeddings``: processes that try placements of embedding tables."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from squeezebox.cli._estimate import call_factory, load_factory
from squeezebox.cli._processes import Place, on_ranks
from squeezebox.cli._show import progress
from squeezebox.gradients import joined
from squeezebox.layers import plan_embeddings
from squeezebox.reports import parse_size, require_writable
from squeezebox.schema import EmbeddingPlan, OptionError

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda tables: torch.optim.SGD(tables, lr=0.01),
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.SparseAdam,
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line names."""

    sample: str
    memory: str
    optimizer: str
    mode: str


def run(request: Request, ranks: int, out: Path) -> EmbeddingPlan | None:
    """Plan on processes of this machine, or as the rank that torchrun has started.

    Returns:
        The plan, also written to ``out``; None on all ranks of torchrun but the first.

    Raises:
        OptionError: an argument is out of range or names nothing, or the sample is none.
        BudgetError: the memory is too little for the tables.
        OutputError: ``out`` cannot be written; found before anything is run.
        RankError: a rank was lost.
        SqueezeboxError: the sample's function raised something.
    """
    if ranks < 1:
        raise OptionError(f"--ranks {ranks}: give 1 or more.")
    if request.optimizer not in _OPTIMIZERS:
        raise OptionError(f"no optimizer '{request.optimizer}'; there are {', '.join(_OPTIMIZERS)}.")
    parse_size("--memory", request.memory)
    require_writable(out)
    _loaded(request)  # what is wrong with it is said before processes start
    with progress("trying placements"):
        lost = "each rank takes --memory and what a step's rows need. Give less, or more memory."
        found = on_ranks(_rank, ranks, request, lost=lost)
    if found is not None:
        found.save(out)
    return found


def _rank(place: Place | None, request: Request) -> EmbeddingPlan | None:
    with contextlib.redirect_stdout(sys.stderr), joined(place) as rank:
        tables, batches = _loaded(request)
        ranks = int(os.environ["WORLD_SIZE"]) if place is None else place[1]
        found = plan_embeddings(
            tables,
            batches[rank : len(batches) - len(batches) % ranks : ranks],
            request.memory,
            optimizer=_OPTIMIZERS[request.optimizer],
            mode=request.mode,
        )
    return found if rank == 0 else None


def _loaded(request: Request) -> tuple[Any, Any]:
    with contextlib.redirect_stdout(sys.stderr):
        found = call_factory(request.sample, load_factory(request.sample))
    if not isinstance(found, tuple) or len(found) != 2:
        raise OptionError(
            f"{request.sample} gave a {type(found).__name__}; return (tables, batches): (rows, dim) of each "
            "table, and (indices, offsets) of each step."
        )
    return found[0], list(found[1])
