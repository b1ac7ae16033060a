"""One bit an element: `mask`, `sign` and `interval`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from squeezebox.codecs._codec import (
    Codec,
    expect_meta,
    expect_parts,
    make_packed,
    require_float,
    require_own,
)
from squeezebox.codecs._layout import buffer_for, flatten, restore
from squeezebox.codecs._packed import Packed
from squeezebox.schema import CodecError, OptionError


def _check(packed: Packed) -> None:
    expect_meta(packed, "zero", "one")
    expect_parts(packed, (torch.uint8, -(-packed.numel // 256) * 32))


def _unpack(codec: Codec, packed: Packed, out: Tensor | None) -> Tensor:
    require_own(codec, packed)
    flat = buffer_for(packed, out)
    target = flat.view(torch.uint8) if packed.dtype == torch.bool else flat
    torch.ops.squeezebox.unpack_bits(
        packed.payload[0], float(packed.meta["zero"]), float(packed.meta["one"]), target
    )
    return restore(flat, packed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mask(Codec):
    """Exact for booleans, and for numbers that are all 0 or one finite value c (dropout masks)."""

    def pack(self, tensor: Tensor, bound: float | None = None, *, lag: int = 0, dither: int = 0) -> Packed:
        flat = flatten(tensor)
        if flat.dtype == torch.bool:  # nothing to find out, or to wait for
            bits, _ = torch.ops.squeezebox.pack_nonzero(flat.view(torch.uint8), 1.0)
            return make_packed(self, tensor, 0.0, (bits,), {"zero": 0.0, "one": 1.0})
        value = float(flat.max()) if flat.numel() else 1.0
        if value == 0:
            value = float(flat.min())
        bits, whole = torch.ops.squeezebox.pack_nonzero(flat, value)
        if not math.isfinite(value) or not bool(whole):
            raise CodecError(
                f"codec 'mask' holds tensors whose elements are all 0 or one finite value; this one has "
                f"{value!r} and others. Use 'sign', 'lossless' or 'keep'."
            )
        return make_packed(self, tensor, 0.0, (bits,), {"zero": 0.0, "one": value})

    def unpack(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        return _unpack(self, packed, out)

    def check(self, packed: Packed) -> None:
        _check(packed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sign(Codec):
    """Keeps only whether ``x > 0``: comes back as 1.0 or 0.0, so the bound is infinite.

    For ReLU outputs, whose backward reads nothing else. NaN counts as positive, as it does there.
    """

    def pack(self, tensor: Tensor, bound: float | None = None, *, lag: int = 0, dither: int = 0) -> Packed:
        require_float(self.name, tensor)
        bits = torch.ops.squeezebox.pack_positive(flatten(tensor))
        return make_packed(self, tensor, math.inf, (bits,), {"zero": 0.0, "one": 1.0})

    def unpack(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        return _unpack(self, packed, out)

    def check(self, packed: Packed) -> None:
        _check(packed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval(Codec):
    """Keeps only whether x lies in an interval: comes back as one value inside or one outside.

    For hardtanh and ReLU6 (``inclusive=False``: ``not (x <= lower or x >= upper)``, so NaN is inside)
    and clamp (``inclusive=True``: ``lower <= x <= upper``, so NaN is outside), as their backward reads it.
    """

    def pack(
        self,
        tensor: Tensor,
        bound: float | None = None,
        *,
        lag: int = 0,
        dither: int = 0,
        lower: float = -1.0,
        upper: float = 1.0,
        inclusive: bool = False,
    ) -> Packed:
        require_float(self.name, tensor)
        if not lower < upper:
            raise OptionError(f"codec 'interval' needs lower < upper, got {lower!r} and {upper!r}.")
        bits = torch.ops.squeezebox.pack_between(flatten(tensor), lower, upper, inclusive)
        outside, inside = representatives(lower, upper)
        return make_packed(self, tensor, math.inf, (bits,), {"zero": outside, "one": inside})

    def unpack(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        return _unpack(self, packed, out)

    def check(self, packed: Packed) -> None:
        _check(packed)


def representatives(lower: float, upper: float) -> tuple[float, float]:
    """A value clearly outside the interval and one inside, in any float dtype."""
    if math.isfinite(lower) and math.isfinite(upper):
        return upper + max(1.0, upper - lower, abs(upper)), lower + (upper - lower) / 2
    if math.isfinite(lower):
        return lower - max(1.0, abs(lower)), lower + max(1.0, abs(lower))
    if math.isfinite(upper):
        return upper + max(1.0, abs(upper)), upper - max(1.0, abs(upper))
    return math.inf, 0.0
