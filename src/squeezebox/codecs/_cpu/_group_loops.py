"""Loops over groups of 256: codes of few bits, flags, pool indices, `zero*` and `minmax*`."""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import numpy as np

from squeezebox.codecs._cpu._parts import magnitude_mask, mirrored, order, whole_block
from squeezebox.codecs._kernels import kernel, kernel_part
from squeezebox.codecs._reference._groups import GROUP

_ONES = np.uint64(0x0101010101010101)


@kernel_part
def _pack(codes, shift, bits, packed):
    """Lanes of the ``bits`` bits at ``shift`` of 256 codes; eight codes are a 64-bit word."""
    keep, words = _ONES * np.uint64((1 << bits) - 1), np.uint64(4 * bits)
    for i in range(words):
        held = np.uint64(0)
        for lane in range(np.uint64(8 // bits)):
            code = (codes[lane * words + i] >> np.uint64(shift)) & keep
            held |= code << (lane * np.uint64(bits))
        packed[i] = held


@kernel_part
def _unpack(packed, shift, bits, codes):
    """The inverse of ``_pack``, added to what is there."""
    keep, words = _ONES * np.uint64((1 << bits) - 1), np.uint64(4 * bits)
    for i in range(words):
        held = packed[i]
        for lane in range(np.uint64(8 // bits)):
            code = (held >> (lane * np.uint64(bits))) & keep
            codes[lane * words + i] |= code << np.uint64(shift)


@kernel
def pack_codes(codes, bits, target, space):
    """Codes of one byte to lanes of ``bits`` bits, as ``_reference._groups`` lays them out.

    ``target`` is of 64-bit words; ``space`` is scratch: a group's codes as such words, and as bytes. A true
    boolean may be any byte but 0, and is 1.
    """
    (filled, room), width, most = space, 4 * bits, np.uint8((1 << bits) - 1)
    for group in range(target.size // width):
        source = codes[group * GROUP : (group + 1) * GROUP]
        for i in range(GROUP):
            room[i] = min(source[i], most) if i < source.size else np.uint8(0)
        own = target[group * width : (group + 1) * width]
        low = 2 if bits == 3 else bits
        _pack(filled, 0, low, own)
        if bits == 3:
            _pack(filled, 2, 1, own[8:])


@kernel
def unpack_codes(source, bits, codes, space):
    """The inverse of ``pack_codes``."""
    (filled, room), width = space, 4 * bits
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


@kernel_part
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


@kernel_part
def _uniform(first, seed, noise):
    """256 numbers in [0, 1) for the elements from ``first`` on, as ``_reference._groups``."""
    scale = noise.dtype.type(2.0**-24)
    base = np.uint32(np.uint64(seed) + (np.uint64(first) >> np.uint64(32)) * np.uint64(0x632BE5AB))
    start = np.uint32(first)
    for i in range(GROUP):
        hashed = np.uint32(np.uint32(np.uint32(start + np.uint32(i)) * np.uint32(0x9E3779B1)) + base)
        hashed = np.uint32(hashed ^ (hashed >> np.uint32(16)))
        hashed = np.uint32(hashed * np.uint32(0x7FEB352D))
        hashed = np.uint32(hashed ^ (hashed >> np.uint32(15)))
        hashed = np.uint32(hashed * np.uint32(0x846CA68B))
        hashed = np.uint32(hashed ^ (hashed >> np.uint32(16)))
        noise[i] = noise.dtype.type(np.int32(hashed >> np.uint32(8))) * scale


@kernel_part
def _peak(block, bits):
    """Bits of the largest magnitude (NaN and infinity win) and whether any element is negative."""
    mask = magnitude_mask(bits)
    largest = bits.dtype.type(0)
    negative = bits.dtype.type(0)
    zero = block.dtype.type(0)
    for i in range(GROUP):
        largest = bits.dtype.type(max(largest, bits.dtype.type(bits[i] & mask)))
        negative = bits.dtype.type(negative | bits.dtype.type(block[i] < zero))
    return largest, negative != 0


@kernel_part
def _zero_codes(block, noise, inverse, levels, stochastic, keep, codes):
    zero, one = block.dtype.type(0), block.dtype.type(1)
    for i in range(GROUP):
        value = block[i]
        scaled = abs(value) * inverse
        whole = np.floor(scaled)
        near = zero if value == zero else max(np.ceil(scaled), one)
        code = (whole + one if scaled - whole > noise[i] else whole) if stochastic else near
        code = min(code, levels)
        code = -code if value < zero else code
        codes[i] = np.uint8(np.int32(code)) & keep


@kernel
def pack_zero(values, start, bits, stochastic, seed, floor, space, codes, scales):
    """``_reference._groups.pack_zero`` without lanes, from element ``start`` on.

    ``space`` is scratch: two groups, two numbers, and their integer view.
    """
    room, noise, one, pattern = space
    keep = np.uint8((1 << bits) - 1)
    for group in range(scales.size):
        block = whole_block(values[group * GROUP : (group + 1) * GROUP], room)
        pattern[0], signed = _peak(block, block.view(pattern.dtype))
        peak = floor if one[0] < floor else one[0]  # NaN stays
        levels = room.dtype.type((1 << (bits - 1)) - 1 if signed else (1 << bits) - 1)
        if stochastic:
            _uniform(start + group * GROUP, seed, noise)
        own = codes[group * GROUP : (group + 1) * GROUP]
        _zero_codes(block, noise, levels / peak, levels, stochastic, keep, own)
        scales[group] = -peak if signed else peak


@kernel
def unpack_zero(codes, scales, bits, stochastic, limit, values):
    """The inverse of ``pack_zero``."""
    zero, shift = values.dtype.type(0), values.dtype.type(0.0 if stochastic else 0.5)
    for group in range(scales.size):
        source = codes[group * GROUP : (group + 1) * GROUP]
        target = values[group * GROUP : (group + 1) * GROUP]
        scale = scales[group]
        half = np.int32(1 << (bits - 1)) if scale < 0 else np.int32(0)
        levels = values.dtype.type((1 << (bits - 1)) - 1 if scale < 0 else (1 << bits) - 1)
        step = abs(scale) / levels
        for i in range(target.size):
            value = values.dtype.type(np.int32((np.int32(source[i]) ^ half) - half))
            inward = shift if value > zero else -shift
            value = (value - inward) * step if value != zero else zero
            target[i] = min(max(value, -limit), limit)


@kernel_part
def _extent(integers):
    """Bits of the smallest and largest element, and whether any is zero; NaN counts as outermost."""
    first = mirrored(integers, integers[0])
    low, high = order(integers, first, first)
    mask, nought = magnitude_mask(integers), integers.dtype.type(0)
    zeros = nought
    for i in range(GROUP):
        is_zero = integers.dtype.type(integers[i] & mask) == nought
        zeros = integers.dtype.type(zeros | integers.dtype.type(is_zero))
    return mirrored(integers, low), mirrored(integers, high), zeros != nought


@kernel_part
def _grid(edges, pinned, top, stochastic, floor):
    """(offset, step) of a group, as ``_reference/_groups.py`` chooses them; NaN stays NaN."""
    low, high = edges[0], edges[1]
    nought, one, half = edges.dtype.type(0), edges.dtype.type(1), edges.dtype.type(0.5)
    step = high / top - low / top
    step = floor if step < floor else step
    if not pinned:
        return low * half + high * half, step
    zero = min(max(np.rint(-low / step), nought), top) + nought
    if stochastic:
        if low < nought and high > nought:
            zero = min(max(zero, one), top - one)
        step = max(-low / max(zero, one), high / max(top - zero, one))
        step = floor if step < floor else step
    return zero, step


@kernel_part
def _minmax_codes(block, noise, shift, inverse, origin, top, stochastic, codes):
    zero, one = block.dtype.type(0), block.dtype.type(1)
    for i in range(GROUP):
        scaled = (block[i] - shift) * inverse + origin
        whole = np.floor(scaled)
        code = (whole + one if scaled - whole > noise[i] else whole) if stochastic else np.rint(scaled)
        codes[i] = np.uint8(np.int32(min(max(code, zero), top)))


@kernel
def pack_minmax(values, start, bits, stochastic, seed, floor, space, codes, scales):
    """``_reference._groups.pack_minmax`` without lanes, from element ``start`` on."""
    room, noise, edges, edge_bits = space
    zero, one = room.dtype.type(0), room.dtype.type(1)
    top = room.dtype.type((1 << bits) - 1)
    for group in range(scales.size // 2):
        block = whole_block(values[group * GROUP : (group + 1) * GROUP], room)
        edge_bits[0], edge_bits[1], pinned = _extent(block.view(edge_bits.dtype))
        offset, step = _grid(edges, pinned, top, stochastic, floor)
        shift, origin = (zero, offset) if pinned else (offset, top * room.dtype.type(0.5))
        if stochastic:
            _uniform(start + group * GROUP, seed, noise)
        own = codes[group * GROUP : (group + 1) * GROUP]
        _minmax_codes(block, noise, shift, one / step, origin, top, stochastic, own)
        scales[2 * group], scales[2 * group + 1] = offset, -step if pinned else step


@kernel
def unpack_minmax(codes, scales, bits, limit, values):
    """The inverse of ``pack_minmax``."""
    middle = values.dtype.type(((1 << bits) - 1) * 0.5)
    for group in range(scales.size // 2):
        source = codes[group * GROUP : (group + 1) * GROUP]
        target = values[group * GROUP : (group + 1) * GROUP]
        offset, step = scales[2 * group], scales[2 * group + 1]
        shift = values.dtype.type(0) if step < 0 else offset
        origin = offset if step < 0 else middle
        for i in range(target.size):
            value = (values.dtype.type(np.int32(source[i])) - origin) * abs(step) + shift
            target[i] = min(max(value, -limit), limit)
