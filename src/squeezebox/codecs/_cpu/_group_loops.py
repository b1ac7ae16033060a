"""Loops of `zero*` and `minmax*`: one group of 256 at a time, two passes over the innermost cache."""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import numpy as np

from squeezebox.codecs._cpu._blocks import BLOCK, load, magnitude_mask, store
from squeezebox.codecs._cpu._lanes import pack_lanes, unpack_lanes
from squeezebox.codecs._cpu._numba import kernel, part


@part
def uniform(first, seed, noise):
    """256 numbers in [0, 1) for the elements from ``first`` on, as ``_reference/_random.py``."""
    scale = noise.dtype.type(2.0**-24)
    base = np.uint32(np.uint64(seed) + (np.uint64(first) >> np.uint64(32)) * np.uint64(0x632BE5AB))
    start = np.uint32(first)
    for i in range(BLOCK):
        hashed = np.uint32(np.uint32(np.uint32(start + np.uint32(i)) * np.uint32(0x9E3779B1)) + base)
        hashed = np.uint32(hashed ^ (hashed >> np.uint32(16)))
        hashed = np.uint32(hashed * np.uint32(0x7FEB352D))
        hashed = np.uint32(hashed ^ (hashed >> np.uint32(15)))
        hashed = np.uint32(hashed * np.uint32(0x846CA68B))
        hashed = np.uint32(hashed ^ (hashed >> np.uint32(16)))
        noise[i] = noise.dtype.type(np.int32(hashed >> np.uint32(8))) * scale


@part
def _peak(block, bits):
    """Largest magnitude (NaN and infinity win) and whether any element is negative."""
    mask = magnitude_mask(bits)
    largest = bits.dtype.type(0)
    negative = bits.dtype.type(0)
    zero = block.dtype.type(0)
    for i in range(BLOCK):
        largest = bits.dtype.type(max(largest, bits.dtype.type(bits[i] & mask)))
        negative = bits.dtype.type(negative | bits.dtype.type(block[i] < zero))
    return largest, negative != 0


@part
def _zero_codes(block, inverse, levels, keep, codes):
    zero, one = block.dtype.type(0), block.dtype.type(1)
    for i in range(BLOCK):
        value = block[i]
        code = min(max(np.ceil(abs(value) * inverse), one), levels)
        code = zero if value == zero else code
        code = -code if value < zero else code
        codes[i] = np.uint8(np.int32(code)) & keep


@part
def _zero_codes_stochastic(block, noise, inverse, levels, keep, codes):
    zero, one = block.dtype.type(0), block.dtype.type(1)
    for i in range(BLOCK):
        value = block[i]
        scaled = abs(value) * inverse
        whole = np.floor(scaled)
        code = min(whole + one if scaled - whole > noise[i] else whole, levels)
        code = -code if value < zero else code
        codes[i] = np.uint8(np.int32(code)) & keep


@kernel
def pack_zero(flat, bits, stochastic, seed, floor, space, packed, scales, first, last):
    """Groups ``first`` to ``last`` of ``_reference/_groups.py``'s ``pack_zero``."""
    block, integers, noise, codes = space
    keep = np.uint8((1 << bits) - 1)
    for group in range(first, last):
        load(flat[group * BLOCK : (group + 1) * BLOCK], block, integers)
        largest, signed = _peak(block, integers)
        integers[0], kept = largest, integers[0]
        peak = floor if block[0] < floor else block[0]  # NaN stays
        integers[0] = kept
        levels = block.dtype.type((1 << (bits - 1)) - 1 if signed else (1 << bits) - 1)
        if stochastic:
            uniform(group * BLOCK, seed, noise)
            _zero_codes_stochastic(block, noise, levels / peak, levels, keep, codes)
        else:
            _zero_codes(block, levels / peak, levels, keep, codes)
        pack_lanes(codes, bits, packed[group * 32 * bits : (group + 1) * 32 * bits])
        scales[group] = -peak if signed else peak


@part
def _one_sided(codes, step, shift, limit, block):
    zero = block.dtype.type(0)
    for i in range(BLOCK):
        value = min((block.dtype.type(np.int32(codes[i])) - shift) * step, limit)
        block[i] = value if codes[i] != np.uint8(0) else zero


@part
def _two_sided(codes, half, step, shift, limit, block):
    zero = block.dtype.type(0)
    for i in range(BLOCK):
        value = block.dtype.type((np.int32(codes[i]) ^ half) - half)
        inward = shift if value > zero else -shift
        value = (value - inward) * step if value != zero else zero
        block[i] = min(max(value, -limit), limit)


@kernel
def unpack_zero(packed, scales, bits, stochastic, limit, space, out, first, last):
    """Groups ``first`` to ``last`` of ``_reference/_groups.py``'s ``unpack_zero``."""
    block, integers, _, codes = space
    shift = block.dtype.type(0.0 if stochastic else 0.5)
    half = np.int32(1 << (bits - 1))
    for group in range(first, last):
        unpack_lanes(packed[group * 32 * bits : (group + 1) * 32 * bits], bits, codes)
        scale = scales[group]
        if scale < 0:
            levels = block.dtype.type((1 << (bits - 1)) - 1)
            _two_sided(codes, half, -scale / levels, shift, limit, block)
        else:
            _one_sided(codes, scale / block.dtype.type((1 << bits) - 1), shift, limit, block)
        store(block, integers, out[group * BLOCK : (group + 1) * BLOCK])
