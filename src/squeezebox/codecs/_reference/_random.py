"""Random numbers by counting: element i of seed s is the same on every backend."""

from __future__ import annotations

import torch
from torch import Tensor

LOW = 0xFFFFFFFF


def uniform(numel: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """``numel`` numbers in [0, 1) with 24 random bits each (the lowbias32 hash of the index)."""
    index = torch.arange(numel, device=device)
    hashed = ((index & LOW) * 0x9E3779B1 + (seed & LOW) + (index >> 32) * 0x632BE5AB) & LOW
    hashed = hashed ^ (hashed >> 16)
    hashed = (hashed * 0x7FEB352D) & LOW
    hashed = hashed ^ (hashed >> 15)
    hashed = (hashed * 0x846CA68B) & LOW
    hashed = hashed ^ (hashed >> 16)
    return (hashed >> 8).to(dtype) * 2.0**-24
