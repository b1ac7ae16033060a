"""One bit an element, codes of few bits, and pool indices as places in their window."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from squeezebox.codecs._reference import _bits
from squeezebox.codecs._reference._bits import group_count
from squeezebox.codecs._triton._lanes import elements, load_codes, own_rows, store_codes
from squeezebox.codecs._triton._launch import READABLE, launch, spread


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
    store_codes(packed, code, row, groups, BITS, A, B, C)


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
        return _bits.pack_nonzero(flat, value, negative)
    groups = group_count(flat.numel())
    codes = flat.new_empty(groups * 32, dtype=torch.uint8)
    others = flat.new_zeros((), dtype=torch.int32)
    launch(_pack_nonzero, (flat, codes, others, flat.numel(), groups, value, int(negative)), groups, 1)
    return codes, others == 0


def pack_positive(flat: Tensor) -> Tensor:
    """Bits of ``not (x <= 0)``."""
    if flat.dtype not in READABLE or flat.numel() == 0:
        return _bits.pack_positive(flat)
    groups = group_count(flat.numel())
    codes = flat.new_empty(groups * 32, dtype=torch.uint8)
    launch(_pack_positive, (flat, codes, flat.numel(), groups), groups, 1)
    return codes


def pack_between(flat: Tensor, lower: float, upper: float, inclusive: bool) -> Tensor:
    """Bits of lying in an interval."""
    if flat.dtype not in READABLE or flat.numel() == 0:
        return _bits.pack_between(flat, lower, upper, inclusive)
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
        return _bits.unpack_bits(packed, zero, one, out)
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
