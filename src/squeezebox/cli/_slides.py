"""``squeezebox stream train``: a step on every image, in strips."""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from squeezebox.cli._estimate import call_factory, load_factory, load_loss
from squeezebox.cli._plan import load_model
from squeezebox.cli._show import Show, progress
from squeezebox.cli._train import optimizer_of
from squeezebox.reports import parse_size, require_writable, write_whole
from squeezebox.schema import OptionError
from squeezebox.streaming import Progress, StreamedStep

_END = object()  # of the data


@dataclass(frozen=True)
class Request:
    """What the command line names."""

    factory: str
    data: str
    memory: str
    loss: str | None
    optimizer: str
    rate: float | None
    epochs: int
    spool: bool
    recompute: bool
    out: Path
    as_json: bool = False


def run(request: Request) -> None:
    """Train, printing each image's loss and writing the weights after every epoch.

    Raises:
        OptionError: an argument is out of range or names nothing, or the data are no pairs.
        BudgetError: the memory is too little for a strip.
        OutputError: ``out`` cannot be written; found before anything is run.
        SqueezeboxError: the model's or the data's function raised something.
    """
    parse_size("--memory", request.memory)
    if request.epochs < 1:
        raise OptionError(f"--epochs {request.epochs}: give 1 or more.")
    require_writable(request.out)
    with contextlib.redirect_stdout(sys.stderr if request.as_json else sys.stdout):
        losses = _train(request)
        print(f"The weights are in {request.out}.")
    if request.as_json:
        told = [[loss if math.isfinite(loss) else None for loss in epoch] for epoch in losses]
        print(json.dumps({"losses": told, "weights": str(request.out)}, indent=1))


def _train(request: Request) -> list[list[float]]:
    """Losses by epoch and image."""
    model, data = load_model(request.factory).train(), load_factory(request.data)
    optimizer, watched = optimizer_of(request.optimizer, model, request.rate), _Watched()
    step = StreamedStep(
        model,
        nn.functional.cross_entropy if request.loss is None else load_loss(request.loss),
        memory=request.memory,
        spool=request.spool or None,
        recompute=request.recompute,
        progress=watched,
    )
    losses: list[list[float]] = []
    for epoch in range(request.epochs):
        losses.append([])
        for number, pair in enumerate(_pairs(request.data, data)):
            title = f"epoch {epoch}, image {number}"
            with progress(title) as watched.show:
                losses[-1].append(float(step(*_image_and_target(pair, request.data))))
            optimizer.step()
            optimizer.zero_grad()
            print(f"{title}: loss {losses[-1][-1]:.6g}", flush=True)
        if not losses[-1]:
            raise OptionError(f"--data {request.data} gives no image in epoch {epoch}; each calls it.")
        weights = io.BytesIO()
        torch.save(model.state_dict(), weights)
        write_whole(request.out, weights.getvalue())
    return losses


def _pairs(name: str, data: Callable[[], Any]) -> Iterator[Any]:
    """What the user's own function gives, one by one."""
    pairs = call_factory(name, lambda: iter(data()))
    while (pair := call_factory(name, lambda: next(pairs, _END))) is not _END:
        yield pair


class _Watched:
    """Hands a step's progress on to whatever shows it now."""

    show: Show

    def __call__(self, now: Progress) -> None:
        """After a strip."""
        self.show(now.done, now.total, f"{now.seconds_left:.0f} s left")


def _image_and_target(pair: Any, name: str) -> tuple[Any, Any]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise OptionError(f"--data {name} gives a {type(pair).__name__}; give pairs of image and target.")
    image, target = pair
    return image, target
