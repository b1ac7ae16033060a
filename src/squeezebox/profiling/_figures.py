"""A device's rates, and how far from them steps of networks are there."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from squeezebox.planner import roofline_seconds
from squeezebox.profiling._ledgers import now
from squeezebox.profiling._simulate import simulate
from squeezebox.schema import Device, Work

_WIDTH, _NUMBERS, _FEW = 1024, 1 << 24, 8
_REPEATS = 7

Make = Callable[[], nn.Module]


def rated(device: Device, where: torch.device) -> Device:
    """The device with its rates, and with what steps of small networks take over what these say.

    It takes some seconds, on a device that does nothing else.

    Args:
        device: as it is described.
        where: what that is here.
    """
    with torch.random.fork_rng(), torch.enable_grad():
        rates = _with_rates(device, where)
        over = sorted(
            _step_seconds(make, sample, where) / roofline_seconds(_work(make, sample), rates)
            for make, sample in _networks()
        )
    return dataclasses.replace(rates, over_roofline=(over[0], statistics.median(over), over[-1]))


def _with_rates(device: Device, where: torch.device) -> Device:
    """Of a large product, of a sum of many numbers, and of operators on few in a step."""
    square, many = torch.ones(_WIDTH, _WIDTH, device=where), torch.ones(_NUMBERS, device=where)
    layers = [layer for _ in range(8) for layer in (nn.Linear(_FEW, _FEW), nn.Tanh())]
    few = lambda: nn.Sequential(*layers), torch.ones(1, _FEW)  # noqa: E731
    calls = sum(each.times for each in _work(*few))
    return dataclasses.replace(
        device,
        flops_per_second=2 * _WIDTH**3 / _seconds(lambda: square @ square, where),
        bytes_per_second=3 * many.nbytes / _seconds(lambda: torch.add(many, many, out=many), where),
        call_seconds=_step_seconds(*few, where) / calls,
    )


def _work(make: Make, sample: torch.Tensor) -> tuple[Work, ...]:
    simulation, _ = simulate(
        make,
        sample=lambda _: (torch.empty_like(sample), None),
        loss_fn=_loss,
        optimizer="sgd-momentum",
        dtype=None,
        watch=lambda *_: contextlib.nullcontext(),
        values=lambda: None,
        load="balanced",
    )
    return simulation.work


def _step_seconds(make: Make, sample: torch.Tensor, where: torch.device) -> float:
    model, inputs = make().to(where), sample.to(where)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        _loss(model(inputs)).backward()
        optimizer.step()

    return _seconds(step, where)


def _seconds(run: Callable[[], object], where: torch.device) -> float:
    run()
    times = []
    for _ in range(_REPEATS):
        begun = now(where)
        run()
        times.append(now(where) - begun)
    return min(times)  # whatever else the device does only adds to it


def _loss(outputs: Any, target: Any = None) -> torch.Tensor:
    first: torch.Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    return first.square().mean()


class _Residual(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input, and what the layers add to it."""
        added: torch.Tensor = self.layers(x)
        return x + added


def _convolved(channels: int, kernel: int = 3, *, groups: int = 1) -> nn.Module:
    convolution = nn.Conv2d(channels, channels, kernel, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels), nn.ReLU())


def _encoder(width: int, heads: int) -> nn.Module:
    return nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)


def _perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 9)
    )


def _normalised() -> nn.Module:
    return nn.Sequential(
        nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 9)
    )


def _plain_convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 32, 3), _convolved(32), _convolved(32), nn.MaxPool2d(2))


def _residual() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3), _Residual(_convolved(64), _convolved(64)), nn.AvgPool2d(4)
    )


def _separable() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 64, 1), _convolved(64, 1), _convolved(64, groups=64), _convolved(64, 1))


def _group_normalised() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 32, 3), nn.GroupNorm(8, 32), nn.SiLU(), nn.Conv2d(32, 32, 3))


def _transposed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 3, 4, 2, 1))


def _patches() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 128, 4, 4), nn.Flatten(2), nn.Linear(64, 64), _encoder(64, 4))


def _language() -> nn.Module:
    return nn.Sequential(nn.Embedding(2000, 128), _encoder(128, 4), nn.Linear(128, 2000))


def _signals() -> nn.Module:
    return nn.Sequential(nn.Conv1d(8, 64, 9), nn.BatchNorm1d(64), nn.ReLU(), nn.Conv1d(64, 64, 9))


def _networks() -> list[tuple[Make, torch.Tensor]]:
    """Small ones of the kinds that people train, and what goes in."""
    pictures = torch.randn(16, 3, 32, 32)
    return [
        (_perceptron, torch.randn(64, 256)),
        (_normalised, torch.randn(256, 512)),
        (_plain_convolutions, pictures),
        (_residual, pictures),
        (_separable, pictures),
        (_group_normalised, pictures),
        (_transposed, pictures),
        (_patches, pictures),
        (lambda: nn.Sequential(_encoder(128, 4), _encoder(128, 4)), torch.randn(8, 64, 128)),
        (lambda: _encoder(256, 8), torch.randn(4, 256, 256)),
        (_language, torch.randint(2000, (8, 64))),
        (lambda: nn.LSTM(128, 128, batch_first=True), torch.randn(16, 32, 128)),
        (_signals, torch.randn(16, 8, 256)),
    ]
