"""Loops of `minmax*`: one group of 256 at a time."""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import numpy as np

from squeezebox.codecs._cpu._blocks import BLOCK, load, magnitude_mask, mirrored, order, store
from squeezebox.codecs._cpu._group_loops import uniform
from squeezebox.codecs._cpu._lanes import pack_lanes, unpack_lanes
from squeezebox.codecs._cpu._numba import kernel, part


@part
def _extent(integers):
    """Bits of the smallest and largest element, and whether any is zero; NaN counts as outermost."""
    first = mirrored(integers, integers[0])
    low, high = order(integers, first, first)
    mask, nought = magnitude_mask(integers), integers.dtype.type(0)
    zeros = nought
    for i in range(BLOCK):
        is_zero = integers.dtype.type(integers[i] & mask) == nought
        zeros = integers.dtype.type(zeros | integers.dtype.type(is_zero))
    return mirrored(integers, low), mirrored(integers, high), zeros != nought


@part
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


@part
def _codes(block, shift, inverse, origin, top, codes):
    zero = block.dtype.type(0)
    for i in range(BLOCK):
        code = np.rint((block[i] - shift) * inverse + origin)
        codes[i] = np.uint8(np.int32(min(max(code, zero), top)))


@part
def _codes_stochastic(block, noise, shift, inverse, origin, top, codes):
    zero, one = block.dtype.type(0), block.dtype.type(1)
    for i in range(BLOCK):
        scaled = (block[i] - shift) * inverse + origin
        whole = np.floor(scaled)
        code = whole + one if scaled - whole > noise[i] else whole
        codes[i] = np.uint8(np.int32(min(max(code, zero), top)))


@kernel
def pack_minmax(flat, bits, stochastic, seed, floor, space, packed, scales, first, last):
    """Groups ``first`` to ``last`` of ``_reference/_groups.py``'s ``pack_minmax``."""
    block, integers, noise, codes = space
    edges = np.empty(2, block.dtype)
    edge_bits = edges.view(integers.dtype)
    zero, one = block.dtype.type(0), block.dtype.type(1)
    top = block.dtype.type((1 << bits) - 1)
    for group in range(first, last):
        load(flat[group * BLOCK : (group + 1) * BLOCK], block, integers)
        edge_bits[0], edge_bits[1], pinned = _extent(integers)
        offset, step = _grid(edges, pinned, top, stochastic, floor)
        shift, origin = (zero, offset) if pinned else (offset, top * block.dtype.type(0.5))
        if stochastic:
            uniform(group * BLOCK, seed, noise)
            _codes_stochastic(block, noise, shift, one / step, origin, top, codes)
        else:
            _codes(block, shift, one / step, origin, top, codes)
        pack_lanes(codes, bits, packed[group * 32 * bits : (group + 1) * 32 * bits])
        scales[2 * group], scales[2 * group + 1] = offset, -step if pinned else step


@part
def _values(codes, shift, step, origin, limit, block):
    for i in range(BLOCK):
        value = (block.dtype.type(np.int32(codes[i])) - origin) * step + shift
        block[i] = min(max(value, -limit), limit)


@kernel
def unpack_minmax(packed, scales, bits, limit, space, out, first, last):
    """Groups ``first`` to ``last`` of ``_reference/_groups.py``'s ``unpack_minmax``."""
    block, integers, _, codes = space
    middle = block.dtype.type(((1 << bits) - 1) * 0.5)
    for group in range(first, last):
        unpack_lanes(packed[group * 32 * bits : (group + 1) * 32 * bits], bits, codes)
        offset, step = scales[2 * group], scales[2 * group + 1]
        if step < 0:
            _values(codes, block.dtype.type(0), -step, offset, limit, block)
        else:
            _values(codes, offset, step, middle, limit, block)
        store(block, integers, out[group * BLOCK : (group + 1) * BLOCK])
