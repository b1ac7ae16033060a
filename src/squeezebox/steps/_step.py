"""One training step as its user runs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from squeezebox.memory import DiskFolder
from squeezebox.steps._models import random_states, restored, ungraded
from squeezebox.steps._samples import LossFunction, batch_of, resize

Progress = Callable[[int, int, str], None]  # units done, of how many, and what the last one was


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingStep:
    """A model, a sample of (inputs, target), their loss, and the optimizer, if it is known.

    ``noise`` is what may be lost in it (0: nothing); ``folder`` where tensors may be moved to, instead of the
    usual one; ``on_progress`` is called while it is measured. ``moves_weights``: a plan for it
    may move frozen ones to the folder, or pack them. ``splits_weights``: it holds those in 16 bits that are
    only read through a cast.
    """

    model: torch.nn.Module
    sample: tuple[Any, Any]
    loss_fn: LossFunction
    optimizer: torch.optim.Optimizer | None = None
    noise: float = 0.0
    folder: DiskFolder | None = None
    on_progress: Progress | None = None
    moves_weights: bool = False
    splits_weights: bool = False

    @property
    def batch(self) -> int:
        """First size of the first of its inputs that has one; 0 if none has."""
        return batch_of(self.sample)

    @property
    def inputs(self) -> tuple[Any, ...]:
        """What the model is called with."""
        inputs = self.sample[0]
        return inputs if isinstance(inputs, tuple) else (inputs,)

    def of_size(self, size: int) -> TrainingStep:
        """The same with another batch, of which rows are cut off or repeated."""
        return dataclasses.replace(self, sample=resize(self.sample, self.batch, size))

    def loss_of(self, *outputs: Any) -> torch.Tensor:
        """Of what the model returned."""
        return self.loss_fn(outputs[0] if len(outputs) == 1 else outputs, self.sample[1])

    def loss(self, call: Callable[..., Any]) -> torch.Tensor:
        """``call`` is the model, or takes its place."""
        return self.loss_of(call(*self.inputs))

    def gradients(self, call: Callable[..., Any]) -> list[torch.Tensor]:
        """Of the model's parameters; nothing of it stays."""
        with restored(self.model):
            self.model.zero_grad(set_to_none=True)
            loss = self.loss(call)
            with ungraded(loss, self.model):
                loss.backward()
            return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def is_random(self) -> bool:
        """Whether forward draws random numbers."""
        before = random_states(self.model)
        with restored(self.model):
            self.loss(self.model)
            return not all(map(torch.equal, before, random_states(self.model)))
