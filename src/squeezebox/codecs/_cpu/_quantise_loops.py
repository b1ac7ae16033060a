"""Loops of the entropy codecs, over one chunk."""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from squeezebox.codecs._cpu._blocks import mirrored, order, round_block, store, whole_block
from squeezebox.codecs._cpu._numba import kernel, part
from squeezebox.codecs._reference._quantise import FIRST_TURN, NEXT_TURN, OFFSET, SHIFT

_FIRST_NEAREST, _FIRST_SIGNED = FIRST_TURN[False], FIRST_TURN[True]
# From this lag on, rows are long enough for vector instructions.
WIDE_LAG = 24


@kernel
def extent(flat, block, integers, edges):
    """Smallest and largest element into ``edges``; NaN if any element is NaN or infinite."""
    low = high = integers.dtype.type(0)
    for start in range(0, flat.size, block.size):
        bits = whole_block(flat[start : start + block.size], block, integers).view(integers.dtype)
        if start == 0:
            low = high = mirrored(bits, bits[0])
        low, high = order(bits, low, high)
    edges.view(integers.dtype)[0] = mirrored(integers, low)
    edges.view(integers.dtype)[1] = mirrored(integers, high)


@part
def _nearest(block, step, inverse, decoded, codes):
    for i in range(block.size):
        code = np.rint(block[i] * inverse)
        decoded[i] = code * step
        codes[i] = codes.dtype.type(np.int32(code))


@part
def _signed(block, step, inverse, decoded, codes):
    zero, one = block.dtype.type(0), block.dtype.type(1)
    shift, offset = block.dtype.type(SHIFT), block.dtype.type(OFFSET)
    for i in range(block.size):
        value = block[i]
        size = max(np.ceil(abs(value * inverse) + shift), one)
        middle = (size - offset) * step
        code = -size if value < zero else size
        middle = -middle if value < zero else middle
        decoded[i] = zero if value == zero else middle
        codes[i] = codes.dtype.type(np.int32(zero if value == zero else code))


@part
def _misses(block, decoded, limit, keep_sign):
    zero = block.dtype.type(0)
    misses = np.int32(0)
    for i in range(block.size):
        far = not (abs(block[i] - decoded[i]) <= limit)
        lost = keep_sign & ((block[i] == zero) != (decoded[i] == zero))
        misses = np.int32(misses | np.int32(far | lost))
    return misses != 0


def _own(factor, i):
    """The factor of element ``i``: one for all, or the ``i``-th of an array; chosen in ``_own_for``."""
    raise NotImplementedError


@overload(_own)
def _own_for(factor, i):
    if isinstance(factor, types.Array):
        return lambda factor, i: factor[i]
    return lambda factor, i: factor


@part
def _run(position, inner, channels, dither):
    """Elements from ``position`` on of the same channel (or channels in order) and phase, at most."""
    run = channels - position % channels if inner == 1 else inner - position % inner
    return min(run, dither - position % dither) if dither else run


@part
def _phase(position, dither, keep_sign):
    if keep_sign:
        if not dither:
            return np.float32(SHIFT)
        turn = (_FIRST_SIGNED + position // dither * NEXT_TURN) & 0xFFFF
        return np.float32(turn * 2.0**-17)
    if not dither:
        return np.float32(0)
    turn = (_FIRST_NEAREST + position // dither * NEXT_TURN) & 0xFFFF
    return np.float32(turn * 2.0**-16 - 0.5)


@part
def _narrow_nearest(flat, inverse, phase, most, codes):
    zero, misses = np.float32(0), np.int32(0)
    moved = phase != zero
    for i in range(flat.size):
        code = np.rint(flat[i] * _own(inverse, i) + phase)
        misses |= np.int32(not (abs(code) <= most)) | np.int32(moved & (flat[i] == zero))
        codes[i] = codes.dtype.type(np.int32(code))
    return misses


@part
def _narrow_signed(flat, inverse, phase, most, codes):
    zero, one = np.float32(0), np.float32(1)
    misses = np.int32(0)
    for i in range(flat.size):
        value = flat[i]
        code = np.ceil(abs(value) * _own(inverse, i) + phase)
        misses |= np.int32(not (code <= most))
        code = code if code > one else one
        code = -code if value < zero else code
        code = code if value != zero else zero
        codes[i] = codes.dtype.type(np.int32(code))
    return misses


@part
def _narrow_run(flat, inverse, phase, keep_sign, most, codes):
    if keep_sign:
        return _narrow_signed(flat, inverse, phase, most, codes)
    return _narrow_nearest(flat, inverse, phase, most, codes)


@kernel
def narrow(flat, start, inner, inverses, dither, keep_sign, most, codes):
    """``narrow`` of the reference; False where it gives None."""
    misses, done = np.int32(0), 0
    while done < flat.size:
        position = start + done
        channel = position // inner % inverses.size
        run = _run(position, inner, inverses.size, dither)
        phase = _phase(position, dither, keep_sign)
        here, there = flat[done : done + run], codes[done : done + run]
        if inner == 1:
            misses |= _narrow_run(here, inverses[channel:], phase, keep_sign, most, there)
        else:
            misses |= _narrow_run(here, inverses[channel], phase, keep_sign, most, there)
        done += run
    return misses == 0


@part
def _value(code, phase, keep_sign):
    """A code in units of the step."""
    zero = np.float32(0)
    size = np.float32(np.int32(code))
    if keep_sign:
        offset = phase + np.float32(0.5)
        inward = offset if size > zero else -offset
        return size - inward if size != zero else zero
    return size - phase


@part
def _widen_run(codes, step, phase, keep_sign, out):
    for i in range(out.size):
        out[i] = _value(codes[i], phase, keep_sign) * _own(step, i)


@kernel
def widen(codes, start, inner, steps, dither, keep_sign, out):
    """``widen`` of the reference."""
    done = 0
    while done < out.size:
        position = start + done
        channel = position // inner % steps.size
        run = _run(position, inner, steps.size, dither)
        phase = _phase(position, dither, keep_sign)
        here, there = codes[done : done + run], out[done : done + run]
        if inner == 1:
            _widen_run(here, steps[channel:], phase, keep_sign, there)
        else:
            _widen_run(here, steps[channel], phase, keep_sign, there)
        done += run


@part
def _put_codes(source, target):
    for i in range(target.size):
        target[i] = target.dtype.type(source[i])


@part
def _take_codes(source, target):
    for i in range(source.size):
        target[i] = source[i]


@kernel
def quantise(flat, step, inverse, limit, keep_sign, space, rounded, codes):
    """Codes of a chunk; False as soon as a block has an element that would miss ``limit`` or become zero.

    ``rounded`` is a block in the chunk's dtype: decoded values pass through it, so they are compared as
    they will come back. ``codes`` are int8, int16 and int32, two of them empty.
    """
    scratch, integers, decoded, decoded_bits, block_codes = space
    bytes_, halves, words = codes
    for start in range(0, flat.size, scratch.size):
        block = whole_block(flat[start : start + scratch.size], scratch, integers)
        if keep_sign:
            _signed(block, step, inverse, decoded, block_codes)
        else:
            _nearest(block, step, inverse, decoded, block_codes)
        round_block(decoded, decoded_bits, rounded)
        if _misses(block, decoded, limit, keep_sign):
            return False
        end = min(start + scratch.size, flat.size)
        if bytes_.size:
            _put_codes(block_codes, bytes_[start:end])
        elif halves.size:
            _put_codes(block_codes, halves[start:end])
        else:
            _put_codes(block_codes, words[start:end])
    return True


@kernel
def dequantise(codes, step, keep_sign, space, out):
    """Values of a chunk's codes, in the dtype of ``out``; ``codes`` as for ``quantise``."""
    block, integers, source = space
    bytes_, halves, words = codes
    zero, offset = block.dtype.type(0), block.dtype.type(OFFSET)
    for start in range(0, out.size, block.size):
        target = out[start : start + block.size]
        end = min(start + block.size, out.size)
        if bytes_.size:
            _take_codes(bytes_[start:end], source)
        elif halves.size:
            _take_codes(halves[start:end], source)
        else:
            _take_codes(words[start:end], source)
        if keep_sign:
            for i in range(target.size):
                code = block.dtype.type(np.int32(source[i]))
                inward = offset if code > zero else -offset
                block[i] = (code - inward) * step if code != zero else zero
        else:
            for i in range(target.size):
                block[i] = block.dtype.type(np.int32(source[i])) * step
        store(block, integers, target)


@kernel
def accumulate(codes, lag):
    """The inverse of the reference's ``difference``, in place."""
    if lag == 1:  # in a register, not through memory
        total = codes[0]
        for i in range(1, codes.size):
            total = codes.dtype.type(total + codes[i])
            codes[i] = total
    elif lag < WIDE_LAG:
        here, before = codes[lag:], codes[: codes.size - lag]
        for i in range(here.size):
            here[i] = codes.dtype.type(here[i] + before[i])
    else:
        for start in range(lag, codes.size, lag):
            here, before = codes[start : start + lag], codes[start - lag : start]
            for i in range(here.size):
                here[i] = codes.dtype.type(here[i] + before[i])
