"""A short training that brings a benchmark network past its random start.

Goes in: a network, an iterator of batches, the number of steps, a learning rate.
Comes out: the trained network (in place) and the loss of every step.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Starting points, from single-seed trials with batch 16, most at 112x112 (unet at 32x32, gpt on text bytes).
# alexnet, resnet18, unet, gpt and vit learnt clearly within 60 steps; the others take more: check the losses.
LEARNING_RATES: Mapping[str, float] = MappingProxyType(
    {
        "alexnet": 0.01,
        "vgg16": 0.01,
        "resnet18": 0.02,
        "resnet50": 0.01,
        "efficientnet_b0": 0.02,
        "unet": 0.05,
        "gpt": 0.1,
        "vit": 0.02,
        "vit_b16": 0.01,
    }
)

# Steps of batch 16 at 112x112 before a measurement.
STEPS: Mapping[str, int] = MappingProxyType(
    {"alexnet": 40, "vgg16": 60, "resnet18": 40, "resnet50": 120, "efficientnet_b0": 120}
)


def train_briefly(
    model: nn.Module,
    batches: Iterator[tuple[Tensor, Tensor]],
    steps: int,
    lr: float,
    warmup_steps: int = 10,
) -> list[float]:
    """Train in place by SGD with momentum 0.9, the rate rising linearly at the start.

    Gradients are clipped to norm 5, without which networks lacking normalisation can
    diverge at a rate that lets them learn in so few steps.

    Args:
        model: the network; left in the mode (training or evaluation) it came in.
        batches: yields at least `steps` pairs of inputs and labels.
        steps: optimiser steps to take.
        lr: learning rate after the warm-up; `LEARNING_RATES` has one per network.
        warmup_steps: steps over which the rate rises from lr / warmup_steps to lr.

    Returns:
        The training loss before each step, `steps` numbers.

    Raises:
        FloatingPointError: the loss became infinite or NaN.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses: list[float] = []
    was_training = model.training
    model.train()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / max(1, warmup_steps))
        losses.append(_step(model, optimizer, *next(batches)))
        if not torch.isfinite(torch.tensor(losses[-1])):
            raise FloatingPointError(
                f"The loss is {losses[-1]} at step {step} of {steps}; lower lr from {lr:g}."
            )
    optimizer.zero_grad()
    model.train(was_training)
    return losses


def classification_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy per image, per pixel or per token.

    Args:
        logits: (batch, classes), (batch, classes, height, width) or (batch, length, classes).
        labels: int64 (batch,), in images given to every pixel, or (batch, height, width) or (batch, length).

    Returns:
        A scalar.
    """
    if logits.dim() == 4 and labels.dim() == 1:
        labels = labels.view(-1, 1, 1).expand(-1, *logits.shape[2:])
    elif logits.dim() == 3:
        logits, labels = logits.flatten(0, 1), labels.flatten()
    return F.cross_entropy(logits, labels)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> float:
    optimizer.zero_grad()
    loss = classification_loss(model(inputs), labels)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    return loss.item()
