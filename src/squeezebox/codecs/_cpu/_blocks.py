"""Blocks of elements in the innermost cache: any float dtype in, float32 or float64 to compute with.

numba knows neither bfloat16 nor float16: they travel as uint16 and int16 arrays and are converted here by
integer arithmetic, rounding to nearest even as torch does.
"""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from squeezebox.codecs._cpu._numba import part

BLOCK = 256
HALF_SCALE = np.float32(2.0**112)
HALF_MAGIC = np.uint32(126 << 23)


def _convert(source, block, bits):
    """Element dtype to computing dtype; chosen by dtype in ``_convert_for``."""
    raise NotImplementedError


@overload(_convert)
def _convert_for(source, block, bits):
    if source.dtype == types.uint16:
        return _from_bfloat16
    if source.dtype == types.int16:
        return _from_float16
    return _plain


def _plain(source, block, bits):
    for i in range(source.size):
        block[i] = source[i]


def _from_bfloat16(source, block, bits):
    for i in range(source.size):
        bits[i] = np.int32(np.uint32(source[i]) << np.uint32(16))


def _from_float16(source, block, bits):
    for i in range(source.size):
        bits[i] = (np.int32(source[i]) & np.int32(0x7FFF)) << np.int32(13)
    for i in range(source.size):
        block[i] = block[i] * HALF_SCALE
    for i in range(source.size):
        half = np.int32(source[i])
        special = np.int32(0x7F800000) if (half & np.int32(0x7FFF)) >= np.int32(0x7C00) else np.int32(0)
        bits[i] = bits[i] | special | (half & np.int32(-0x8000)) << np.int32(16)


def _emit(block, bits, target):
    """Computing dtype to element dtype; chosen by dtype in ``_emit_for``."""
    raise NotImplementedError


@overload(_emit)
def _emit_for(block, bits, target):
    if target.dtype == types.uint16:
        return _to_bfloat16
    if target.dtype == types.int16:
        return _to_float16
    return _plain_out


def _plain_out(block, bits, target):
    for i in range(target.size):
        target[i] = block[i]


def _to_bfloat16(block, bits, target):
    for i in range(target.size):
        pattern = np.uint32(bits[i])
        odd = (pattern >> np.uint32(16)) & np.uint32(1)
        target[i] = np.uint16(np.uint32(pattern + np.uint32(0x7FFF) + odd) >> np.uint32(16))


def _to_float16(block, bits, target):
    small = np.empty(target.size, np.float32)
    small_bits = small.view(np.uint32)
    for i in range(target.size):
        small[i] = abs(block[i]) + np.float32(0.5)
    for i in range(target.size):
        pattern = np.uint32(bits[i])
        size = pattern & np.uint32(0x7FFFFFFF)
        odd = (size >> np.uint32(13)) & np.uint32(1)
        normal = np.uint32(size + np.uint32(0xC8000FFF) + odd) >> np.uint32(13)
        half = np.uint32(small_bits[i] - HALF_MAGIC) if size < np.uint32(113 << 23) else np.uint32(normal)
        half = np.uint32(0x7C00) if size >= np.uint32(143 << 23) else half
        target[i] = np.int16(np.int32(half | ((pattern >> np.uint32(16)) & np.uint32(0x8000))))


@part
def magnitude_mask(bits):
    """All bits but the sign, in the type of ``bits``."""
    return bits.dtype.type(0x7FFFFFFF if bits.itemsize == 4 else 0x7FFFFFFFFFFFFFFF)


@part
def order(bits, low, high):
    """``low`` and ``high`` widened by a block, compared as integers in the order of the floats.

    A float's bits are in the floats' order once those of negatives are mirrored; NaN lies outermost.
    """
    mask = magnitude_mask(bits)
    shift = bits.dtype.type(8 * bits.itemsize - 1)
    for i in range(bits.size):
        mirror = bits.dtype.type(bits.dtype.type(bits[i] >> shift) & mask)
        key = bits.dtype.type(bits[i] ^ mirror)
        low = bits.dtype.type(min(low, key))
        high = bits.dtype.type(max(high, key))
    return low, high


@part
def mirrored(bits, key):
    """The bits of a float with this place in the order, or the place of a float with these bits."""
    return bits.dtype.type(key ^ ((key >> (8 * bits.itemsize - 1)) & magnitude_mask(bits)))


@part
def copy(source, target):
    """All of ``target``, an element at a time: ``target[:] = source`` takes numba seconds to compile."""
    for i in range(target.size):
        target[i] = source[i]


@part
def load(source, block, bits):
    """Fill ``block`` (``bits`` is its integer view), repeating the last element where the source is short."""
    _convert(source, block, bits)
    for i in range(source.size, block.size):
        block[i] = block[source.size - 1]


def _whole(source, block, bits):
    """The source itself where it can be computed with, else ``block`` loaded with it."""
    raise NotImplementedError


@overload(_whole)
def _whole_for(source, block, bits):
    return _as_it_is if source.dtype == block.dtype else _loaded


def _as_it_is(source, block, bits):
    if source.size == block.size:
        return source
    load(source, block, bits)
    return block


def _loaded(source, block, bits):
    load(source, block, bits)
    return block


def _round(block, bits, rounded):
    """Pass a block through another dtype; chosen by dtype in ``_round_for``."""
    raise NotImplementedError


@overload(_round)
def _round_for(block, bits, rounded):
    return _not_at_all if rounded.dtype == block.dtype else _there_and_back


def _not_at_all(block, bits, rounded):
    pass


def _there_and_back(block, bits, rounded):
    store(block, bits, rounded)
    load(rounded, block, bits)


@part
def whole_block(source, block, bits):
    """Elements to compute with: ``source`` if it is whole and of that dtype, else ``block`` loaded."""
    return _whole(source, block, bits)


@part
def round_block(block, bits, rounded):
    """``block`` as it will be after rounding to the dtype of ``rounded`` (scratch of the same size)."""
    _round(block, bits, rounded)


@part
def store(block, bits, target):
    """The first ``target.size`` elements of ``block``, rounded to the target's dtype."""
    _emit(block, bits, target)
