"""Loops of optimizer state in 8 and 16 bits; what they compute is said in ``_reference._states``."""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import numpy as np

from squeezebox.codecs._kernels import kernel, kernel_part
from squeezebox.codecs._reference._states import BLOCK, CUT, MOST

_CUT = np.int32(CUT)
_LEFT = np.uint32(32 - CUT)
_SIZE = np.int32(0x7FFFFFFF)
_INFINITE = np.int32(0x7F800000)
_LARGEST = np.int32(0x7FF00000)
_MOST = np.float32(MOST)
_RANDOM = np.float32(2.0**-24)


@kernel_part
def _hash(number):
    """Of an element's number times the golden ratio plus the key, as uint32."""
    number = np.uint32((number ^ (number >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    number = np.uint32((number ^ (number >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(number ^ (number >> np.uint32(16)))


@kernel_part
def _noise(first, random):
    for i in range(random.size):
        random[i] = _hash(np.uint32(first + np.uint32(i) * np.uint32(0x9E3779B1)))


@kernel_part
def _first(key, start):
    return np.uint32(np.uint32(key) + np.uint32(start) * np.uint32(0x9E3779B1))


@kernel_part
def _pack_squares(bits, random, codes):
    top = np.int32(0)
    for i in range(bits.size):
        top = np.int32(max(top, np.int32(bits[i] & _SIZE)))
    head = np.int32(np.int32(min(top, _LARGEST) >> _CUT) - np.int32(254))
    for i in range(bits.size):
        size = np.int32(min(np.int32(bits[i] & _SIZE), _LARGEST))
        moved = np.int32(size + np.int32(random[i] >> _LEFT))
        code = np.int32(np.int32(moved >> _CUT) - head)
        code = np.int32(min(max(code, np.int32(1)), np.int32(255)))
        codes[i] = np.uint8(code if size != np.int32(0) else np.int32(0))
    return head


@kernel
def pack_squares(bits, key, start, codes, heads):
    """Codes and heads of whole blocks of squares, given by their bits."""
    random = np.empty(BLOCK, np.uint32)
    for block in range(heads.size):
        begin = block * BLOCK
        own = bits[begin : begin + BLOCK]
        _noise(_first(key, start + begin), random)
        heads[block] = _pack_squares(own, random, codes[begin : begin + BLOCK])


@kernel_part
def _unpack_squares(codes, head, bits):
    for i in range(codes.size):
        code = np.int32(codes[i])
        bits[i] = np.int32((code + head) << _CUT) if code != 0 else np.int32(0)


@kernel
def unpack_squares(codes, heads, bits):
    """Squares, into ``bits``."""
    for block in range(heads.size):
        begin = block * BLOCK
        _unpack_squares(codes[begin : begin + BLOCK], heads[block], bits[begin : begin + BLOCK])


@kernel_part
def _largest(bits):
    top = np.int32(0)
    for i in range(bits.size):
        top = np.int32(max(top, np.int32(bits[i] & _SIZE)))
    return top


@kernel_part
def _pack_signed(values, units, random, codes, space):
    """Codes of a block, and its step; ``units`` are ones or roots; ``space``: scratch, and its bits."""
    sizes, bits = space
    for i in range(values.size):
        size = abs(values[i]) / units[i]
        lost = (units[i] == np.float32(0)) & (values[i] == values[i])
        sizes[i] = np.float32(0) if lost else size
    bits[BLOCK] = _largest(bits[: values.size])
    step = sizes[BLOCK] / _MOST
    for i in range(values.size):
        scale = units[i] * step
        code = np.floor(values[i] / scale + np.float32(random[i] >> np.uint32(8)) * _RANDOM)
        code = code if (scale > np.float32(0)) & (code == code) else np.float32(0)
        codes[i] = np.int8(min(max(code, -_MOST), _MOST))
    return step


@kernel_part
def _roots(squares, units):
    for i in range(squares.size):
        units[i] = np.sqrt(squares[i])


@kernel
def pack_signed(flat, squares, key, start, space, codes, steps):
    """Codes and steps of whole blocks of values; ``squares`` may be empty; ``space``: as above."""
    random, units = np.empty(BLOCK, np.uint32), np.ones(BLOCK, np.float32)
    for block in range(steps.size):
        begin = block * BLOCK
        _noise(_first(key, start + begin), random)
        if squares.size:
            _roots(squares[begin : begin + BLOCK], units)
        own = flat[begin : begin + BLOCK]
        steps[block] = _pack_signed(own, units, random, codes[begin : begin + BLOCK], space)


@kernel_part
def _unpack_signed(codes, units, step, out):
    for i in range(codes.size):
        out[i] = np.float32(codes[i]) * (units[i] * step)


@kernel
def unpack_signed(codes, steps, squares, out):
    """Values, into ``out``; ``squares`` may be empty."""
    units = np.ones(BLOCK, np.float32)
    for block in range(steps.size):
        begin = block * BLOCK
        if squares.size:
            _roots(squares[begin : begin + BLOCK], units)
        _unpack_signed(codes[begin : begin + BLOCK], units, steps[block], out[begin : begin + BLOCK])


@kernel
def pack_short(bits, key, start, codes):
    """The first 16 bits of each value."""
    random = np.empty(BLOCK, np.uint32)
    for begin in range(0, bits.size, BLOCK):
        _noise(_first(key, start + begin), random)
        _pack_short(bits[begin : begin + BLOCK], random, codes[begin : begin + BLOCK])


@kernel_part
def _pack_short(bits, random, codes):
    for i in range(bits.size):
        more = np.int32(random[i] >> np.uint32(16))
        more = more if (bits[i] & _INFINITE) != _INFINITE else np.int32(0)
        codes[i] = np.int16(np.int32(bits[i] + more) >> np.int32(16))


@kernel
def unpack_short(codes, bits):
    """Values, into ``bits``."""
    for i in range(codes.size):
        bits[i] = np.int32(np.int32(codes[i]) << np.int32(16))
