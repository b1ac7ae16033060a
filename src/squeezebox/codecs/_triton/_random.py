"""The counting random numbers of ``_reference._random``, inside other kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def uniform(index, seed):
    """A number in [0, 1) for each int64 index; of ``seed`` the low 32 bits count."""
    high = (index >> 32).to(tl.uint32)
    hashed = index.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32) + high * 0x632BE5AB
    hashed = hashed ^ (hashed >> 16)
    hashed = hashed * 0x7FEB352D
    hashed = hashed ^ (hashed >> 15)
    hashed = hashed * 0x846CA68B
    hashed = hashed ^ (hashed >> 16)
    return (hashed >> 8).to(tl.float32) * (1.0 / 16777216.0)
