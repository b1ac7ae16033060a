"""How fast a device is, in a number to compare devices by."""

from __future__ import annotations

import statistics

import torch
from torch import nn

from squeezebox.profiling._ledgers import now

_WIDTH = 512
_LONG = 0.02  # seconds of a step from which on a device is busy
_MOST = 2**15  # samples
_REPEATS = 7


def measure_speed(device: torch.device) -> float:
    """Samples a second with which a small network is trained there, in batches that keep the device busy.

    A linear layer, GELU, another one and a LayerNorm, in float32, with the threads that torch has.
    """
    generator = torch.random.get_rng_state()
    network = nn.Sequential(
        nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH), nn.LayerNorm(_WIDTH)
    ).to(device)
    torch.random.set_rng_state(generator)
    samples = 4
    while (seconds := _step(network, samples, device)) < _LONG and samples < _MOST:
        samples *= 2
    seconds = statistics.median(_step(network, samples, device) for _ in range(_REPEATS))
    return samples / seconds


def _step(network: nn.Module, samples: int, device: torch.device) -> float:
    inputs = torch.ones(samples, _WIDTH, device=device, requires_grad=True)
    with torch.enable_grad():
        begun = now(device)
        network(inputs).mean().backward()
        return now(device) - begun
