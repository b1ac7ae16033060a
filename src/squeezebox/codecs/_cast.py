"""Narrower float formats, for comparison: `bf16`, `fp8-e4m3`, `fp8-e5m2`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from squeezebox.codecs._codec import (
    Codec,
    expect_parts,
    make_packed,
    refuse_scale,
    require_float,
    require_own,
    within,
)
from squeezebox.codecs._groups import MOST, refuse_nonfinite, rounding
from squeezebox.codecs._hints import NO_HINTS, Hints
from squeezebox.codecs._layout import buffer_for, flatten, restore
from squeezebox.codecs._packed import Packed
from squeezebox.codecs._reference._groups import compute_dtype

# The scale is a power of two, so that scaling is exact and zeros and signs of normal values survive.


@dataclass(frozen=True, kw_only=True, slots=True)
class Cast(Codec):
    """Each element rounded to a narrower float, under one power-of-two scale for the tensor.

    The bound is half a unit in the last place of the largest element. Values far below the largest one
    may become zero.
    """

    target: torch.dtype
    scaled: bool

    def pack(self, tensor: Tensor, bound: float | None = None, hints: Hints = NO_HINTS) -> Packed:
        require_float(self.name, tensor)
        refuse_scale(self.name, hints)
        flat = flatten(tensor)
        peak = float(flat.abs().amax()) if flat.numel() else 0.0
        if not math.isfinite(peak):
            refuse_nonfinite(self.name, flat)
        limit = torch.finfo(self.target).max
        exponent = self._exponent(flat.dtype, peak) if self.scaled and peak else 0
        scale = 2.0**exponent
        wide = (flat.to(compute_dtype(flat.dtype)) * scale).clamp(-limit, limit)
        reached = within(self.name, self._bound(flat.dtype, peak, scale), bound)
        return make_packed(self, tensor, reached, (wide.to(self.target),), {"exponent": exponent})

    def _exponent(self, dtype: torch.dtype, peak: float) -> int:
        """The largest power of two that keeps ``peak`` within the narrow format."""
        limit = torch.finfo(self.target).max
        room = math.frexp(limit)[1] - math.frexp(peak)[1]
        most = 1000 if dtype == torch.float64 else 120
        return max(-most, min(most, room - (math.ldexp(peak, room) > limit)))

    def _bound(self, dtype: torch.dtype, peak: float, scale: float) -> float:
        if peak == 0.0:
            return 0.0
        facts = torch.finfo(self.target)
        largest = max(2.0 ** (math.frexp(peak)[1] - 1), facts.smallest_normal / scale)
        clipped = peak - facts.max / scale
        reached = max(largest * facts.eps * 0.5 * (1 + 2.0**-11), clipped) + rounding(dtype, peak)
        return min(reached, MOST)

    def unpack(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        require_own(self, packed)
        flat = buffer_for(packed, out)
        wide = packed.payload[0].to(compute_dtype(packed.dtype)) * 2.0 ** -int(packed.meta["exponent"])
        limit = torch.finfo(packed.dtype).max
        flat.copy_(wide.clamp(-limit, limit))
        return restore(flat, packed)

    def check(self, packed: Packed) -> None:
        expect_parts(packed, (self.target, packed.numel))
