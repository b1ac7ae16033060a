"""`zero*` and `minmax*` in one pass each way: one read of the tensor, one write of the codes.

Every kernel computes what the function of the same name in ``_reference._groups`` does, to the bit: divisions
round to nearest, multiplications and additions are not fused, NaN is carried by hand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from squeezebox.codecs._reference import _groups
from squeezebox.codecs._reference._bits import group_count
from squeezebox.codecs._triton._cast import rounded
from squeezebox.codecs._triton._lanes import elements, load_codes, own_rows, store_codes
from squeezebox.codecs._triton._launch import READABLE, launch
from squeezebox.codecs._triton._random import uniform


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
