"""Loops of the one-bit codecs and of pool indices."""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import numpy as np

from squeezebox.codecs._cpu._blocks import BLOCK, copy, load
from squeezebox.codecs._cpu._lanes import pack_bits, pack_lanes, unpack_lanes
from squeezebox.codecs._cpu._lanes import unpack_bits as unpack_byte_lanes
from squeezebox.codecs._cpu._numba import kernel, part


@part
def _fill(bits, count):
    for i in range(count, BLOCK):
        bits[i] = np.uint8(0)


@kernel
def pack_nonzero(flat, value, negative, block, integers, packed, first, last):
    """Bits of ``x == value``; the number of elements that are neither that nor a zero of this sign."""
    bits = np.empty(BLOCK, np.uint8)
    zero = block.dtype.type(0)
    others = np.int64(0)
    for group in range(first, last):
        source = flat[group * BLOCK : (group + 1) * BLOCK]
        load(source, block, integers)
        strange = np.int32(0)
        for i in range(BLOCK):
            bits[i] = np.uint8(block[i] == value)
            other_zero = (block[i] == zero) & ((integers[i] >= 0) != negative)
            strange += np.int32((block[i] != value) & (not other_zero))
        _fill(bits, source.size)
        pack_bits(bits, np.uint8(0), packed[group * 32 : (group + 1) * 32])
        others += strange
    return others


@kernel
def pack_positive(flat, block, integers, packed, first, last):
    """Bits of ``not (x <= 0)``."""
    bits = np.empty(BLOCK, np.uint8)
    zero = block.dtype.type(0)
    for group in range(first, last):
        source = flat[group * BLOCK : (group + 1) * BLOCK]
        load(source, block, integers)
        for i in range(BLOCK):
            bits[i] = np.uint8(not (block[i] <= zero))
        _fill(bits, source.size)
        pack_bits(bits, np.uint8(0), packed[group * 32 : (group + 1) * 32])


@kernel
def pack_between(flat, lower, upper, inclusive, block, integers, packed, first, last):
    """Bits of ``lower <= x <= upper``, or of ``not (x <= lower or x >= upper)``."""
    bits = np.empty(BLOCK, np.uint8)
    for group in range(first, last):
        source = flat[group * BLOCK : (group + 1) * BLOCK]
        load(source, block, integers)
        for i in range(BLOCK):
            closed = np.uint8((block[i] >= lower) & (block[i] <= upper))
            opened = np.uint8(not ((block[i] <= lower) | (block[i] >= upper)))
            bits[i] = closed if inclusive else opened
        _fill(bits, source.size)
        pack_bits(bits, np.uint8(0), packed[group * 32 : (group + 1) * 32])


@kernel
def unpack_bits(packed, zero, one, out, first, last):
    """Bit patterns ``one`` where the bit is set, else ``zero``."""
    bits = np.empty(BLOCK, np.uint8)
    for group in range(first, last):
        unpack_byte_lanes(packed[group * 32 : (group + 1) * 32], bits)
        target = out[group * BLOCK : (group + 1) * BLOCK]
        for i in range(target.size):
            target[i] = one if bits[i] else zero


@kernel
def pack_codes(codes, bits, packed, first, last):
    """Codes of one byte to lanes of ``bits`` bits."""
    filled = np.zeros(BLOCK, np.uint8)
    width = 32 * bits
    for group in range(first, last):
        source = codes[group * BLOCK : (group + 1) * BLOCK]
        target = packed[group * width : (group + 1) * width]
        if source.size == BLOCK:
            pack_lanes(source, bits, target)
        else:
            copy(source, filled[: source.size])
            pack_lanes(filled, bits, target)


@kernel
def unpack_codes(packed, bits, codes, first, last):
    """The inverse of ``pack_codes``."""
    filled = np.empty(BLOCK, np.uint8)
    width = 32 * bits
    for group in range(first, last):
        target = codes[group * BLOCK : (group + 1) * BLOCK]
        unpack_lanes(packed[group * width : (group + 1) * width], bits, filled)
        copy(filled, target)


@part
def _places_of(source, base, places, codes):
    missing = np.int64(0)
    for i in range(source.size):
        codes[i] = np.uint8(255)
    for place in range(places.size):
        for i in range(source.size):
            codes[i] = np.uint8(place) if source[i] - base[i] == places[place] else codes[i]
    for i in range(source.size):
        missing += np.int64(codes[i] == np.uint8(255)) & np.int64(source[i] - base[i] != places[-1])
    return missing


@kernel
def pack_offsets(indices, base, places, inner, codes, first, last):
    """The place of each index in its window, planes ``first`` to ``last``; how many lie in none."""
    positions = base.size
    same = np.empty(inner, np.int64)
    missing = np.int64(0)
    for plane in range(first, last):
        start = plane * positions * inner
        if inner == 1:
            end = start + positions
            missing += _places_of(indices[start:end], base, places, codes[start:end])
            continue
        for position in range(positions):
            begin = start + position * inner
            for i in range(inner):
                same[i] = base[position]
            end = begin + inner
            missing += _places_of(indices[begin:end], same, places, codes[begin:end])
    return missing


@kernel
def unpack_offsets(codes, base, places, inner, out, first, last):
    """The inverse of ``pack_offsets``."""
    positions = base.size
    for plane in range(first, last):
        for position in range(positions):
            begin = (plane * positions + position) * inner
            for i in range(begin, begin + inner):
                out[i] = base[position] + places[codes[i]]
