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
    """Codes of neighbours, and whether one has none."""
    zero, far = values.dtype.type(0), values.dtype.type(MOST + 1)
    misses = np.int32(0)
    for i in range(values.size):
        value = values[i]
        steps = value * _own(inverse, i)
        near = abs(steps) < far  # false for NaN
        moved = ahead if value > zero else -ahead
        moved = moved if value != zero else zero
        codes[i] = np.int32(np.rint((steps if near else zero) + moved))
        misses = max(misses, np.int32(0) if near else np.int32(1))
    return misses


@part
def _extent(codes):
    low, high = np.int32(MOST), np.int32(LEAST)
    for i in range(codes.size):
        code = codes[i]
        low, high = min(low, code), max(high, code)
    return low, high


@part
def _quantise(values, start, inverses, inner, ahead, most, codes):
    """Codes of a block, the least one, and the width of the others above it."""
    misses, done = np.int32(0), 0
    while done < values.size:
        channel = (start + done) // inner % inverses.size
        run = inverses.size - channel if inner == 1 else inner - (start + done) % inner
        end = min(done + run, values.size)
        here, there = values[done:end], codes[done:end]
        if inner == 1:
            found = _quantise_run(here, inverses[channel:], ahead, there)
        else:
            found = _quantise_run(here, inverses[channel], ahead, there)
        misses = max(misses, found)
        done = end
    low, high = _extent(codes)
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


@part
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
        value = out.dtype.type(np.int32(np.int32(codes[i]) + low))
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
def _add_high_bytes(packed, width, lanes, codes):
    """Codes above the least one: their low bytes are in ``lanes``, where the high ones come through."""
    for i in range(BLOCK):
        codes[i] = lanes[i]
    _unpack_lanes(packed, width, lanes.view(np.uint64))
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
            rows = packed[taken : taken + LANES * width].view(np.uint64)
            _unpack_lanes(rows, min(width, 8), lanes.view(np.uint64))
            taken += LANES * width
        else:
            for i in range(BLOCK):
                lanes[i] = 0
        whole = _target(piece, block)
        if width > 8:
            _add_high_bytes(rows[BLOCK // 8 :], width - 8, lanes, codes)
            _widen(codes, low, start + first, steps, inner, ahead, whole)
        else:
            _widen(lanes, low, start + first, steps, inner, ahead, whole)
        _finish(whole, bits, piece)
