"""Groups of 256 codes packed to 1, 2, 3, 4 or 8 bits, as ``_reference/_bits.py`` lays them out."""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import numpy as np

from squeezebox.codecs._cpu._blocks import copy
from squeezebox.codecs._cpu._numba import part


@part
def pack_lanes(codes, bits, packed):
    """256 codes of ``bits`` bits to ``32 * bits`` bytes, as ``_reference/_bits.py`` lays them out."""
    if bits == 8:
        copy(codes, packed)
    elif bits == 4:
        for i in range(128):
            packed[i] = codes[i] | np.uint8(codes[i + 128] << np.uint8(4))
    elif bits == 2:
        _pack_quarters(codes, packed)
    elif bits == 1:
        pack_bits(codes, np.uint8(0), packed)
    else:
        _pack_quarters(codes, packed[:64])
        pack_bits(codes, np.uint8(2), packed[64:])


@part
def _pack_quarters(codes, packed):
    for i in range(64):
        low = (codes[i] & np.uint8(3)) | np.uint8((codes[i + 64] & np.uint8(3)) << np.uint8(2))
        high = (codes[i + 128] & np.uint8(3)) | np.uint8((codes[i + 192] & np.uint8(3)) << np.uint8(2))
        packed[i] = low | np.uint8(high << np.uint8(4))


@part
def pack_bits(codes, shift, packed):
    """The bit at ``shift`` of each of 256 codes, to 32 bytes."""
    for i in range(32):
        byte = np.uint8(0)
        for lane in range(8):
            bit = (codes[i + 32 * lane] >> shift) & np.uint8(1)
            byte = np.uint8(byte | np.uint8(bit << np.uint8(lane)))
        packed[i] = byte


@part
def unpack_lanes(packed, bits, codes):
    """The inverse of ``pack_lanes``."""
    if bits == 8:
        copy(packed, codes)
    elif bits == 4:
        for i in range(128):
            codes[i] = packed[i] & np.uint8(15)
            codes[i + 128] = packed[i] >> np.uint8(4)
    elif bits == 2:
        _unpack_quarters(packed, codes)
    elif bits == 1:
        unpack_bits(packed, codes)
    else:
        _unpack_three(packed, codes)


@part
def _unpack_quarters(packed, codes):
    for lane in range(4):
        target = codes[64 * lane : 64 * lane + 64]
        for i in range(64):
            target[i] = (packed[i] >> np.uint8(2 * lane)) & np.uint8(3)


@part
def unpack_bits(packed, codes):
    """The inverse of ``pack_bits`` for codes of one bit."""
    for lane in range(8):
        target = codes[32 * lane : 32 * lane + 32]
        for i in range(32):
            target[i] = (packed[i] >> np.uint8(lane)) & np.uint8(1)


@part
def _unpack_three(packed, codes):
    _unpack_quarters(packed, codes)
    for lane in range(8):
        target = codes[32 * lane : 32 * lane + 32]
        for i in range(32):
            bit = (packed[64 + i] >> np.uint8(lane)) & np.uint8(1)
            target[i] = target[i] | np.uint8(bit << np.uint8(2))
