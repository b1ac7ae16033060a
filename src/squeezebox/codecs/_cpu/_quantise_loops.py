"""Loops of the entropy codecs, over one chunk."""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import overload

from squeezebox.codecs._cpu._blocks import OPTIONS, mirrored, order, round_block, store, whole_block
from squeezebox.codecs._reference._quantise import OFFSET, SHIFT

# From this lag on, rows are long enough for vector instructions.
WIDE_LAG = 24


@njit(**OPTIONS)
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


@njit(**OPTIONS)
def _nearest(block, step, inverse, decoded, codes):
    for i in range(block.size):
        code = np.rint(block[i] * inverse)
        decoded[i] = code * step
        codes[i] = codes.dtype.type(np.int32(code))


@njit(**OPTIONS)
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


@njit(**OPTIONS)
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


@njit(**OPTIONS)
def _narrow_nearest(flat, inverse, most, codes):
    misses = np.int32(0)
    for i in range(flat.size):
        code = np.rint(flat[i] * _own(inverse, i))
        misses |= np.int32(not (abs(code) <= most))
        codes[i] = codes.dtype.type(np.int32(code))
    return misses


@njit(**OPTIONS)
def _narrow_signed(flat, inverse, most, codes):
    zero, one, shift = np.float32(0), np.float32(1), np.float32(SHIFT)
    misses = np.int32(0)
    for i in range(flat.size):
        value = flat[i]
        code = np.ceil(abs(value) * _own(inverse, i) + shift)
        misses |= np.int32(not (code <= most))
        code = code if code > one else one
        code = -code if value < zero else code
        code = code if value != zero else zero
        codes[i] = codes.dtype.type(np.int32(code))
    return misses


@njit(**OPTIONS)
def _narrow_run(flat, inverse, keep_sign, most, codes):
    if keep_sign:
        return _narrow_signed(flat, inverse, most, codes)
    return _narrow_nearest(flat, inverse, most, codes)


@njit(**OPTIONS)
def narrow(flat, start, inner, inverses, keep_sign, most, codes):
    """``narrow`` of the reference; False where it gives None."""
    misses, done = np.int32(0), 0
    while done < flat.size:
        position = start + done
        channel = position // inner % inverses.size
        run = inverses.size - channel if inner == 1 else inner - position % inner
        here, there = flat[done : done + run], codes[done : done + run]
        if inner == 1:
            misses |= _narrow_run(here, inverses[channel:], keep_sign, most, there)
        else:
            misses |= _narrow_run(here, inverses[channel], keep_sign, most, there)
        done += run
    return misses == 0


@njit(**OPTIONS)
def _value(code, keep_sign):
    """A code in units of the step."""
    zero, offset = np.float32(0), np.float32(OFFSET)
    size = np.float32(np.int32(code))
    if keep_sign:
        inward = offset if size > zero else -offset
        return size - inward if size != zero else zero
    return size


@njit(**OPTIONS)
def _widen_run(codes, step, keep_sign, out):
    for i in range(out.size):
        out[i] = _value(codes[i], keep_sign) * _own(step, i)


@njit(**OPTIONS)
def widen(codes, start, inner, steps, keep_sign, out):
    """``widen`` of the reference."""
    done = 0
    while done < out.size:
        position = start + done
        channel = position // inner % steps.size
        run = steps.size - channel if inner == 1 else inner - position % inner
        here, there = codes[done : done + run], out[done : done + run]
        if inner == 1:
            _widen_run(here, steps[channel:], keep_sign, there)
        else:
            _widen_run(here, steps[channel], keep_sign, there)
        done += run


@njit(**OPTIONS)
def quantise(flat, step, inverse, limit, keep_sign, space, rounded, codes):
    """Codes of a chunk; False as soon as a block has an element that would miss ``limit`` or become zero.

    ``rounded`` is a block in the chunk's dtype: decoded values pass through it, so they are compared as
    they will come back.
    """
    scratch, integers, decoded, decoded_bits, block_codes = space
    for start in range(0, flat.size, scratch.size):
        block = whole_block(flat[start : start + scratch.size], scratch, integers)
        target = codes[start : start + scratch.size]
        whole = target if target.size == scratch.size else block_codes
        if keep_sign:
            _signed(block, step, inverse, decoded, whole)
        else:
            _nearest(block, step, inverse, decoded, whole)
        round_block(decoded, decoded_bits, rounded)
        if _misses(block, decoded, limit, keep_sign):
            return False
        if target.size < scratch.size:
            target[:] = block_codes[: target.size]
    return True


@njit(**OPTIONS)
def dequantise(codes, step, keep_sign, block, integers, out):
    """Values of a chunk's codes, in the dtype of ``out``."""
    zero, offset = block.dtype.type(0), block.dtype.type(OFFSET)
    for start in range(0, out.size, block.size):
        target = out[start : start + block.size]
        source = codes[start : start + block.size]
        if keep_sign:
            for i in range(source.size):
                code = block.dtype.type(np.int32(source[i]))
                inward = offset if code > zero else -offset
                block[i] = (code - inward) * step if code != zero else zero
        else:
            for i in range(source.size):
                block[i] = block.dtype.type(np.int32(source[i])) * step
        store(block, integers, target)


@njit(**OPTIONS)
def difference(codes, lag, out):
    """``codes[i] - codes[i - lag]`` with wraparound into ``out``."""
    out[:lag] = codes[:lag]
    ahead, behind, target = codes[lag:], codes[:-lag], out[lag:]
    for i in range(ahead.size):
        target[i] = out.dtype.type(ahead[i] - behind[i])


@njit(**OPTIONS)
def accumulate(codes, lag):
    """The inverse of ``difference``, in place."""
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
