"""Loops of `blocks`: magnitudes with signs to words and back, as ``_reference._blocks`` lays them out."""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import numpy as np

from squeezebox.codecs._kernels import kernel, kernel_part
from squeezebox.codecs._reference._blocks import BLOCK, COUNTERS, RAW, SPARSE, UNIT, WORDS


@kernel_part
def _bit_length(number):
    length = 0
    while number >> length:
        length += 1
    return length


@kernel_part
def _put_planes(codes, count, planes, words):
    """``planes`` times as many words as ``count`` bits take."""
    length = (count + 31) // 32
    for plane in range(planes):
        for word in range(length):
            held = np.uint32(0)
            for bit in range(32):
                code = np.uint32(codes[32 * word + bit])
                held |= ((code >> np.uint32(plane)) & np.uint32(1)) << np.uint32(bit)
            words[plane * length + word] = np.int32(held)


@kernel_part
def _take_planes(words, count, planes, codes):
    """The inverse of ``_put_planes``."""
    length = (count + 31) // 32
    codes[: 32 * length] = 0
    for plane in range(planes):
        for word in range(length):
            held = np.uint32(words[plane * length + word])
            for bit in range(32):
                one = (held >> np.uint32(bit)) & np.uint32(1)
                codes[32 * word + bit] |= np.int32(one << np.uint32(plane))


@kernel_part
def _code(magnitudes, factor, codes, words):
    """A block's header, and how many words it takes."""
    count, top, signed = 0, 0, 0
    for i in range(BLOCK):
        size = abs(magnitudes[i])
        count += size != 0
        top = max(top, size)
        signed |= magnitudes[i] < 0
    dense, sparse = _bit_length(top), _bit_length(max(top - 1, 0))
    length = (count + 31) // 32
    is_sparse = WORDS + length * (sparse + signed) < WORDS * (dense + signed)
    width, begin, filled = (sparse, WORDS, 0) if is_sparse else (dense, 0, BLOCK)
    if is_sparse:
        for i in range(BLOCK):
            codes[i] = magnitudes[i] != 0
        _put_planes(codes, BLOCK, 1, words)
    for i in range(BLOCK):
        size, negative = abs(magnitudes[i]), np.int32(magnitudes[i] < 0)
        if not is_sparse:
            codes[i] = size | negative << width
        elif size:
            codes[filled] = (size - 1) | negative << width
            filled += 1
    codes[filled:] = 0
    _put_planes(codes, filled, width + signed, words[begin:])
    kind = SPARSE if is_sparse else 0
    header = count | width << 11 | factor << 16 | signed << 21 | kind << 22
    return header, begin + (filled + 31) // 32 * (width + signed)


@kernel
def pack(raw, magnitudes, factors, known, arena, spill, counters, slot, table):
    """Words of whole blocks into ``arena``, or else into ``spill``; where they are, into ``table``."""
    codes, own = np.empty(BLOCK, np.int32), np.empty(WORDS * 16, np.int32)
    for number in range(factors.size):
        header, length, words = RAW << 22, raw.shape[1], raw[number]
        if known[number]:
            header, length = _code(magnitudes[number], factors[number], codes, own)
            words = own
        taken = length + -length % UNIT
        counters[COUNTERS + slot] += taken
        start = counters[0]
        counters[0] += taken
        table[2 * number], table[2 * number + 1] = -1, header
        if start + length <= arena.size:
            arena[start : start + length] = words[:length]
            table[2 * number] = start // UNIT
            continue
        start = counters[1]
        counters[1] += taken
        if start + length <= spill.size:
            spill[start : start + length] = words[:length]
            table[2 * number] = -2 - start // UNIT
        else:
            counters[2] += 1


@kernel
def unpack(arena, spill, table, magnitudes):
    """Magnitudes of the blocks that have codes, and zeros for the others."""
    codes, marks = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.int32)
    for number in range(magnitudes.shape[0]):
        start, header = table[2 * number], table[2 * number + 1]
        count, width, signed, kind = header & 2047, header >> 11 & 31, header >> 21 & 1, header >> 22
        own = magnitudes[number]
        if start == -1 or kind == RAW:
            own[:] = 0
            continue
        words = arena[start * UNIT :] if start >= 0 else spill[(-2 - start) * UNIT :]
        is_sparse = kind == SPARSE
        if is_sparse:
            _take_planes(words, BLOCK, 1, marks)
            words = words[WORDS:]
        _take_planes(words, count if is_sparse else BLOCK, width + signed, codes)
        keep, taken = np.int32((1 << width) - 1), 0
        for i in range(BLOCK):
            if is_sparse and not marks[i]:
                own[i] = 0
                continue
            code = codes[taken]
            size = (code & keep) + np.int32(is_sparse)
            own[i] = -size if code >> width else size
            taken += 1
