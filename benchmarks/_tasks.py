"""Two trainings on real data whose results are compared: images, and characters of a long text.

Goes in: a seed. Comes out: a network, its batches, and how well it does on what it has not seen.
May touch: /usr/share/datasets (dataset-fashion-mnist), and the program `bible` (bible-kjv), both Debian's.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import models
from squeezebox.cli._data import fashion_mnist

Batch = tuple[Tensor, Tensor]
_CLASSES, _CHARACTERS, _LENGTH = 10, 128, 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is trained, on what, and what is measured at the end, in a unit of which ``scale`` make 1."""

    about: str
    measure: str
    scale: float
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batches: Callable[[int], Iterator[Batch]]
    steps: int
    evaluate: Callable[[nn.Module], float]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of classes or of next characters."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


@functools.cache
def _images() -> tuple[Batch, Batch]:
    """Training and test images, normalised, (n, 3, 28, 28), the three channels alike; labels (n,)."""
    data = fashion_mnist(subset=False)
    train, test = (
        torch.from_numpy(part).unsqueeze(1) / 255.0 for part in (data.train_images, data.test_images)
    )
    mean, deviation = train.mean(), train.std()
    labels = [torch.from_numpy(part).long() for part in (data.train_labels, data.test_labels)]
    shown = [((part - mean) / deviation).expand(-1, 3, -1, -1) for part in (train, test)]
    return (shown[0], labels[0]), (shown[1], labels[1])


def _image_batches(seed: int, batch: int, epochs: int) -> Iterator[Batch]:
    """All epochs' batches; an epoch's incomplete last one is left out."""
    (images, labels), _ = _images()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for chosen in torch.randperm(len(images), generator=generator).split(batch):
            if len(chosen) == batch:
                yield images[chosen], labels[chosen]


@torch.no_grad()
def _accuracy(model: nn.Module) -> float:
    """Share of test images that are named rightly."""
    _, (images, labels) = _images()
    model.eval()
    named = torch.cat([model(part).argmax(1) for part in images.split(1000)])
    return float((named == labels).double().mean())


@functools.cache
def _text() -> tuple[Tensor, Tensor]:
    """ASCII codes of the King James Bible; its last twentieth is for validation."""
    found = subprocess.run(["bible", "gen1:1-rev22:21"], capture_output=True, check=True).stdout
    codes = torch.frombuffer(bytearray(found), dtype=torch.uint8).long() % _CHARACTERS
    return codes[: -len(codes) // 20], codes[-len(codes) // 20 :]


def _passages(text: Tensor, starts: Tensor) -> Batch:
    read = text[starts[:, None] + torch.arange(_LENGTH + 1)]
    return read[:, :-1].contiguous(), read[:, 1:].contiguous()


def _text_batches(seed: int, batch: int, steps: int) -> Iterator[Batch]:
    text, _ = _text()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield _passages(text, torch.randint(len(text) - _LENGTH, (batch,), generator=generator))


@torch.no_grad()
def _validation_loss(model: nn.Module) -> float:
    """Of characters of the whole validation text, in nats."""
    _, text = _text()
    model.eval()
    starts = torch.arange(0, len(text) - _LENGTH, _LENGTH).split(256)
    return float(torch.stack([loss_fn(*_shown(model, _passages(text, part))) for part in starts]).mean())


def _shown(model: nn.Module, batch: Batch) -> Batch:
    return model(batch[0]), batch[1]


TASKS: Mapping[str, Task] = {
    "images": Task(
        about="ResNet-18 with BatchNorm, its stages a quarter as wide (0.7 M parameters), SGD with momentum, "
        "5 epochs of batch 256 on full Fashion-MNIST",
        measure="test accuracy, %",
        scale=100.0,
        model=lambda: models.build("resnet18", num_classes=_CLASSES, widths=(16, 32, 64, 128)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4),
        batches=lambda seed: _image_batches(seed, 256, 5),
        steps=5 * (60_000 // 256),
        evaluate=_accuracy,
    ),
    "text": Task(
        about="character GPT of 3 layers, width 96 (0.35 M parameters), AdamW, 2,000 steps of batch 8 by 64 "
        "on the King James Bible",
        measure="validation loss, nats a character",
        scale=1.0,
        model=lambda: models.build(
            "gpt", num_classes=_CHARACTERS, width=96, depth=3, heads=4, context=_LENGTH
        ),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99)),
        batches=lambda seed: _text_batches(seed, 8, 2000),
        steps=2000,
        evaluate=_validation_loss,
    ),
}
