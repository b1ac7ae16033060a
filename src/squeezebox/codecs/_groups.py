"""Fixed size: groups of 256 elements in memory order, `zero*` and `minmax*`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from squeezebox.codecs._codec import Codec, expect_parts, make_packed, require_float, require_own, within
from squeezebox.codecs._layout import buffer_for, flatten, restore
from squeezebox.codecs._packed import Packed
from squeezebox.codecs._reference._groups import FLOORS, compute_dtype
from squeezebox.schema import CodecError

# What rounding in the computation adds to half a step, relative to it.
SLACK = 1 + 2.0**-11
# No error is larger: what is decoded has no other sign than the element.
MOST = torch.finfo(torch.float64).max


def _refuse_nonfinite(codec: str, flat: Tensor) -> None:
    bad = (~torch.isfinite(flat)).nonzero()
    raise CodecError(
        f"codec '{codec}' has no code for NaN or infinity: {len(bad)} of {flat.numel()} elements are not "
        f"finite, the first at position {int(bad[0])} in memory order; use an 'entropy' codec or 'keep'."
    )


def _rounding(dtype: torch.dtype, peak: float) -> float:
    """What rounding decoded values up to ``peak`` to the dtype can add."""
    return peak * torch.finfo(dtype).eps + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def _check(packed: Packed, bits: int, scales: int) -> None:
    groups = -(-packed.numel // 256)
    expect_parts(packed, (torch.uint8, groups * 32 * bits), (compute_dtype(packed.dtype), groups * scales))


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroGroups(Codec):
    """One scale a group and a level at exactly zero; error at most half a step of the worst group.

    Nearest: only an exact zero decodes to zero, so signs are kept; a step is peak / (2^bits - 1) in groups
    without negatives and peak / (2^(bits-1) - 1) in others. Stochastic: unbiased for a seed drawn anew,
    error below one step, zeros exact, but a small value may decode to zero.
    """

    bits: int
    stochastic: bool = False

    def pack(
        self, tensor: Tensor, bound: float | None = None, *, lag: int = 0, dither: int = 0, seed: int = 0
    ) -> Packed:
        require_float(self.name, tensor)
        flat = flatten(tensor)
        codes, scales = torch.ops.squeezebox.pack_zero(flat, self.bits, self.stochastic, seed)
        reached = within(self.name, self._bound(flat, scales), bound)
        return make_packed(self, tensor, reached, (codes, scales))

    def _bound(self, flat: Tensor, scales: Tensor) -> float:
        if flat.numel() == 0:
            return 0.0
        low, high = (float(edge) for edge in scales.aminmax())
        if not (math.isfinite(low) and math.isfinite(high)):
            _refuse_nonfinite(self.name, flat)
        two_sided, one_sided = (1 << (self.bits - 1)) - 1, (1 << self.bits) - 1
        step = max(-low / two_sided, high / one_sided)
        reached = step * SLACK * (1.0 if self.stochastic else 0.5) + _rounding(flat.dtype, max(-low, high))
        return min(reached, MOST)

    def unpack(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        require_own(self, packed)
        flat = buffer_for(packed, out)
        torch.ops.squeezebox.unpack_zero(*packed.payload, self.bits, self.stochastic, flat)
        return restore(flat, packed)

    def check(self, packed: Packed) -> None:
        _check(packed, self.bits, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class MinMaxGroups(Codec):
    """Equal steps from a group's minimum to its maximum; error at most half a step of the worst group.

    A group that holds exact zeros gets its levels shifted so that one is zero. Stochastic: unbiased for a
    seed drawn anew, error below one step. For dense tensors; signs of small values may be lost.
    """

    bits: int
    stochastic: bool = False

    def pack(
        self, tensor: Tensor, bound: float | None = None, *, lag: int = 0, dither: int = 0, seed: int = 0
    ) -> Packed:
        require_float(self.name, tensor)
        flat = flatten(tensor)
        codes, scales = torch.ops.squeezebox.pack_minmax(flat, self.bits, self.stochastic, seed)
        reached = within(self.name, self._bound(flat, scales), bound)
        return make_packed(self, tensor, reached, (codes, scales))

    def _bound(self, flat: Tensor, scales: Tensor) -> float:
        if flat.numel() == 0:
            return 0.0
        offset, step = scales.view(-1, 2).unbind(1)
        size, pinned = step.abs(), step < 0
        widest = float(size.max())
        if not (math.isfinite(widest) and math.isfinite(float(offset.abs().max()))):
            _refuse_nonfinite(self.name, flat)
        top = (1 << self.bits) - 1
        reach = torch.where(pinned, size.double() * top, offset.abs().double() + size.double() * top / 2)
        rounding = 2 * _rounding(flat.dtype, min(float(reach.max()), torch.finfo(flat.dtype).max))
        return widest * SLACK * (1.0 if self.stochastic else 0.5) + rounding + FLOORS[flat.dtype]

    def unpack(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        require_own(self, packed)
        flat = buffer_for(packed, out)
        torch.ops.squeezebox.unpack_minmax(*packed.payload, self.bits, flat)
        return restore(flat, packed)

    def check(self, packed: Packed) -> None:
        _check(packed, self.bits, 2)
