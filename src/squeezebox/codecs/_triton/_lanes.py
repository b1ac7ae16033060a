"""Codes of a few bits to bytes and back, as ``_reference._bits`` orders them, inside other kernels.

A program works ROWS groups of 256 elements, seen as [ROWS, A, B, C]: the bytes of a group hold the elements
with the same b and c, a after a. For 3 bits B is 2, so that the plane of 1 bit falls out of the same shape.
"""

from __future__ import annotations

import triton
import triton.language as tl

PROGRAM_ROWS = 8


@triton.jit
def own_rows(ROWS: tl.constexpr):
    """The groups of this program."""
    return (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)


@triton.jit
def elements(row, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """Index in memory order of every element of these groups."""
    a = tl.arange(0, A)[None, :, None, None]
    b = tl.arange(0, B)[None, None, :, None]
    c = tl.arange(0, C)[None, None, None, :]
    return row[:, None, None, None] * 256 + (a * B + b) * C + c


@triton.jit
def store_codes(
    packed, code, row, groups, BITS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr
):
    """Write int32 codes [ROWS, A, B, C] below 2^BITS as bytes."""
    a = tl.arange(0, A)[None, :, None, None]
    b = tl.arange(0, B)
    c = tl.arange(0, C)
    whole = row[:, None, None] * (32 * BITS) + b[None, :, None] * C + c[None, None, :]
    if BITS == 3:
        low = tl.sum((code & 3) << (2 * a), axis=1)
        high = tl.sum((code >> 2) << (2 * a + b[None, None, :, None]), axis=1)
        tail = row[:, None] * 96 + 64 + c[None, :]
        tl.store(packed + tail, tl.sum(high, axis=1).to(tl.uint8), mask=row[:, None] < groups)
    else:
        low = tl.sum(code << (BITS * a), axis=1)
    tl.store(packed + whole, low.to(tl.uint8), mask=row[:, None, None] < groups)


@triton.jit
def load_codes(packed, row, groups, BITS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """The inverse of ``store_codes``."""
    a = tl.arange(0, A)[None, :, None, None]
    b = tl.arange(0, B)[None, None, :, None]
    c = tl.arange(0, C)[None, None, None, :]
    first = row[:, None, None, None]
    low = tl.load(packed + first * (32 * BITS) + b * C + c, mask=first < groups, other=0).to(tl.int32)
    if BITS == 3:
        high = tl.load(packed + first * 96 + 64 + c, mask=first < groups, other=0).to(tl.int32)
        return ((low >> (2 * a)) & 3) | (((high >> (2 * a + b)) & 1) << 2)
    return (low >> (BITS * a)) & ((1 << BITS) - 1)
