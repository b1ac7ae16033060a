"""One or a few bits an element: `mask`, `sign`, `interval`, and `pool-index`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

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
    require_float,
    require_own,
    restore,
)
from squeezebox.codecs._reference._groups import between
from squeezebox.schema import CodecError, FormatError, OptionError

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


Pair = int | tuple[int, ...] | list[int]


def _pair(name: str, value: Pair) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) == 1:
        pair = (pair[0], pair[0])
    if len(pair) != 2:
        raise OptionError(f"codec 'pool-index' needs {name} as one or two integers, got {value!r}.")
    return int(pair[0]), int(pair[1])


def _bits(places: int) -> int:
    return 2 if places <= 4 else 4 if places <= 16 else 8


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolIndex(Codec):
    """Exact for the int64 indices of ``max_pool2d``: 2, 4 or 8 bits for windows of up to 4, 16, 256 places.

    Verified while packing: CodecError where an index lies outside its window.
    """

    def pack(
        self,
        tensor: Tensor,
        bound: float | None = None,
        hints: Hints = NO_HINTS,
        *,
        kernel_size: Pair = 2,
        stride: Pair | None = None,
        padding: Pair = 0,
        dilation: Pair = 1,
        input_shape: tuple[int, ...] | torch.Size | None = None,
        trusted: bool = False,
    ) -> Packed:
        """Pack max-pool indices; the options are those of the pooling, ``input_shape`` its input's.

        ``trusted``: the options are known to belong to the indices, and nothing waits for a device.
        """
        if tensor.dtype != torch.int64 or tensor.dim() not in (3, 4) or input_shape is None:
            raise CodecError(
                f"codec 'pool-index' packs the int64 indices of a 2-D max-pool with input_shape=, got "
                f"{tensor.dtype} of shape {tuple(tensor.shape)}; use 'narrow'."
            )
        window = {"width": int(input_shape[-1])}
        options = (("kernel", kernel_size), ("stride", stride or kernel_size))
        for name, value in (*options, ("padding", padding), ("dilation", dilation)):
            window[name + "_y"], window[name + "_x"] = _pair(name, value)
        packed = make_packed(self, tensor, 0.0, (), window)
        codes = _codes(packed, flatten(tensor), _places(packed), trusted)
        return make_packed(self, tensor, 0.0, (codes,), window)

    def unpack(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        require_own(self, packed)
        flat = buffer_for(packed, out)
        if packed.numel == 0:  # a plane may be large all the same
            return restore(flat, packed)
        places, (base, inner) = _places(packed), _positions(packed)
        bits = _bits(len(places))
        codes = torch.ops.squeezebox.unpack_codes(packed.payload[0], bits, packed.numel)
        # damaged codes may name places beyond the last: they must stay inside the table
        places = torch.nn.functional.pad(places, (0, (1 << bits) - len(places)))
        torch.ops.squeezebox.unpack_offsets(codes, base, places, inner, flat)
        return restore(flat, packed)

    def check(self, packed: Packed) -> None:
        places = int(packed.meta["kernel_y"]) * int(packed.meta["kernel_x"])
        if len(packed.shape) not in (3, 4) or places > 256:
            raise FormatError("packed by 'pool-index': not the indices of a 2-D max-pool; damaged.")
        expect_parts(packed, (torch.uint8, -(-packed.numel // 256) * 32 * _bits(places)))


def _places(packed: Packed) -> Tensor:
    """Distance in the input plane from the window's corner to each of its places."""
    meta = {name: int(value) for name, value in packed.meta.items()}
    if not 1 <= meta["kernel_y"] * meta["kernel_x"] <= 256:
        raise CodecError(
            f"codec 'pool-index' holds windows of 1 to 256 places, not {meta['kernel_y']} x "
            f"{meta['kernel_x']}; use 'narrow'."
        )
    down = torch.arange(meta["kernel_y"], device=packed.device) * (meta["dilation_y"] * meta["width"])
    across = torch.arange(meta["kernel_x"], device=packed.device) * meta["dilation_x"]
    return (down[:, None] + across).reshape(-1)


def _positions(packed: Packed) -> tuple[Tensor, int]:
    """Index of each window's corner in the order the planes are stored, and the elements they share it."""
    meta = {name: int(value) for name, value in packed.meta.items()}
    rows, columns = packed.shape[-2:]
    top = torch.arange(rows, device=packed.device) * meta["stride_y"] - meta["padding_y"]
    left = torch.arange(columns, device=packed.device) * meta["stride_x"] - meta["padding_x"]
    base = (top[:, None] * meta["width"] + left).reshape(-1)
    channels = packed.shape[-3]
    last = channels > 1 and rows * columns > 1 and packed.stride[-3] == 1
    return base, channels if last else 1


def _codes(packed: Packed, flat: Tensor, places: Tensor, trusted: bool) -> Tensor:
    """Packed codes of indices, row-major or channels-last; verified unless ``trusted``."""
    base, inner = _positions(packed)
    if flat.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=flat.device)
    codes, found = torch.ops.squeezebox.pack_offsets(flat, base, places, inner)
    if not trusted and not bool(found):
        raise CodecError(
            "codec 'pool-index': an index lies outside its pooling window, so the window options do not "
            "belong to these indices (or their memory order is neither row-major nor channels-last); "
            "use 'narrow'."
        )
    packed_codes: Tensor = torch.ops.squeezebox.pack_codes(codes, _bits(len(places)))
    return packed_codes
