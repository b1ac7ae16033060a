"""Networks of benchmarks/tasks.py on random inputs: what their steps hold does not depend on values.

Goes in: the name of a network, batch and layout. Comes out: model, sample and loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import models, training
from benchmarks.tasks import SETUPS

LAYOUTS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What a training step needs but an optimizer."""

    model: nn.Module
    sample: tuple[Tensor, Tensor]

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """Cross-entropy."""
        return training.classification_loss(output, target)


def step_of(name: str, *, batch: int = 0, layout: torch.memory_format | None = None) -> Step:
    """The network of that name as it is measured; 0 samples and no layout are those of its setup."""
    setup = SETUPS[name]
    sizes = {**setup.sizes, **({setup.sized: setup.size} if setup.sized else {})}
    chosen = setup.layout if layout is None else layout
    model = models.build(name, num_classes=setup.num_classes(), **sizes).train().to(memory_format=chosen)
    inputs, target = next(setup.batches(2, setup.size, 1))
    rows = torch.arange(batch or setup.batch) % 2
    inputs, target = inputs[rows], target.unflatten(0, (2, -1))[rows].flatten(0, 1)
    return Step(
        model=model, sample=(inputs.contiguous(memory_format=chosen) if inputs.dim() == 4 else inputs, target)
    )
