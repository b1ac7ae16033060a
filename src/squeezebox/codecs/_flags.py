"""One bit an element: `mask`, `sign` and `interval`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from squeezebox.codecs._codec import (
    Codec,
    expect_parts,
    make_packed,
    require_float,
    require_own,
)
from squeezebox.codecs._hints import NO_HINTS, Hints
from squeezebox.codecs._layout import buffer_for, flatten, restore
from squeezebox.codecs._packed import Packed
from squeezebox.codecs._reference._bits import between
from squeezebox.schema import CodecError, OptionError

# As float32, which integers are compared in, still itself.
LARGEST_INTEGER = 1 << 24


def _check(packed: Packed) -> None:
    expect_parts(packed, (torch.uint8, -(-packed.numel // 256) * 32))


def _unpack(codec: Codec, packed: Packed, out: Tensor | None) -> Tensor:
    require_own(codec, packed)
    flat = buffer_for(packed, out)
    target = flat.view(torch.uint8) if packed.dtype == torch.bool else flat
    torch.ops.squeezebox.unpack_bits(
        packed.payload[0], float(packed.meta["zero"]), float(packed.meta["one"]), target
    )
    return restore(flat, packed)


def _edges(flat: Tensor) -> tuple[float, float]:
    """The zero of a mask, with its sign, and its other value; CodecError where none can be compared."""
    if flat.dtype.is_complex:
        raise CodecError(f"codec 'mask' holds booleans and real numbers, not {flat.dtype}; use 'keep'.")
    low, high = (float(edge) for edge in flat.aminmax()) if flat.numel() else (0.0, 0.0)
    if not flat.dtype.is_floating_point and max(-low, high) > LARGEST_INTEGER:
        raise CodecError(
            f"codec 'mask' compares integers up to {LARGEST_INTEGER}, and one here is {max(-low, high):.0f}; "
            "use 'narrow'."
        )
    zero = high if high == 0 else low if low == 0 else 0.0
    return zero, high or low or 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Mask(Codec):
    """Exact for booleans, and for numbers that are all 0 or one finite value c (dropout masks).

    The zeros may all be -0.0; both signs of zero in one tensor are refused.
    """

    def pack(self, tensor: Tensor, bound: float | None = None, hints: Hints = NO_HINTS) -> Packed:
        flat = flatten(tensor)
        if flat.dtype == torch.bool:  # nothing to find out, or to wait for
            bits = torch.ops.squeezebox.pack_codes(flat.view(torch.uint8), 1)
            return make_packed(self, tensor, 0.0, (bits,), {"zero": 0.0, "one": 1.0})
        zero, value = _edges(flat)
        bits, whole = torch.ops.squeezebox.pack_nonzero(flat, value, math.copysign(1.0, zero) < 0)
        if not math.isfinite(value) or not bool(whole):
            raise CodecError(
                f"codec 'mask' holds tensors whose elements are all {zero!r} or one finite value; this one "
                f"has {value!r} and others. Use 'sign', 'lossless' or 'keep'."
            )
        return make_packed(self, tensor, 0.0, (bits,), {"zero": zero, "one": value})

    def unpack(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        return _unpack(self, packed, out)

    def check(self, packed: Packed) -> None:
        _check(packed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sign(Codec):
    """Keeps only whether ``not x <= 0``: comes back as 1.0 or 0.0, so the bound is infinite.

    For ReLU outputs, whose backward reads nothing else. NaN and infinity come back as 1.0: this keeps a flag,
    not values. NaN counts as positive, as it does there; for leaky ReLU (``nan=False``) it does not.
    """

    def pack(
        self, tensor: Tensor, bound: float | None = None, hints: Hints = NO_HINTS, *, nan: bool = True
    ) -> Packed:
        require_float(self.name, tensor)
        flat = flatten(tensor)
        if nan:
            bits = torch.ops.squeezebox.pack_positive(flat)
        else:
            bits = torch.ops.squeezebox.pack_codes((flat > 0).view(torch.uint8), 1)
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
    NaN and infinity come back as that value too, finite where the dtype has a finite one there.
    """

    def pack(
        self,
        tensor: Tensor,
        bound: float | None = None,
        hints: Hints = NO_HINTS,
        *,
        lower: float = -1.0,
        upper: float = 1.0,
        inclusive: bool = False,
    ) -> Packed:
        require_float(self.name, tensor)
        if not lower < upper:
            raise OptionError(f"codec 'interval' needs lower < upper, got {lower!r} and {upper!r}.")
        bits = torch.ops.squeezebox.pack_between(flatten(tensor), lower, upper, inclusive)
        outside, inside = representatives(lower, upper, inclusive, tensor.dtype)
        return make_packed(self, tensor, math.inf, (bits,), {"zero": outside, "one": inside})

    def unpack(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        return _unpack(self, packed, out)

    def check(self, packed: Packed) -> None:
        _check(packed)


@lru_cache(maxsize=64)
def representatives(lower: float, upper: float, inclusive: bool, dtype: torch.dtype) -> tuple[float, float]:
    """A value outside the interval and one inside, as this dtype has them.

    Where the ends round together, an open interval may hold nothing but NaN.
    """
    outside, inside = _clear_of_ends(lower, upper)
    limit = torch.finfo(dtype).max
    candidates = [outside, inside, 0.0, limit, -limit, lower, upper, math.inf, -math.inf, math.nan]
    values = torch.tensor(candidates, dtype=torch.float64, device="cpu").to(dtype)
    flags = between(values, lower, upper, inclusive).tolist()
    order = sorted(range(len(candidates)), key=lambda place: not math.isfinite(values[place]))
    first_out = next(place for place in order if not flags[place])
    first_in = next(place for place in order if flags[place])
    return float(candidates[first_out]), float(candidates[first_in])


def _clear_of_ends(lower: float, upper: float) -> tuple[float, float]:
    """A value clearly outside the interval and one inside, before rounding."""
    if math.isfinite(lower) and math.isfinite(upper):
        return upper + max(1.0, upper - lower, abs(upper)), lower + (upper - lower) / 2
    if math.isfinite(lower):
        return lower - max(1.0, abs(lower)), lower + max(1.0, abs(lower))
    if math.isfinite(upper):
        return upper + max(1.0, abs(upper)), upper - max(1.0, abs(upper))
    return math.inf, 0.0
