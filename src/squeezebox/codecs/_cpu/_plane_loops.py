"""Loops of `planes`: a block's range, its codes, and the codes of w bits in w bytes a lane.

A block is 8 rows of 32 codes. Rows travel as four 64-bit words, so that one shift moves the codes of eight
lanes, and the width is a number instead of a reason to compile (vertical layout: Afroozeh and Boncz, PVLDB
16(9), 2023).

What makes them fast: loops of one kind of work each, which compilers vectorise where all numbers have 32 bits
(numba adds two of int32 in int64, hence the conversions), and unsigned indices, which are not looked up from
the end.
"""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import numpy as np

from squeezebox.codecs._cpu._parts import spread, whole_block
from squeezebox.codecs._kernels import kernel, kernel_part
from squeezebox.codecs._reference._planes import BLOCK, LANES, LEAST, MOST, RAW, WIDTH_BITS

_WORDS = LANES // 8  # 64-bit words of a row
_ONES = np.uint64(0x0101010101010101)
_BYTE = np.uint64(0xFF)


@kernel_part
def _quantise(values, inverses, ahead, codes):
    """Codes of a block, whether one has none, the least and the largest."""
    zero, far = values.dtype.type(0), values.dtype.type(MOST + 1)
    misses, low, high = np.int32(0), np.int32(MOST), np.int32(LEAST)
    for i in range(BLOCK):
        value = values[i]
        steps = value * inverses[i]
        near = abs(steps) < far  # false for NaN
        moved = ahead if value > zero else -ahead
        moved = moved if value != zero else zero
        codes[i] = np.int32(np.rint((steps if near else zero) + moved))
        misses = max(misses, np.int32(0) if near else np.int32(1))
    for i in range(BLOCK):
        low, high = min(low, codes[i]), max(high, codes[i])
    return misses != 0, low, high


@kernel_part
def _pack_lanes(rows, width, out):
    """Eight rows of codes below 2^width as width rows of bytes."""
    wide, whole = np.uint64(width), np.uint64(8)
    for word in range(_WORDS):
        at, shift, held = np.uint64(word), np.uint64(0), np.uint64(0)
        for row in range(8):
            code = rows[np.uint64(_WORDS * row + word)]
            held |= (code << shift) & (_ONES * ((_BYTE << shift) & _BYTE))
            out[at] = held
            shift += wide
            if shift >= whole:  # the byte is full, and the next begins with what is left of the code
                shift -= whole
                held = (code >> (wide - shift)) & (_ONES * (_BYTE >> (whole - shift)))
                at += np.uint64(_WORDS)


@kernel_part
def _unpack_lanes(packed, width, rows):
    """The inverse of ``_pack_lanes``."""
    wide, whole = np.uint64(width), np.uint64(8)
    keep, end = _ONES * ((np.uint64(1) << wide) - np.uint64(1)), np.uint64(_WORDS * width)
    for word in range(_WORDS):
        at, shift, held = np.uint64(word), np.uint64(0), packed[np.uint64(word)]
        for row in range(8):
            code = (held >> shift) & (_ONES * (_BYTE >> shift))
            back = whole - shift
            shift += wide
            if shift >= whole:
                shift -= whole
                at += np.uint64(_WORDS)
                if at < end:
                    held = packed[at]
                    code |= (held << back) & (_ONES * ((_BYTE << back) & _BYTE))
            rows[np.uint64(_WORDS * row + word)] = code & keep


@kernel
def pack(source, raw, start, inverses, inner, ahead, most, space, heads, out, words):
    """Bytes of ``out`` that the blocks of ``source`` take.

    ``raw`` are the elements' own bytes, ``words`` those of ``out``, 64 bits each; ``space`` is scratch: a
    block, its inverse steps, codes, bytes, and such words of these.
    """
    block, own, codes, lanes, rows = space
    item, taken = raw.size // source.size, 0
    for number in range(heads.size):
        first = number * BLOCK
        values = whole_block(source[first : first + BLOCK], block)
        if number == 0 or inverses.size > 1:
            spread(inverses, inner, start + first, own)
        misses, low, high = _quantise(values, own, ahead, codes)
        if misses or low < -most - 1 or high > most:
            heads[number] = RAW
            end = raw.size - first * item
            for i in range(BLOCK * item):
                out[taken + i] = raw[first * item + (i if i < end else end - item + i % item)]
            taken += BLOCK * item
            continue
        width = 0
        while (high - low) >> width:
            width += 1
        heads[number] = np.int16(low << WIDTH_BITS | width)
        at = taken // 8
        for shift in range(0, width, 8):
            for i in range(BLOCK):
                lanes[i] = np.uint8(np.int32(codes[i] - low) >> np.int32(shift))
            _pack_lanes(rows, min(width - shift, 8), words[at : at + _WORDS * min(width - shift, 8)])
            at += BLOCK // 8
        taken += LANES * width
    return taken


@kernel
def unpack(heads, words, start, steps, inner, ahead, space, item, target):
    """The inverse of ``pack``, but for raw blocks, whose elements have ``item`` bytes: they are left out."""
    own, codes, lanes, rows = space
    zero, at = target.dtype.type(0), 0
    for number in range(heads.size):
        first = number * BLOCK
        head = np.int32(heads[number])
        low, width = head >> np.int32(WIDTH_BITS), int(head & RAW)
        if number == 0 or steps.size > 1:
            spread(steps, inner, start + first, own)
        if width == RAW:
            at += BLOCK * item // 8
            continue
        for i in range(BLOCK):
            codes[i] = low
        for shift in range(0, width, 8):
            wide = min(width - shift, 8)
            _unpack_lanes(words[at : at + _WORDS * wide], wide, rows)
            at += _WORDS * wide
            for i in range(BLOCK):
                codes[i] = np.int32(codes[i] + np.int32(np.int32(lanes[i]) << np.int32(shift)))
        whole = target[first : first + BLOCK]
        for i in range(whole.size):
            value = target.dtype.type(codes[i])
            moved = ahead if value > zero else -ahead
            moved = moved if value != zero else zero
            whole[i] = (value - moved) * own[i]
