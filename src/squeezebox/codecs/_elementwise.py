"""Each element by itself, as it is or in fewer bits: `keep`, `narrow`, `bf16`, `fp8-e4m3`, `fp8-e5m2`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from squeezebox.codecs._codec import (
    INTEGERS,
    NO_HINTS,
    SIGNED,
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
from squeezebox.codecs._groups import MOST, refuse_nonfinite, rounding
from squeezebox.codecs._reference._groups import compute_dtype
from squeezebox.schema import CodecError, FormatError


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep(Codec):
    """Exact for every dtype: a private copy in memory order, safe from later in-place changes."""

    def pack(self, tensor: Tensor, bound: float | None = None, hints: Hints = NO_HINTS) -> Packed:
        return make_packed(self, tensor, 0.0, (flatten(tensor).clone(),))

    def unpack(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        require_own(self, packed)
        flat = buffer_for(packed, out)
        flat.copy_(packed.payload[0])
        return restore(flat, packed)

    def check(self, packed: Packed) -> None:
        expect_parts(packed, (packed.dtype, packed.numel))


@dataclass(frozen=True, kw_only=True, slots=True)
class Narrow(Codec):
    """Exact for integers: ``x - offset`` as int8, int16, int32 or int64, whichever just holds it."""

    def pack(self, tensor: Tensor, bound: float | None = None, hints: Hints = NO_HINTS) -> Packed:
        if tensor.dtype not in INTEGERS:
            raise CodecError(f"codec 'narrow' packs integer tensors, not {tensor.dtype}; use 'keep'.")
        flat = flatten(tensor)
        low, high = (int(edge) for edge in flat.aminmax()) if flat.numel() else (0, 0)
        for dtype in SIGNED:
            limits = torch.iinfo(dtype)
            if high - low <= limits.max - limits.min:
                break
        offset = 0 if dtype == torch.int64 else min(low - limits.min, torch.iinfo(torch.int64).max)
        codes = flat.clone() if offset == 0 else flat.long() - offset
        return make_packed(self, tensor, 0.0, (codes.to(dtype),), {"offset": offset})

    def unpack(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        require_own(self, packed)
        flat = buffer_for(packed, out)
        flat.copy_(packed.payload[0].long() + int(packed.meta["offset"]))
        return restore(flat, packed)

    def check(self, packed: Packed) -> None:
        if len(packed.payload) != 1 or packed.payload[0].dtype not in SIGNED:
            raise FormatError("packed by 'narrow': expected one part of signed integers; damaged.")
        expect_parts(packed, (packed.payload[0].dtype, packed.numel))


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
