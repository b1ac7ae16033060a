"""What the parts of a model cost that are called one after the other: bytes and seconds of each."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from squeezebox.profiling._ledgers import Marks, measure_marks

Part = Callable[..., tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartCosts:
    """One part's costs in a forward and backward of all of them.

    ``saved_bytes`` is by how much more is there after its forward than before; ``working_bytes`` come on top
    of what is there after its forward, while its forward or its backward runs. ``output_bytes`` is what it
    hands on.
    """

    saved_bytes: int
    working_bytes: int
    output_bytes: int
    forward_seconds: float
    backward_seconds: float


def measure_parts(
    parts: Sequence[Part],
    inputs: tuple[Any, ...],
    loss_of: Callable[[tuple[Any, ...]], Tensor],
    parameters: Sequence[torch.nn.Parameter],
    *,
    device: torch.device,
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    repeats: int = 5,
) -> list[PartCosts]:
    """Run parts after one another and back, once for bytes and some more times for seconds.

    The loss belongs to the last part. Gradients are added up in place, as in a batch of several microbatches;
    afterwards parameters have the gradients that they had.

    Args:
        parts: each takes what the one before returns.
        inputs: of the first one.
        loss_of: what the last one returns -> a scalar.
        parameters: all of them that have gradients.
        device: where all this is.
        around: a context for every forward, the loss included.
        repeats: timed runs, of which the median counts.

    Raises:
        CaptureError: another profiler is running.
    """
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        run = _Run(parts, loss_of, around)
        marks = measure_marks(functools.partial(run.through, inputs), 2 * len(parts) + 1, device, repeats)
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
    return [_costs(number, marks, run.output_bytes) for number in range(len(parts))]


def _costs(number: int, marks: Marks, output_bytes: Sequence[int]) -> PartCosts:
    """Mark ``number`` is its forward's start, ``2 * count - number`` its backward's."""
    count = len(output_bytes)
    held = marks.live[number + 1]
    back = 2 * count - number
    highest = max(marks.highest[number], marks.highest[back])
    return PartCosts(
        saved_bytes=held - marks.live[number],
        working_bytes=max(highest - held, 0),
        output_bytes=output_bytes[number],
        forward_seconds=marks.seconds[number],
        backward_seconds=marks.seconds[back],
    )


class _Run:
    """Forward and backward with a mark where each part begins; mark ``len(parts)`` is the loss's end."""

    def __init__(
        self,
        parts: Sequence[Part],
        loss_of: Callable[[tuple[Any, ...]], Tensor],
        around: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.parts, self._loss_of, self._around = parts, loss_of, around
        self.output_bytes: list[int] = []

    def through(self, inputs: tuple[Any, ...], mark: Callable[[int], None]) -> None:
        """Call ``mark`` with 0 to 2 * parts + 1, in this order but for parts without a backward."""
        count, handles = len(self.parts), list[RemovableHandle]()
        with self._around():
            loss = self._forward(inputs, mark, handles)
        mark(count)
        mark(count + 1)  # the last part's backward begins with the loss's
        loss.backward()
        mark(2 * count + 1)
        for handle in handles:
            handle.remove()

    def _forward(
        self, inputs: tuple[Any, ...], mark: Callable[[int], None], handles: list[RemovableHandle]
    ) -> Tensor:
        count, values = len(self.parts), inputs
        self.output_bytes = []
        for number, part in enumerate(self.parts):
            mark(number)
            before, values = values, part(*values)
            tensors = [value for value in values if isinstance(value, Tensor)]
            self.output_bytes.append(sum(tensor.nbytes for tensor in tensors))
            made = [tensor for tensor in tensors if not any(tensor is each for each in before)]
            handles += self._hooks(made, 2 * count - number, mark) if number + 1 < count else []
            del before, tensors, made
        return self._loss_of(values)

    def _hooks(
        self, made: list[Tensor], number: int, mark: Callable[[int], None]
    ) -> Iterator[RemovableHandle]:
        """Mark when the first of these gradients is there."""
        seen: list[int] = []

        def hook(_: Tensor) -> None:
            if not seen:
                seen.append(number)
                mark(number)

        for tensor in made:
            if tensor.requires_grad:
                yield tensor.register_hook(hook)
