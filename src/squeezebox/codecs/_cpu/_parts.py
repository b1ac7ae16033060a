"""Parts that loops share: extents in the floats' order, blocks that are filled up, roundings, addresses."""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from squeezebox.codecs._kernels import kernel_part

BFLOAT16, FLOAT16 = 1, 2  # how ``round_block`` rounds; 0: not at all


_NUMBER = ir.IntType(64)


@intrinsic
def _pointer(typing_context, address):
    """To what is at an address, for ``carray``."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def _take(typing_context, address):
    """Add one to the number at an address, whatever other threads do; the number before."""

    def generate(context, builder, signature, arguments):
        target = builder.inttoptr(arguments[0], _NUMBER.as_pointer())
        return builder.atomic_rmw("add", target, _NUMBER(1), "monotonic")

    return types.int64(types.int64), generate


pointer: Any = _pointer
take: Any = _take


@kernel_part
def magnitude_mask(bits):
    """All bits but the sign, in the type of ``bits``."""
    return bits.dtype.type(0x7FFFFFFF if bits.itemsize == 4 else 0x7FFFFFFFFFFFFFFF)


@kernel_part
def order(bits, low, high):
    """``low`` and ``high`` widened by a block, compared as integers in the order of the floats.

    A float's bits are in the floats' order once those of negatives are mirrored; NaN lies outermost.
    """
    mask = magnitude_mask(bits)
    shift = bits.dtype.type(8 * bits.itemsize - 1)
    for i in range(bits.size):
        mirror = bits.dtype.type(bits.dtype.type(bits[i] >> shift) & mask)
        key = bits.dtype.type(bits[i] ^ mirror)
        low = bits.dtype.type(min(low, key))
        high = bits.dtype.type(max(high, key))
    return low, high


@kernel_part
def mirrored(bits, key):
    """The bits of a float with this place in the order, or the place of a float with these bits."""
    return bits.dtype.type(key ^ ((key >> (8 * bits.itemsize - 1)) & magnitude_mask(bits)))


@kernel_part
def whole_block(source, block):
    """The source itself where it is as large as ``block``, or ``block`` filled up with its last element."""
    if source.size == block.size:
        return source
    for i in range(block.size):
        block[i] = source[min(i, source.size - 1)]
    return block


@kernel_part
def spread(factors, inner, position, own):
    """Each element's factor into ``own``: ``inner`` neighbours share a channel, and channels repeat."""
    done = 0
    while done < own.size:
        channel = (position + done) // inner % factors.size
        if inner == 1:
            end = min(done + factors.size - channel, own.size)
            for i in range(done, end):
                own[i] = factors[channel + i - done]
        else:
            end, factor = min(done + inner - (position + done) % inner, own.size), factors[channel]
            for i in range(done, end):
                own[i] = factor
        done = end


@kernel_part
def round_block(block, bits, rounding):
    """A block of float32 (``bits``: its integer view) as it will be after rounding to a narrower dtype."""
    if rounding == BFLOAT16:
        for i in range(bits.size):
            pattern = np.uint32(bits[i])
            moved = np.uint32(pattern + np.uint32(0x7FFF) + ((pattern >> np.uint32(16)) & np.uint32(1)))
            bits[i] = np.int32(moved & np.uint32(0xFFFF0000))
    elif rounding == FLOAT16:
        for i in range(bits.size):
            pattern = np.uint32(bits[i])
            size, half = pattern & np.uint32(0x7FFFFFFF), abs(np.float32(block[i])) + np.float32(0.5)
            near = np.uint32(size + np.uint32(0xFFF) + ((size >> np.uint32(13)) & np.uint32(1)))
            near = np.uint32(0x7F800000) if near >= np.uint32(0x47800000) else near & np.uint32(0xFFFFE000)
            bits[i] = np.int32(near | (pattern & np.uint32(0x80000000)))
            if size < np.uint32(0x38800000):  # below the normal ones: steps of 2^-24
                small = half - np.float32(0.5)
                block[i] = -small if pattern >> np.uint32(31) else small
