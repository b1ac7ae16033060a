"""What a plain step would hold, on fake tensors."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch

from squeezebox.capture import Observer
from squeezebox.profiling import simulate
from squeezebox.reports import Estimate
from squeezebox.schema import OptionError


def estimate(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    *,
    input_shape: Sequence[int] = (3, 224, 224),
    batch: int = 32,
    optimizer: str = "sgd-momentum",
    dtype: torch.dtype | str | None = None,
    input_dtype: torch.dtype | str | None = None,
) -> Estimate:
    """Say what a plain training step would hold, without training and without using the memory.

    Forward, the sum of all outputs as the loss, and backward run on fake tensors; the optimizer's share
    is added. Nothing is computed, so models whose control flow reads values cannot be estimated.

    Args:
        model: a module (left alone), or a function or class that makes one.
        input_shape: one sample's shape, without the batch.
        batch: samples a step.
        optimizer: "sgd", "sgd-momentum", "adam" or "adamw".
        dtype: of the model and a floating-point input, such as "bfloat16" (default: as the model is).
        input_dtype: of the input, such as "int64" for tokens (default: ``dtype``).

    Raises:
        OptionError: an argument is out of range, or the model does not take such an input.
    """
    observers: list[Observer] = []

    @contextlib.contextmanager
    def watch(fake: torch.nn.Module, inputs: torch.Tensor) -> Iterator[None]:
        observers.append(Observer(fake, [inputs]))
        with observers[-1]:
            yield

    figures = simulate(
        model,
        input_shape=input_shape,
        batch=batch,
        optimizer=optimizer,
        dtype=_dtype_named(dtype),
        input_dtype=_dtype_named(input_dtype),
        watch=watch,
    )
    saved = observers[-1].saved_bytes()
    return Estimate(
        input_shape=tuple(input_shape),
        batch=batch,
        optimizer=optimizer,
        saved_bytes=sum(saved.values()),
        saved=saved,
        **dataclasses.asdict(figures),
    )


def _dtype_named(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if not isinstance(dtype, str):
        return dtype
    found = getattr(torch, dtype, None)
    if isinstance(found, torch.dtype):
        return found
    raise OptionError(f"'{dtype}' is no dtype of torch; name one such as float32, bfloat16 or int64.")
