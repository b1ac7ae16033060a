"""What the benchmarks train: a network, one batch of real data, a loss and an optimizer.

Goes in: the name of a network and sizes. Comes out: a task whose steps can be taken, timed and weighed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import models, photos, text, training
from squeezebox.profiling import PeakMeter

Batches = Callable[[int, int, int], Iterator[tuple[Tensor, Tensor]]]
Optimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
# small rates: what was planned on the first step stays fit while it is measured
_SGD: Optimizer = partial(torch.optim.SGD, lr=1e-4, momentum=0.9)
_ADAMW: Optimizer = partial(torch.optim.AdamW, lr=1e-6)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """How a network is trained briefly, and on what it is measured.

    ``size`` is the side of the images or the length of the passages; ``sized`` the argument of the network
    that must know it. The short training has sizes of its own, where the network allows others.
    """

    batch: int
    size: int
    train_batch: int = 16
    train_size: int = 112
    train_steps: int = 40
    batches: Batches = photos.batches
    num_classes: Callable[[], int] = photos.num_classes
    sizes: Mapping[str, int] = field(default_factory=dict)
    sized: str = ""
    layout: torch.memory_format = torch.contiguous_format
    optimizer: Optimizer = _SGD

    def smaller(self, batch: int, size: int, train_steps: int) -> Setup:
        """The same of other sizes, in the short training as well."""
        sizes = {"train_batch": batch, "train_size": size, "train_steps": train_steps}
        return replace(self, batch=batch, size=size, **sizes)


# A plain step takes about half a second to two on two cores.
SETUPS: Mapping[str, Setup] = MappingProxyType(
    {
        "resnet18": Setup(batch=16, size=112),
        # in the default layout oneDNN copies the maps of strided convolutions, and VGG's largest ones, into a
        # blocked layout of its own
        "resnet50": Setup(batch=8, size=160, train_size=64, layout=torch.channels_last),
        "vgg16": Setup(batch=4, size=112, train_size=64, layout=torch.channels_last),
        "efficientnet_b0": Setup(batch=16, size=112, train_size=64),
        "unet": Setup(
            batch=4,
            size=128,
            train_size=64,
            batches=photos.coloured,
            num_classes=lambda: photos.NUM_COLOURS,
            sizes={"width": 32, "depth": 3},
        ),
        "vit": Setup(
            batch=8,
            size=160,
            train_size=160,
            train_batch=8,
            sizes={"width": 384, "depth": 6, "heads": 6},
            sized="image",
            optimizer=_ADAMW,
        ),
        "gpt": Setup(
            batch=8,
            size=256,
            train_size=128,
            batches=text.batches,
            num_classes=lambda: text.NUM_CHARACTERS,
            sizes={"width": 256, "depth": 4, "heads": 4},
            sized="context",
            optimizer=_ADAMW,
        ),
    }
)


class Task:
    """A network in training, its optimizer, and one batch; one step is taken at once."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Tensor,
        target: Tensor,
        loss_fn: Callable[[Any, Any], Tensor],
        optimizer: Optimizer,
    ) -> None:
        self.model, self.inputs, self.target, self.loss_fn = model, inputs, target, loss_fn
        self.forward: Callable[[Tensor], Any] = model
        self._make_optimizer = optimizer
        self.optimizer = optimizer(model.parameters())
        self.step()

    def copy(self) -> Task:
        """The same network once more, with an optimizer of its own."""
        return Task(copy.deepcopy(self.model), self.inputs, self.target, self.loss_fn, self._make_optimizer)

    def loss(self) -> Tensor:
        """Forward only."""
        return self.loss_fn(self.forward(self.inputs), self.target)

    def backward(self) -> None:
        """Forward and backward; gradients add up."""
        self.loss().backward()

    def step(self) -> None:
        """zero_grad, forward, loss, backward, and the optimizer's step."""
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def held_bytes(self) -> int:
        """Parameters, buffers, batch and optimizer state."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        state = [value for value in states if isinstance(value, Tensor)]
        held = [*self.model.parameters(), *self.model.buffers(), self.inputs, self.target, *state]
        return sum(tensor.nbytes for tensor in held)

    def fixed_bytes(self) -> int:
        """What no plan can change: all of these, and every gradient."""
        return self.held_bytes() + sum(gradient.nbytes for gradient in self._gradients())

    def peak(self) -> tuple[int, int]:
        """Peak bytes of one step: of everything, and without what is held and the gradients so far."""
        self.optimizer.zero_grad()
        meter = PeakMeter(torch.device("cpu"))
        if not meter.start():
            raise RuntimeError("The peak cannot be measured while another profiler runs; end that one first.")
        self.step()
        peak = meter.stop(self._gradients())
        return self.held_bytes() + peak.total_bytes, peak.activation_bytes

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]


def build(name: str, setup: Setup) -> Task:
    """The network after its short training, and a batch it has not seen."""
    sizes = {**setup.sizes, **({setup.sized: setup.size} if setup.sized else {})}
    model = models.build(name, num_classes=setup.num_classes(), **sizes).train()
    model.to(memory_format=setup.layout)
    crops = setup.batches(setup.train_batch, setup.train_size, 0)
    training.train_briefly(model, crops, setup.train_steps, training.LEARNING_RATES[name])
    inputs, target = next(setup.batches(setup.batch, setup.size, 1))
    if inputs.dim() == 4:
        inputs = inputs.contiguous(memory_format=setup.layout)
    return Task(model, inputs, target, training.classification_loss, setup.optimizer)
