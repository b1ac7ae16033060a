"""Fixed size: groups of 256 elements in memory order, `zero*` and `minmax*`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from squeezebox.codecs._codec import (
    NO_HINTS,
    Codec,
    Hints,
    Packed,
    buffer_for,
    expect_parts,
    flatten,
    make_packed,
    refuse_scale,
    require_float,
    require_own,
    restore,
    within,
)
from squeezebox.codecs._reference._groups import FLOORS, compute_dtype
from squeezebox.schema import CodecError

# What rounding in the computation adds to half a step, relative to it.
SLACK = 1 + 2.0**-11
# No error is larger: what is decoded has no other sign than the element.
MOST = torch.finfo(torch.float64).max


def refuse_nonfinite(codec: str, flat: Tensor) -> NoReturn:
    """Raise CodecError: some elements are NaN or infinite."""
    bad = (~torch.isfinite(flat)).nonzero()
    raise CodecError(
        f"codec '{codec}' has no code for NaN or infinity: {len(bad)} of {flat.numel()} elements are not "
        f"finite, the first at position {int(bad[0])} in memory order; use an 'entropy' codec or 'keep'."
    )


def rounding(dtype: torch.dtype, peak: float) -> float:
    """What rounding decoded values up to ``peak`` to the dtype can add."""
    return peak * torch.finfo(dtype).eps + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


# From rounding, flat elements, their groups' scales, bits and a share of a step: the bound.
Reach = Callable[[str, Tensor, Tensor, int, float], float]


def _zero_reach(codec: str, flat: Tensor, scales: Tensor, bits: int, share: float) -> float:
    low, high = (float(edge) for edge in scales.aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        refuse_nonfinite(codec, flat)
    two_sided, one_sided = (1 << (bits - 1)) - 1, (1 << bits) - 1
    step = max(-low / two_sided, high / one_sided)
    return min(step * SLACK * share + rounding(flat.dtype, max(-low, high)), MOST)


def _minmax_reach(codec: str, flat: Tensor, scales: Tensor, bits: int, share: float) -> float:
    offset, step = scales.view(-1, 2).unbind(1)
    size, pinned = step.abs(), step < 0
    widest = float(size.max())
    if not (math.isfinite(widest) and math.isfinite(float(offset.abs().max()))):
        refuse_nonfinite(codec, flat)
    top = (1 << bits) - 1
    reach = torch.where(pinned, size.double() * top, offset.abs().double() + size.double() * top / 2)
    added = 2 * rounding(flat.dtype, min(float(reach.max()), torch.finfo(flat.dtype).max))
    return widest * SLACK * share + added + FLOORS[flat.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class Levels:
    """Where a group's levels lie: the operators that find and read them, and how many numbers a group has."""

    numbers: int
    pack: Callable[[Tensor, int, bool, int], tuple[Tensor, Tensor]]
    unpack: Callable[[Tensor, Tensor, int, bool, Tensor], None]
    reach: Reach


ZERO = Levels(
    numbers=1,
    pack=lambda *arguments: torch.ops.squeezebox.pack_zero(*arguments),
    unpack=lambda *arguments: torch.ops.squeezebox.unpack_zero(*arguments),
    reach=_zero_reach,
)
"""One scale a group and a level at exactly zero.

Nearest: only an exact zero decodes to zero, so signs are kept; a step is peak / (2^bits - 1) in groups
without negatives and peak / (2^(bits-1) - 1) in others. Stochastic: a small value may decode to zero.
"""
MINMAX = Levels(
    numbers=2,
    pack=lambda *arguments: torch.ops.squeezebox.pack_minmax(*arguments),
    unpack=lambda codes, scales, bits, _, out: torch.ops.squeezebox.unpack_minmax(codes, scales, bits, out),
    reach=_minmax_reach,
)
"""Equal steps from a group's minimum to its maximum, shifted so that one is zero where it holds exact zeros.

For dense tensors; signs of small values may be lost.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups(Codec):
    """256 elements in memory order share their levels; error at most half a step of the worst group.

    Stochastic: unbiased if each call has a fresh seed, error below one step, zeros exact.
    """

    levels: Levels
    bits: int
    stochastic: bool = False

    def pack(self, tensor: Tensor, bound: float | None = None, hints: Hints = NO_HINTS) -> Packed:
        require_float(self.name, tensor)
        refuse_scale(self.name, hints)
        flat = flatten(tensor)
        codes, scales = self.levels.pack(flat, self.bits, self.stochastic, hints.seed)
        share = 1.0 if self.stochastic else 0.5
        reached = self.levels.reach(self.name, flat, scales, self.bits, share) if flat.numel() else 0.0
        return make_packed(self, tensor, within(self.name, reached, bound), (codes, scales))

    def unpack(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        require_own(self, packed)
        flat = buffer_for(packed, out)
        codes, scales = packed.payload
        self.levels.unpack(codes, scales, self.bits, self.stochastic, flat)
        return restore(flat, packed)

    def check(self, packed: Packed) -> None:
        groups, wide = -(-packed.numel // 256), compute_dtype(packed.dtype)
        expect_parts(packed, (torch.uint8, groups * 32 * self.bits), (wide, groups * self.levels.numbers))
