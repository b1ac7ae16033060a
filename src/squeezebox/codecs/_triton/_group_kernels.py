"""Groups of 256: flags, codes of few bits, pool indices as places in their window, `zero*` and `minmax*`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from squeezebox.codecs._reference import _groups
from squeezebox.codecs._reference._groups import group_count
from squeezebox.codecs._triton._parts import (
    READABLE,
    elements,
    launch,
    load_codes,
    own_rows,
    rounded,
    spread,
    store_codes,
    uniform,
)


@triton.jit
def _pack_nonzero(
    flat, codes, others, numel, groups, value, negative,
    BITS: tl.constexpr, ROWS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = own_rows(ROWS)
    index = elements(row, A, B, C)
    element = tl.load(flat + index, mask=index < numel, other=0).to(tl.float32)
    hit = element == value
    signed = (element.to(tl.int32, bitcast=True) < 0).to(tl.int32)
    zero = (element == 0.0) & ((signed == negative) | (index >= numel))
    other = (hit | zero) == 0
    count = tl.sum(tl.sum(tl.sum(tl.sum(other.to(tl.int32), axis=3), axis=2), axis=1), axis=0)
    if count > 0:
        tl.atomic_max(others, 1)
    store_codes(codes, (hit & (index < numel)).to(tl.int32), row, groups, BITS, A, B, C)


@triton.jit
def _pack_positive(
    flat, codes, numel, groups,
    BITS: tl.constexpr, ROWS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = own_rows(ROWS)
    index = elements(row, A, B, C)
    element = tl.load(flat + index, mask=index < numel, other=0.0).to(tl.float32)
    store_codes(codes, ((element <= 0.0) == 0).to(tl.int32), row, groups, BITS, A, B, C)


@triton.jit
def _pack_between(
    flat, codes, numel, groups, lower, upper,
    INCLUSIVE: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = own_rows(ROWS)
    index = elements(row, A, B, C)
    element = tl.load(flat + index, mask=index < numel, other=0.0).to(tl.float32)
    if INCLUSIVE:
        inside = (element >= lower) & (element <= upper)
    else:
        inside = ((element <= lower) | (element >= upper)) == 0
    store_codes(codes, (inside & (index < numel)).to(tl.int32), row, groups, BITS, A, B, C)


@triton.jit
def _unpack_bits(
    packed, out, numel, groups, zero, one,
    BITS: tl.constexpr, ROWS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = own_rows(ROWS)
    index = elements(row, A, B, C)
    bit = load_codes(packed, row, groups, BITS, A, B, C)
    tl.store(out + index, tl.where(bit > 0, one, zero).to(out.dtype.element_ty), mask=index < numel)


@triton.jit
def _pack_codes(
    codes, packed, numel, groups,
    BITS: tl.constexpr, ROWS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = own_rows(ROWS)
    index = elements(row, A, B, C)
    code = tl.load(codes + index, mask=index < numel, other=0).to(tl.int32)
    store_codes(packed, tl.minimum(code, (1 << BITS) - 1), row, groups, BITS, A, B, C)


@triton.jit
def _unpack_codes(
    packed, codes, numel, groups,
    BITS: tl.constexpr, ROWS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = own_rows(ROWS)
    index = elements(row, A, B, C)
    code = load_codes(packed, row, groups, BITS, A, B, C)
    tl.store(codes + index, code.to(tl.uint8), mask=index < numel)


@triton.jit
def _pack_offsets(indices, base, places, codes, missing, numel, positions, inner, count, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < numel
    corner = tl.load(base + (index // inner) % positions, mask=mask, other=0)
    offset = tl.load(indices + index, mask=mask, other=0) - corner
    code = tl.zeros((BLOCK,), dtype=tl.int32)
    found = tl.zeros((BLOCK,), dtype=tl.int32)
    for number in range(count):
        hit = offset == tl.load(places + number)
        code = tl.where(hit, number, code)
        found = tl.where(hit, 1, found)
    if tl.sum((mask & (found == 0)).to(tl.int32), axis=0) > 0:
        tl.atomic_max(missing, 1)
    tl.store(codes + index, code.to(tl.uint8), mask=mask)


@triton.jit
def _unpack_offsets(codes, base, places, out, numel, positions, inner, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < numel
    corner = tl.load(base + (index // inner) % positions, mask=mask, other=0)
    place = tl.load(places + tl.load(codes + index, mask=mask, other=0).to(tl.int32), mask=mask, other=0)
    tl.store(out + index, corner + place, mask=mask)


def pack_nonzero(flat: Tensor, value: float, negative: bool) -> tuple[Tensor, Tensor]:
    """Bits of ``x == value``, and whether all others are zeros of one sign."""
    if flat.dtype not in READABLE | {torch.uint8} or flat.numel() == 0:
        return _groups.pack_nonzero(flat, value, negative)
    groups = group_count(flat.numel())
    codes = flat.new_empty(groups * 32, dtype=torch.uint8)
    others = flat.new_zeros((), dtype=torch.int32)
    launch(_pack_nonzero, (flat, codes, others, flat.numel(), groups, value, int(negative)), groups, 1)
    return codes, others == 0


def pack_positive(flat: Tensor) -> Tensor:
    """Bits of ``not (x <= 0)``."""
    if flat.dtype not in READABLE or flat.numel() == 0:
        return _groups.pack_positive(flat)
    groups = group_count(flat.numel())
    codes = flat.new_empty(groups * 32, dtype=torch.uint8)
    launch(_pack_positive, (flat, codes, flat.numel(), groups), groups, 1)
    return codes


def pack_between(flat: Tensor, lower: float, upper: float, inclusive: bool) -> Tensor:
    """Bits of lying in an interval."""
    if flat.dtype not in READABLE or flat.numel() == 0:
        return _groups.pack_between(flat, lower, upper, inclusive)
    groups = group_count(flat.numel())
    codes = flat.new_empty(groups * 32, dtype=torch.uint8)
    compared = flat.dtype if inclusive else torch.float32
    edges = (
        float(torch.tensor(edge, dtype=torch.float64, device="cpu").to(compared)) for edge in (lower, upper)
    )
    launch(_pack_between, (flat, codes, flat.numel(), groups, *edges), groups, 1, INCLUSIVE=inclusive)
    return codes


def unpack_bits(packed: Tensor, zero: float, one: float, out: Tensor) -> None:
    """One of two values for each bit, into ``out``."""
    if out.dtype not in READABLE | {torch.uint8} or out.numel() == 0:
        return _groups.unpack_bits(packed, zero, one, out)
    groups = packed.numel() // 32
    values = (
        float(torch.tensor(value, dtype=torch.float64, device="cpu").to(out.dtype)) for value in (zero, one)
    )
    launch(_unpack_bits, (packed, out, out.numel(), groups, *values), groups, 1)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Bytes to lanes of ``bits`` bits."""
    groups = group_count(codes.numel())
    packed = codes.new_empty(groups * 32 * bits)
    if groups:
        launch(_pack_codes, (codes, packed, codes.numel(), groups), groups, bits)
    return packed


def unpack_codes(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Lanes of ``bits`` bits to bytes."""
    codes, groups = packed.new_empty(numel), group_count(numel)
    if groups:
        launch(_unpack_codes, (packed, codes, numel, groups), groups, bits)
    return codes


def pack_offsets(indices: Tensor, base: Tensor, places: Tensor, inner: int) -> tuple[Tensor, Tensor]:
    """The place of each index in its window, and whether all have one."""
    numel = indices.numel()
    codes = indices.new_empty(numel, dtype=torch.uint8)
    missing = indices.new_zeros((), dtype=torch.int32)
    if numel:
        arguments = (indices, base, places, codes, missing, numel, base.numel(), inner, places.numel())
        spread(_pack_offsets, arguments, numel)
    return codes, missing == 0


def unpack_offsets(codes: Tensor, base: Tensor, places: Tensor, inner: int, out: Tensor) -> None:
    """The inverse of ``pack_offsets``, into ``out``."""
    if out.numel():
        spread(_unpack_offsets, (codes, base, places, out, out.numel(), base.numel(), inner), out.numel())


@triton.jit
def _nearest(scaled):
    """Halves to even, for numbers from 0 to 2^22."""
    return (scaled + 12582912.0) - 12582912.0


@triton.jit
def _most(values):
    """Largest of each group, [ROWS, 1, 1, 1]."""
    return tl.max(tl.max(tl.max(values, axis=3), axis=2), axis=1)[:, None, None, None]


@triton.jit
def _or_nan(value, has_nan):
    return tl.where(has_nan, float("nan"), value)


@triton.jit
def _within(value, limit):
    value = tl.where(value > limit, limit, value)
    return tl.where(value < -limit, -limit, value)


@triton.jit
def _load(flat, numel, row, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """Elements, the last one repeated to fill the last group, and their indices."""
    index = elements(row, A, B, C)
    value = tl.load(flat + index, mask=index < numel, other=0.0).to(tl.float32)
    last = tl.load(flat + numel - 1).to(tl.float32)
    return tl.where(index < numel, value, last), index


@triton.jit(do_not_specialize=["seed"])
def _pack_zero(
    flat, codes, scales, numel, groups, floor, seed,
    BITS: tl.constexpr, STOCHASTIC: tl.constexpr, ROWS: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = own_rows(ROWS)
    value, index = _load(flat, numel, row, A, B, C)
    magnitude = tl.abs(value)
    has_nan = _most((value != value).to(tl.int32)) > 0
    signed = _most((value < 0.0).to(tl.int32)) > 0
    peak = _or_nan(tl.maximum(_most(tl.where(value != value, 0.0, magnitude)), floor), has_nan)
    levels = tl.where(signed, (1 << (BITS - 1)) - 1.0, (1 << BITS) - 1.0)
    scaled = magnitude * tl.div_rn(levels, peak)
    if STOCHASTIC:
        whole = tl.floor(scaled)
        code = whole + tl.where(scaled - whole > uniform(index, seed), 1.0, 0.0)
    else:
        code = tl.where(value == 0.0, 0.0, tl.maximum(tl.ceil(scaled), 1.0))
    code = tl.where(scaled != scaled, 0.0, tl.minimum(code, levels)).to(tl.int32)
    code = tl.where(value < 0.0, -code, code) & ((1 << BITS) - 1)
    store_codes(codes, code, row, groups, BITS, A, B, C)
    scale = tl.reshape(tl.where(signed, -peak, peak), (ROWS,))
    tl.store(scales + row, scale, mask=row < groups)


@triton.jit
def _unpack_zero(
    codes, scales, out, numel, groups, limit,
    BITS: tl.constexpr, STOCHASTIC: tl.constexpr, ROWS: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = own_rows(ROWS)
    code = load_codes(codes, row, groups, BITS, A, B, C)
    scale = tl.load(scales + row, mask=row < groups, other=1.0)[:, None, None, None]
    signed = scale < 0.0
    levels = tl.where(signed, (1 << (BITS - 1)) - 1.0, (1 << BITS) - 1.0)
    half = 1 << (BITS - 1)
    value = tl.where(signed, (code ^ half) - half, code).to(tl.float32)
    if not STOCHASTIC:
        value = value - tl.where(value > 0.0, 0.5, tl.where(value < 0.0, -0.5, 0.0))
    value = _within(value * tl.div_rn(tl.abs(scale), levels), limit)
    index = elements(row, A, B, C)
    tl.store(out + index, rounded(value, out.dtype.element_ty), mask=index < numel)


@triton.jit(do_not_specialize=["seed"])
def _pack_minmax(
    flat, codes, scales, numel, groups, floor, seed,
    BITS: tl.constexpr, STOCHASTIC: tl.constexpr, ROWS: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = own_rows(ROWS)
    value, index = _load(flat, numel, row, A, B, C)
    TOP: tl.constexpr = (1 << BITS) - 1.0
    is_nan = value != value
    has_nan = _most(is_nan.to(tl.int32)) > 0
    high = _or_nan(_most(tl.where(is_nan, float("-inf"), value)), has_nan)
    low = _or_nan(-_most(tl.where(is_nan, float("-inf"), -value)), has_nan)
    pinned = _most((value == 0.0).to(tl.int32)) > 0
    step = tl.div_rn(high, TOP) - tl.div_rn(low, TOP)
    step = tl.where(step < floor, floor, step)
    centre = low * 0.5 + high * 0.5
    zero = tl.div_rn(-low, step)
    zero = _or_nan(_nearest(tl.minimum(tl.maximum(zero, 0.0), TOP)) + 0.0, zero != zero)
    if STOCHASTIC:
        inner = tl.minimum(tl.maximum(zero, 1.0), TOP - 1.0)
        zero = tl.where((low < 0.0) & (high > 0.0), inner, zero)
        below = tl.div_rn(-low, tl.maximum(zero, 1.0))
        above = tl.div_rn(high, tl.maximum(TOP - zero, 1.0))
        cover = _or_nan(tl.maximum(tl.maximum(below, above), floor), has_nan)
        step = tl.where(pinned, cover, step)
    shift = tl.where(pinned, 0.0, centre)
    origin = tl.where(pinned, zero, TOP * 0.5)
    scaled = (value - shift) * tl.div_rn(1.0, step) + origin
    lost = scaled != scaled
    if STOCHASTIC:
        whole = tl.floor(scaled)
        scaled = whole + tl.where(scaled - whole > uniform(index, seed), 1.0, 0.0)
        code = tl.minimum(tl.maximum(scaled, 0.0), TOP)
    else:
        code = _nearest(tl.minimum(tl.maximum(scaled, 0.0), TOP))
    store_codes(codes, tl.where(lost, 0.0, code).to(tl.int32), row, groups, BITS, A, B, C)
    first = tl.reshape(tl.where(pinned, zero, centre), (ROWS,))
    second = tl.reshape(tl.where(pinned, -step, step), (ROWS,))
    tl.store(scales + 2 * row, first, mask=row < groups)
    tl.store(scales + 2 * row + 1, second, mask=row < groups)


@triton.jit
def _unpack_minmax(
    codes, scales, out, numel, groups, limit,
    BITS: tl.constexpr, ROWS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = own_rows(ROWS)
    code = load_codes(codes, row, groups, BITS, A, B, C).to(tl.float32)
    offset = tl.load(scales + 2 * row, mask=row < groups, other=0.0)[:, None, None, None]
    step = tl.load(scales + 2 * row + 1, mask=row < groups, other=1.0)[:, None, None, None]
    pinned = step < 0.0
    origin = tl.where(pinned, offset, ((1 << BITS) - 1.0) * 0.5)
    value = (code - origin) * tl.abs(step) + tl.where(pinned, 0.0, offset)
    value = _within(value, limit)
    index = elements(row, A, B, C)
    tl.store(out + index, rounded(value, out.dtype.element_ty), mask=index < numel)


def pack_zero(flat: Tensor, bits: int, stochastic: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Codes, and one scale a group."""
    if flat.dtype not in READABLE or flat.numel() == 0:
        return _groups.pack_zero(flat, bits, stochastic, seed)
    return _pack(_pack_zero, flat, bits, stochastic, seed, 1)


def pack_minmax(flat: Tensor, bits: int, stochastic: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Codes, and (offset, step) a group."""
    if flat.dtype not in READABLE or flat.numel() == 0:
        return _groups.pack_minmax(flat, bits, stochastic, seed)
    return _pack(_pack_minmax, flat, bits, stochastic, seed, 2)


def _pack(
    kernel: triton.JITFunction, flat: Tensor, bits: int, stochastic: bool, seed: int, count: int
) -> tuple[Tensor, Tensor]:
    groups = group_count(flat.numel())
    codes = flat.new_empty(groups * 32 * bits, dtype=torch.uint8)
    scales = flat.new_empty(groups * count, dtype=torch.float32)
    floor = _groups.FLOORS[flat.dtype]
    arguments = (flat, codes, scales, flat.numel(), groups, floor, seed & 0xFFFFFFFF)
    launch(kernel, arguments, groups, bits, STOCHASTIC=stochastic)
    return codes, scales


def unpack_zero(codes: Tensor, scales: Tensor, bits: int, stochastic: bool, out: Tensor) -> None:
    """The inverse of ``pack_zero``, into ``out``."""
    if out.dtype not in READABLE or out.numel() == 0:
        return _groups.unpack_zero(codes, scales, bits, stochastic, out)
    groups, limit = scales.numel(), torch.finfo(out.dtype).max
    arguments = (codes, scales, out, out.numel(), groups, limit)
    launch(_unpack_zero, arguments, groups, bits, STOCHASTIC=stochastic)


def unpack_minmax(codes: Tensor, scales: Tensor, bits: int, out: Tensor) -> None:
    """The inverse of ``pack_minmax``, into ``out``."""
    if out.dtype not in READABLE or out.numel() == 0:
        return _groups.unpack_minmax(codes, scales, bits, out)
    groups, limit = scales.numel() // 2, torch.finfo(out.dtype).max
    launch(_unpack_minmax, (codes, scales, out, out.numel(), groups, limit), groups, bits)
