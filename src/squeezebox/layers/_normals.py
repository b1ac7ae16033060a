"""Normal numbers by counting: element i of a key is the same on every backend, to the bit.

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11; it passes TestU01's
BigCrush) turns a counter into four words of 32 bits, and Box and Muller's transform turns two words into two
normals. Logarithm, sine and cosine are polynomials here. All is integers, and float32 additions, products
and square roots, which IEEE 754 rounds in one way alone; so plain torch and compiled loops agree.

Element i is word (i % 1024) // 256 of counter i // 1024 * 256 + i % 256: loops write runs of 256 elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

RUN = 256  # elements that use the same word of consecutive counters
LOW = 0xFFFFFFFF
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
# Fits of the least relative error (Lawson's iteration); the last coefficient is the highest power's.
# log(1 + f) = f - f^2 / 2 + f^3 p(f) for sqrt(1/2) <= 1 + f < sqrt(2), within 0.1 ulp before rounding
LOG = (
    0.3333333134651184,
    -0.2500081956386566,
    0.20001226663589478,
    -0.16623356938362122,
    0.14201758801937103,
    -0.13160182535648346,
    0.12761574983596802,
    -0.07634492963552475,
)
# sin(pi f / 2) = f p(f^2) and cos(pi f / 2) = 1 + f^2 p(f^2) for |f| <= 1/2
SINE = (1.5707963705062866, -0.6459634900093079, 0.07968003302812576, -0.00460165785625577)
COSINE = (-1.2337005138397217, 0.25366923213005066, -0.02086028829216957, 0.0009040216682478786)
LN2 = 0.6931471824645996
ROOT_HALF = 0x3F3504F3  # the bits of sqrt(1/2)
FRACTION = 0x007FFFFF
EXPONENT_BITS = 23


def words(counters: Tensor, key: tuple[int, int], rest: tuple[int, int, int]) -> list[Tensor]:
    """Philox-4x32-10 of (counters, *rest) under ``key``: four int64 tensors of words below 2^32."""
    found = [counters & LOW, *(torch.full_like(counters, word & LOW) for word in rest)]
    first, second = (word & LOW for word in key)
    for _ in range(ROUNDS):
        low, high = _product(MULTIPLIERS[0], found[0]), _product(MULTIPLIERS[1], found[2])
        found = [high[1] ^ found[1] ^ first, high[0], low[1] ^ found[3] ^ second, low[0]]
        first, second = (first + WEYL[0]) & LOW, (second + WEYL[1]) & LOW
    return found


def _product(multiplier: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """(low, high) words of a product, by halves: int64 has no room for 64 unsigned bits."""
    low, high = word & 0xFFFF, word >> 16
    below, above = multiplier * low, multiplier * high
    middle = above + (below >> 16)
    return ((middle & 0xFFFF) << 16) | (below & 0xFFFF), middle >> 16


def normals(numel: int, seed: int, draw: int, sample: int, module: int, device: torch.device) -> Tensor:
    """``numel`` float32 numbers of the standard normal distribution, none beyond 6.77 either way."""
    blocks = -(-numel // (4 * RUN))
    counters = torch.arange(blocks * RUN, device=device)
    found = words(counters, (seed, seed >> 32), (draw, sample, module))
    pairs = [*_pair(found[0], found[1]), *_pair(found[2], found[3])]
    return torch.stack([each.view(blocks, RUN) for each in pairs], 1).flatten()[:numel]


def _pair(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Two normals of two words: the first word's radius, the second's angle."""
    square = -2.0 * _log(first.to(torch.float32) * 2.0**-32 + 2.0**-33)
    radius = square.double().sqrt().float()  # float32's square root need not be rounded right
    turn = ((second & 0x3FFFFFFF) - 0x20000000).to(torch.float32) * 2.0**-30
    square = turn * turn
    sine = turn * _polynomial(SINE, square)
    cosine = 1.0 + square * _polynomial(COSINE, square)
    cosine = torch.where((second & 0x40000000) != 0, -cosine, cosine)
    swapped = (second & 0x80000000) != 0
    x, y = torch.where(swapped, sine, cosine), torch.where(swapped, cosine, sine)
    return radius * x, radius * y


def _log(uniform: Tensor) -> Tensor:
    bits = uniform.view(torch.int32) - ROOT_HALF
    exponent = (bits >> EXPONENT_BITS).to(torch.float32)
    fraction = ((bits & FRACTION) + ROOT_HALF).view(torch.float32) - 1.0
    square = fraction * fraction
    small = fraction - 0.5 * square + square * fraction * _polynomial(LOG, fraction)
    return exponent * LN2 + small


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    total = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total
