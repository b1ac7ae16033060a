"""Loops of `planes`: a block's range, its codes, and the codes of w bits in w bytes a lane.

A job is a run of 64-bit numbers, most of them addresses. Each thread takes one piece of it after another
until none is left, without the interpreter.

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

from functools import lru_cache

import numpy as np
from numba.np.numpy_support import carray

from squeezebox.codecs._cpu._parts import pointer, spread, take, whole_block
from squeezebox.codecs._kernels import kernel_part, native
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
def _four(words, at):
    """A row: four words from there on."""
    one = np.uint64(1)
    return words[at], words[at + one], words[at + one + one], words[at + one + one + one]


@kernel_part
def _put(words, at, row):
    one = np.uint64(1)
    words[at], words[at + one], words[at + one + one], words[at + one + one + one] = row


@kernel_part
def _left(row, shift, mask):
    first, second, third, fourth = row
    return (
        (first << shift) & mask,
        (second << shift) & mask,
        (third << shift) & mask,
        (fourth << shift) & mask,
    )


@kernel_part
def _right(row, shift, mask):
    first, second, third, fourth = row
    return (
        (first >> shift) & mask,
        (second >> shift) & mask,
        (third >> shift) & mask,
        (fourth >> shift) & mask,
    )


@kernel_part
def _both(row, other):
    return row[0] | other[0], row[1] | other[1], row[2] | other[2], row[3] | other[3]


@kernel_part
def _pack_lanes(rows, width, out):
    """Eight rows of codes below 2^width as width rows of bytes."""
    wide, whole, step = np.uint64(width), np.uint64(8), np.uint64(_WORDS)
    at, source, shift = np.uint64(0), np.uint64(0), np.uint64(0)
    held = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
    for _ in range(8):
        codes = _four(rows, source)
        source += step
        held = _both(held, _left(codes, shift, _ONES * ((_BYTE << shift) & _BYTE)))
        shift += wide
        if shift >= whole:  # the bytes are full, and the next begin with what is left of the codes
            _put(out, at, held)
            at += step
            shift -= whole
            held = _right(codes, wide - shift, _ONES * (_BYTE >> (whole - shift)))


@kernel_part
def _unpack_lanes(packed, width, rows):
    """The inverse of ``_pack_lanes``."""
    wide, whole, step = np.uint64(width), np.uint64(8), np.uint64(_WORDS)
    keep, end = _ONES * ((np.uint64(1) << wide) - np.uint64(1)), np.uint64(_WORDS * width)
    at, target, shift = np.uint64(0), np.uint64(0), np.uint64(0)
    held = _four(packed, at)
    for _ in range(8):
        codes = _right(held, shift, _ONES * (_BYTE >> shift))
        back = whole - shift
        shift += wide
        if shift >= whole:
            shift -= whole
            at += step
            if at < end:
                held = _four(packed, at)
                codes = _both(codes, _left(held, back, _ONES * ((_BYTE << back) & _BYTE)))
        _put(rows, target, _right(codes, np.uint64(0), keep))
        target += step


@kernel_part
def _steps(scale, how, like):
    """Each channel's step, NaN where it is not usable; the first ones again where a block passes the end."""
    unit, least, most = how[0], how[1], how[2]
    steps = np.empty(scale.size + BLOCK, like.dtype)
    for i in range(scale.size):
        step = scale[i] * unit
        steps[i] = step if step >= least and step <= most else like.dtype.type(np.nan)
    for i in range(BLOCK):
        steps[scale.size + i] = steps[i]
    return steps


@kernel_part
def _pack(source, raw, layout, how, most, heads, words):
    """How many of the ``words`` the blocks of ``source`` take, which are there as bytes too.

    ``raw`` are the elements' own bytes; ``layout`` is where the first one is in the tensor, the scale, and
    how many neighbours share a factor; ``how`` is the step of a scale of 1, its least and largest value, and
    what codes are ahead of it.
    """
    (start, scale, inner), (out, data) = layout, words
    inverses = _steps(scale, how, source)
    for i in range(inverses.size):
        inverses[i] = source.dtype.type(1) / inverses[i]
    block, room = np.empty(BLOCK, source.dtype), np.empty(BLOCK, source.dtype)
    codes, lanes, ahead = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.uint8), how[3]
    rows = carray(pointer(lanes.ctypes.data), BLOCK // 8, np.uint64)
    item, taken, channel = raw.size // source.size, 0, np.int64(-1)
    for number in range(heads.size):
        first = number * BLOCK
        values = whole_block(source[first : first + BLOCK], block)
        own, channel = _own(inverses, scale.size, inner, start + first, channel, room)
        misses, low, high = _quantise(values, own, ahead, codes)
        if misses or low < -most - 1 or high > most:
            heads[number] = RAW
            end = raw.size - first * item
            for i in range(BLOCK * item):
                data[taken + i] = raw[first * item + (i if i < end else end - item + i % item)]
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
            _pack_lanes(rows, min(width - shift, 8), out[at : at + _WORDS * min(width - shift, 8)])
            at += BLOCK // 8
        taken += LANES * width
    return taken // 8


@kernel_part
def _own(factors, channels, inner, position, held, room):
    """A block's factors, and the channel that they are all of, if it is one: ``room`` then holds them."""
    if inner == 1:
        first = position % channels
        return factors[first : first + BLOCK], np.int64(-1)
    run = position // inner
    if run != held or position + BLOCK > (run + 1) * inner:
        spread(factors[:channels], inner, position, room)
        held = run if position + BLOCK <= (run + 1) * inner else np.int64(-1)
    return room, held


@kernel_part
def _unpack(heads, words, first, scale, inner, how, item, target):
    """The inverse of ``_pack``, from block ``first`` on; how many blocks are raw, which are left out.

    ``item``: bytes of an element.
    """
    steps, ahead = _steps(scale, how, target), how[3]
    room, codes = np.empty(BLOCK, target.dtype), np.empty(BLOCK, np.int32)
    lanes = np.empty(BLOCK, np.uint8)
    rows = carray(pointer(lanes.ctypes.data), BLOCK // 8, np.uint64)
    zero, channel, raw, at = target.dtype.type(0), np.int64(-1), 0, 0
    for number in range(first):
        width = int(heads[number] & RAW)
        at += BLOCK * item // 8 if width == RAW else _WORDS * width
    for number in range(-(-target.size // BLOCK)):
        head = np.int32(heads[first + number])
        low, width = head >> np.int32(WIDTH_BITS), int(head & RAW)
        if width == RAW:
            raw += 1
            at += BLOCK * item // 8
            continue
        here = number * BLOCK
        own, channel = _own(steps, scale.size, inner, first * BLOCK + here, channel, room)
        for i in range(BLOCK):
            codes[i] = low
        for shift in range(0, width, 8):
            wide = min(width - shift, 8)
            _unpack_lanes(words[at : at + _WORDS * wide], wide, rows)
            at += _WORDS * wide
            for i in range(BLOCK):
                codes[i] = np.int32(codes[i] + np.int32(np.int32(lanes[i]) << np.int32(shift)))
        whole = target[here : here + BLOCK]
        for i in range(whole.size):
            value = target.dtype.type(codes[i])
            moved = ahead if value > zero else -ahead
            moved = moved if value != zero else zero
            whole[i] = (value - moved) * own[i]
    return raw


(
    TAKEN,  # pieces that some thread has begun
    PIECES,
    LENGTH,  # blocks of a piece, but for the last
    FIRST,  # block of the tensor that the first of these values is in
    NUMEL,  # values
    ITEM,  # bytes of an element as it comes or goes
    CHANNELS,
    INNER,
    LARGEST,  # code
    ROOM,  # packed words: that each piece has room for, or all of them
    HOW,  # addresses from here on
    SCALE,
    VALUES,
    RAW_BYTES,  # of the elements to be packed
    HEADS,
    PACKED,
    RESULTS,  # of each piece: words that it took, or how many of its blocks are raw
    NUMBERS,
) = range(18)
"""What a job's numbers are."""


@kernel_part
def _piece(address, job):
    """The next piece, its first and last block, counted from the job's; the same twice if none is left."""
    piece = take(address)
    blocks = -(-job[NUMEL] // BLOCK)
    first = min(piece * job[LENGTH], blocks)
    return piece, first, min(first + job[LENGTH], blocks)


@kernel_part
def _opened(address, kind):
    """A job, and what both directions need of it."""
    job = carray(pointer(address), NUMBERS, np.int64)
    how = carray(pointer(job[HOW]), 4, kind)
    scale = carray(pointer(job[SCALE]), job[CHANNELS], np.float32)
    values = carray(pointer(job[VALUES]), job[NUMEL], kind)
    heads = carray(pointer(job[HEADS]), job[FIRST] - (-job[NUMEL] // BLOCK), np.int16)
    results = carray(pointer(job[RESULTS]), job[PIECES], np.int64)
    return job, how, scale, values, heads, results


@lru_cache(maxsize=2)
def tasks(double: bool) -> tuple[object, object]:
    """What threads run to pack, and to unpack, in float64 or float32, given a job's address."""
    kind = np.float64 if double else np.float32

    def pack(address):
        job, how, scale, values, heads, results = _opened(address, kind)
        raw = carray(pointer(job[RAW_BYTES]), job[NUMEL] * job[ITEM], np.uint8)
        piece, first, last = _piece(address, job)
        while first < last:
            begin, end = first * BLOCK, min(last * BLOCK, values.size)
            own, out = raw[begin * job[ITEM] : end * job[ITEM]], job[PACKED] + 8 * piece * job[ROOM]
            words = carray(pointer(out), job[ROOM], np.uint64), carray(pointer(out), 8 * job[ROOM], np.uint8)
            there = heads[job[FIRST] + first : job[FIRST] + last]
            layout = job[FIRST] * BLOCK + begin, scale, job[INNER]
            results[piece] = _pack(values[begin:end], own, layout, how, np.int32(job[LARGEST]), there, words)
            piece, first, last = _piece(address, job)

    def unpack(address):
        job, how, scale, values, heads, results = _opened(address, kind)
        words = carray(pointer(job[PACKED]), job[ROOM], np.uint64)
        piece, first, last = _piece(address, job)
        while first < last:
            target = values[first * BLOCK : last * BLOCK]
            here = job[FIRST] + first
            results[piece] = _unpack(heads, words, here, scale, job[INNER], how, job[ITEM], target)
            piece, first, last = _piece(address, job)

    return native(pack), native(unpack)
