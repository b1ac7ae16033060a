"""Tiny trainings on real images, for audits."""

import functools
import os
import signal

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from squeezebox.cli import _data

STEPS = 60
HELD_OUT = 400


@functools.lru_cache
def images():
    """800 pictures of clothes at 7x7, and their classes."""
    data = _data.fashion_mnist(subset=True)
    grey = torch.from_numpy(data.train_images[:800]).float()[:, None] / 255
    return functional.avg_pool2d(grey, 4), torch.from_numpy(data.train_labels[:800]).long()


def train(run, outside=None, steps=STEPS):
    """``outside`` makes what is added to each batch, for controls that must break."""
    x, y = images()
    with run.initialising():
        layers = [nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2)]
        model = nn.Sequential(*layers, nn.Linear(6 * 49, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    labels = noisy(y) if run.arm == "noisy labels" else y
    order = torch.randperm(len(x) - HELD_OUT, generator=run.order)
    with run.attach(model, optimizer):
        for step in range(steps):
            chosen = order.roll(-25 * step)[:25]
            inputs = x[chosen] if outside is None else x[chosen] + outside((25, 1, 7, 7))
            optimizer.zero_grad()
            with run.step():
                loss = functional.cross_entropy(model(inputs), labels[chosen])
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        outputs = model.eval()(x[-HELD_OUT:])
    groups = ["shoe" if label in (5, 7, 9) else "other" for label in y[-HELD_OUT:].tolist()]
    return run.finish(model, outputs, y[-HELD_OUT:], groups=groups)


brief = functools.partial(train, steps=15)


def noisy(labels):
    """Two thirds of them replaced, the same ones always."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(10, labels.shape, generator=generator)
    return torch.where(torch.rand(labels.shape, generator=generator) < 0.67, drawn, labels)


def train_with_fresh_generator(run):
    """Random numbers that no seed of the audit reaches."""
    generator = torch.Generator()
    generator.seed()
    return train(run, lambda shape: torch.empty(shape).normal_(generator=generator))


def train_with_numpy(run):
    """The same from outside torch."""
    generator = np.random.default_rng()
    return train(run, lambda shape: torch.from_numpy(generator.normal(size=shape).astype(np.float32)))


def quick(run, rate=0.1, held_out=lambda run: slice(-HELD_OUT, None), known=True, score=None):
    """Three steps of a linear model. ``known``: whether the audit sees the optimizer."""
    x, y = images()
    with run.initialising():
        model = nn.Sequential(nn.Flatten(), nn.Linear(49, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with run.attach(model, optimizer if known else None):
        for chosen in torch.randperm(300, generator=run.order).split(100):
            functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
    chosen = held_out(run)
    with torch.no_grad():
        return run.finish(model, model(x[chosen]), y[chosen], score=score)


def drawn(run):
    """Samples held out that depend on the seed."""
    return torch.randperm(800)[:100]


def as_many_as_the_seed(run):
    """The same first samples, more of them or fewer."""
    return slice(100 + run.seed("order") % 100)


def quick_or_killed(run):
    """A process that the system ends, in every arm but the first."""
    if run.arm != "plain":
        os.kill(os.getpid(), signal.SIGKILL)
    return quick(run)
