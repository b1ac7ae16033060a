"""Loops of `planes`: a block's range, its codes, and the codes of w bits in w bytes a lane.

A block is 8 rows of 32 codes. Rows travel as four 64-bit words, so that one shift moves the codes of eight
lanes, and the width is a number instead of a reason to compile (vertical layout: Afroozeh and Boncz, PVLDB
16(9), 2023).
"""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import numpy as np
from numba.extending import overload

from squeezebox.codecs._cpu._blocks import copy, store, whole_block
from squeezebox.codecs._cpu._numba import kernel, part
from squeezebox.codecs._cpu._quantise_loops import _own
from squeezebox.codecs._reference._planes import BLOCK, LANES, LEAST, MOST, RAW, WIDTH_BITS

_WORDS = LANES // 8  # 64-bit words of a row
_ONES = np.uint64(0x0101010101010101)
_BYTE = np.uint64(0xFF)


@part
def _quantise_run(values, inverse, ahead, codes):
    """Codes of neighbours, the least and the largest, and whether one has none."""
    zero, far = values.dtype.type(0), values.dtype.type(MOST + 1)
    low, high, misses = np.int32(MOST), np.int32(LEAST), np.int32(0)
    for i in range(values.size):
        value = values[i]
        steps = value * _own(inverse, i)
        near = abs(steps) < far  # false for NaN
        misses |= np.int32(not near)
        moved = ahead if value > zero else -ahead
        moved = moved if value != zero else zero
        code = np.int32(np.rint((steps if near else zero) + moved))
        low, high = min(low, code), max(high, code)
        codes[i] = code
    return low, high, misses


@part
def _quantise(values, start, inverses, inner, ahead, most, codes):
    """Codes of a block, the least one, and the width of the others above it."""
    low, high, misses, done = np.int32(MOST), np.int32(LEAST), np.int32(0), 0
    while done < values.size:
        channel = (start + done) // inner % inverses.size
        run = inverses.size - channel if inner == 1 else inner - (start + done) % inner
        end = min(done + run, values.size)
        here, there = values[done:end], codes[done:end]
        if inner == 1:
            found = _quantise_run(here, inverses[channel:], ahead, there)
        else:
            found = _quantise_run(here, inverses[channel], ahead, there)
        low, high, misses = min(low, found[0]), max(high, found[1]), misses | found[2]
        done = end
    width = 0
    while (high - low) >> width:
        width += 1
    return low, (RAW if misses or low < -most - 1 or high > most else width)


@part
def _bytes_above(codes, low, shift, out):
    for i in range(codes.size):
        out[i] = np.uint8((codes[i] - low) >> shift)


@part
def _pack_lanes(rows, width, out):
    """Eight rows of codes below 2^width as width rows of bytes."""
    a = b = c = d = np.uint64(0)
    at = 0
    for row in range(8):
        shift = np.uint64(row * width & 7)
        # Of each lane's code, ``keep`` has the bits for its current byte, and ``rest`` those for the next.
        keep = _ONES * ((_BYTE << shift) & _BYTE)
        first = row * _WORDS
        e, f, g, h = rows[first], rows[first + 1], rows[first + 2], rows[first + 3]
        a |= (e << shift) & keep
        b |= (f << shift) & keep
        c |= (g << shift) & keep
        d |= (h << shift) & keep
        if np.int64(shift) + width >= 8:
            out[at], out[at + 1], out[at + 2], out[at + 3] = a, b, c, d
            at += _WORDS
            back = np.uint64(8) - shift
            rest = _ONES * (_BYTE >> back)
            a, b, c, d = (e >> back) & rest, (f >> back) & rest, (g >> back) & rest, (h >> back) & rest


@part
def _unpack_lanes(packed, width, rows):
    """The inverse of ``_pack_lanes``."""
    keep = _ONES * np.uint64((1 << width) - 1)
    for row in range(8):
        shift = np.uint64(row * width & 7)
        at = (row * width >> 3) * _WORDS
        first = row * _WORDS
        mask = _ONES * (_BYTE >> shift)
        if np.int64(shift) + width <= 8:
            for word in range(_WORDS):
                rows[first + word] = (packed[at + word] >> shift) & mask & keep
        else:
            back = np.uint64(8) - shift
            rest = _ONES * ((_BYTE << back) & _BYTE)
            for word in range(_WORDS):
                low = (packed[at + word] >> shift) & mask
                rows[first + word] = (low | ((packed[at + _WORDS + word] << back) & rest)) & keep


@kernel
def pack(source, start, inverses, inner, ahead, most, space, heads, out):
    """Bytes of ``out`` that the blocks of ``source`` take; ``space``: scratch."""
    block, bits, codes, lanes = space
    rows = lanes.view(np.uint64)
    taken = 0
    for number in range(heads.size):
        first = number * BLOCK
        piece = source[first : first + BLOCK]
        values = whole_block(piece, block, bits)
        low, width = _quantise(values, start + first, inverses, inner, ahead, most, codes)
        heads[number] = np.int16(low << WIDTH_BITS | width) if width != RAW else RAW
        if width == RAW:
            raw = out[taken : taken + BLOCK * source.itemsize].view(source.dtype)
            copy(piece, raw[: piece.size])
            for i in range(piece.size, BLOCK):
                raw[i] = piece[piece.size - 1]
            taken += BLOCK * source.itemsize
        elif width:
            target = out[taken : taken + LANES * width].view(np.uint64)
            _bytes_above(codes, low, np.int32(0), lanes)
            _pack_lanes(rows, min(width, 8), target)
            if width > 8:
                _bytes_above(codes, low, np.int32(8), lanes)
                _pack_lanes(rows, width - 8, target[BLOCK // 8 :])
            taken += LANES * width
    return taken


def _target(piece, block):
    """Where to compute: the piece itself where it has the computing dtype; chosen in ``_target_for``."""
    raise NotImplementedError


@overload(_target)
def _target_for(piece, block):
    if piece.dtype == block.dtype:
        return lambda piece, block: piece
    return lambda piece, block: block[: piece.size]


def _finish(whole, bits, piece):
    """Round what was computed to the piece's dtype; chosen in ``_finish_for``."""
    raise NotImplementedError


@overload(_finish)
def _finish_for(whole, bits, piece):
    if piece.dtype == whole.dtype:
        return lambda whole, bits, piece: None
    return lambda whole, bits, piece: store(whole, bits, piece)


@part
def _widen_run(codes, low, step, ahead, out):
    zero = out.dtype.type(0)
    for i in range(out.size):
        value = out.dtype.type(codes[i] + low)
        moved = ahead if value > zero else -ahead
        moved = moved if value != zero else zero
        out[i] = (value - moved) * _own(step, i)


@part
def _widen(codes, low, start, steps, inner, ahead, out):
    """Values of a block's codes, channel by channel."""
    done = 0
    while done < out.size:
        channel = (start + done) // inner % steps.size
        run = steps.size - channel if inner == 1 else inner - (start + done) % inner
        end = min(done + run, out.size)
        here, there = codes[done:end], out[done:end]
        if inner == 1:
            _widen_run(here, low, steps[channel:], ahead, there)
        else:
            _widen_run(here, low, steps[channel], ahead, there)
        done = end


@part
def _read_codes(packed, width, lanes, codes):
    """A block's codes above the least one."""
    rows = lanes.view(np.uint64)
    _unpack_lanes(packed, min(width, 8), rows)
    for i in range(BLOCK):
        codes[i] = lanes[i]
    if width > 8:
        _unpack_lanes(packed[BLOCK // 8 :], width - 8, rows)
        for i in range(BLOCK):
            codes[i] |= np.int32(lanes[i]) << 8


@kernel
def unpack(heads, packed, start, steps, inner, ahead, space, target):
    """The inverse of ``pack``."""
    block, bits, codes, lanes = space
    taken = 0
    for number in range(heads.size):
        first = number * BLOCK
        piece = target[first : first + BLOCK]
        head = np.int32(heads[number])
        low, width = head >> WIDTH_BITS, int(head & RAW)
        if width == RAW:
            raw = packed[taken : taken + BLOCK * target.itemsize].view(target.dtype)
            copy(raw, piece)
            taken += BLOCK * target.itemsize
            continue
        if width:
            _read_codes(packed[taken : taken + LANES * width].view(np.uint64), width, lanes, codes)
            taken += LANES * width
        else:
            for i in range(BLOCK):
                codes[i] = 0
        whole = _target(piece, block)
        _widen(codes, low, start + first, steps, inner, ahead, whole)
        _finish(whole, bits, piece)
