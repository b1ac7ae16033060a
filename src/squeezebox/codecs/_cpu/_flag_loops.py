"""Loops of the one-bit codecs, of codes of a few bits, and of pool indices."""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import numpy as np

from squeezebox.codecs._cpu._numba import kernel, part
from squeezebox.codecs._reference._bits import GROUP

_ONES = np.uint64(0x0101010101010101)


@part
def _pack(codes, shift, bits, packed):
    """Lanes of the ``bits`` bits at ``shift`` of 256 codes; eight codes are a 64-bit word."""
    keep, words = _ONES * np.uint64((1 << bits) - 1), np.uint64(4 * bits)
    for i in range(words):
        held = np.uint64(0)
        for lane in range(np.uint64(8 // bits)):
            code = (codes[lane * words + i] >> np.uint64(shift)) & keep
            held |= code << (lane * np.uint64(bits))
        packed[i] = held


@part
def _unpack(packed, shift, bits, codes):
    """The inverse of ``_pack``, added to what is there."""
    keep, words = _ONES * np.uint64((1 << bits) - 1), np.uint64(4 * bits)
    for i in range(words):
        held = packed[i]
        for lane in range(np.uint64(8 // bits)):
            code = (held >> (lane * np.uint64(bits))) & keep
            codes[lane * words + i] |= code << np.uint64(shift)


@kernel
def pack_codes(codes, bits, packed):
    """Codes of one byte to lanes of ``bits`` bits, as ``_reference._bits`` lays them out."""
    filled, width = np.empty(GROUP // 8, np.uint64), 4 * bits
    room, target = filled.view(np.uint8), packed.view(np.uint64)
    for group in range(target.size // width):
        source = codes[group * GROUP : (group + 1) * GROUP]
        for i in range(GROUP):
            room[i] = source[i] if i < source.size else np.uint8(0)
        own = target[group * width : (group + 1) * width]
        low = 2 if bits == 3 else bits
        _pack(filled, 0, low, own)
        if bits == 3:
            _pack(filled, 2, 1, own[8:])


@kernel
def unpack_codes(packed, bits, codes):
    """The inverse of ``pack_codes``."""
    filled, width = np.empty(GROUP // 8, np.uint64), 4 * bits
    room, source = filled.view(np.uint8), packed.view(np.uint64)
    for group in range(source.size // width):
        for i in range(filled.size):
            filled[i] = np.uint64(0)
        own = source[group * width : (group + 1) * width]
        low = 2 if bits == 3 else bits
        _unpack(own, 0, low, filled)
        if bits == 3:
            _unpack(own[8:], 2, 1, filled)
        target = codes[group * GROUP : (group + 1) * GROUP]
        for i in range(target.size):
            target[i] = room[i]


@kernel
def between(values, bits, lower, upper, inclusive, other, codes):
    """1 for ``lower <= x <= upper``, or for ``not (x <= lower or x >= upper)``, else 0.

    Returns:
        Whether the bits of all others are ``other``.
    """
    strange = bits.dtype.type(0)
    for i in range(values.size):
        closed = (values[i] >= lower) & (values[i] <= upper)
        opened = not ((values[i] <= lower) | (values[i] >= upper))
        inside = closed if inclusive else opened
        codes[i] = np.uint8(inside)
        strange |= bits.dtype.type(0) if inside else bits.dtype.type(bits[i] ^ other)
    return strange == 0


@kernel
def choose(codes, zero, one, values):
    """One of two values for each code."""
    for i in range(values.size):
        values[i] = one if codes[i] else zero


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
    same = np.empty(positions * inner, np.int64)
    for position in range(positions):
        for i in range(position * inner, (position + 1) * inner):
            same[i] = base[position]
    missing = np.int64(0)
    for plane in range(first, last):
        start, end = plane * same.size, (plane + 1) * same.size
        missing += _places_of(indices[start:end], same, places, codes[start:end])
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
