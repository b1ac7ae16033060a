"""Loops of the entropy codecs over one chunk; those of Huffman coding are the reference's own, compiled."""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload, register_jitable

from squeezebox.codecs._cpu._parts import mirrored, order, round_block, spread, whole_block
from squeezebox.codecs._kernels import PART, kernel, kernel_part
from squeezebox.codecs._reference import _huffman
from squeezebox.codecs._reference._quantise import FIRST_TURN, NEXT_TURN, OFFSET, SHIFT

_FIRST_NEAREST, _FIRST_SIGNED = FIRST_TURN[False], FIRST_TURN[True]
# From this lag on, rows are long enough for vector instructions.
WIDE_LAG = 24


@kernel
def extent(bits, edges):
    """Bits of the smallest and largest element, NaN and infinity among them, into ``edges``."""
    first = mirrored(bits, bits[0])
    low, high = order(bits, first, first)
    edges[0], edges[1] = mirrored(bits, low), mirrored(bits, high)


@kernel_part
def _nearest(block, step, inverse, decoded, codes):
    for i in range(block.size):
        code = np.rint(block[i] * inverse)
        decoded[i] = code * step
        codes[i] = codes.dtype.type(np.int32(code))


@kernel_part
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


@kernel_part
def _misses(block, decoded, limit, keep_sign):
    zero = block.dtype.type(0)
    misses = np.int32(0)
    for i in range(block.size):
        far = not (abs(block[i] - decoded[i]) <= limit)
        lost = keep_sign & ((block[i] == zero) != (decoded[i] == zero))
        misses = np.int32(misses | np.int32(far | lost))
    return misses != 0


@kernel_part
def _phases(position, dither, keep_sign, own):
    """Each element's phase into ``own``; ``dither`` neighbours share one, 0: all."""
    done = 0
    while done < own.size:
        end, phase = own.size, np.float32(SHIFT) if keep_sign else np.float32(0)
        if dither:
            run = (position + done) // dither
            end = min(done + dither - (position + done) % dither, own.size)
            turn = ((_FIRST_SIGNED if keep_sign else _FIRST_NEAREST) + run * NEXT_TURN) & 0xFFFF
            phase = np.float32(turn * 2.0**-17 if keep_sign else turn * 2.0**-16 - 0.5)
        for i in range(done, end):
            own[i] = phase
        done = end


@kernel_part
def _narrow_nearest(flat, inverses, phases, most, codes):
    zero, misses = np.float32(0), np.int32(0)
    for i in range(flat.size):
        code = np.rint(flat[i] * inverses[i] + phases[i])
        misses |= np.int32(not (abs(code) <= most)) | np.int32((phases[i] != zero) & (flat[i] == zero))
        codes[i] = codes.dtype.type(np.int32(code))
    return misses


@kernel_part
def _narrow_signed(flat, inverses, phases, most, codes):
    zero, one = np.float32(0), np.float32(1)
    misses = np.int32(0)
    for i in range(flat.size):
        value = flat[i]
        code = np.ceil(abs(value) * inverses[i] + phases[i])
        misses |= np.int32(not (code <= most))
        code = code if code > one else one
        code = -code if value < zero else code
        code = code if value != zero else zero
        codes[i] = codes.dtype.type(np.int32(code))
    return misses


@kernel
def narrow(flat, start, inner, inverses, dither, keep_sign, most, space, codes):
    """``narrow`` of the reference; False where it gives None. ``space``: two blocks."""
    own, phases = space
    misses, moves = np.int32(0), inverses.size > 1
    for begin in range(0, flat.size, own.size):
        if begin == 0 or moves:
            spread(inverses, inner, start + begin, own)
        if begin == 0 or dither:
            _phases(start + begin, dither, keep_sign, phases)
        here, there = flat[begin : begin + own.size], codes[begin : begin + own.size]
        if keep_sign:
            misses |= _narrow_signed(here, own, phases, most, there)
        else:
            misses |= _narrow_nearest(here, own, phases, most, there)
    return misses == 0


@kernel
def widen(codes, start, inner, steps, dither, keep_sign, space, out):
    """``widen`` of the reference."""
    own, phases = space
    zero, half, moves = np.float32(0), np.float32(0.5), steps.size > 1
    for begin in range(0, out.size, own.size):
        if begin == 0 or moves:
            spread(steps, inner, start + begin, own)
        if begin == 0 or dither:
            _phases(start + begin, dither, keep_sign, phases)
        here, there = codes[begin : begin + own.size], out[begin : begin + own.size]
        if keep_sign:
            for i in range(there.size):
                size = np.float32(np.int32(here[i]))
                offset = phases[i] + half
                inward = offset if size > zero else -offset
                there[i] = (size - inward if size != zero else zero) * own[i]
        else:
            for i in range(there.size):
                there[i] = (np.float32(np.int32(here[i])) - phases[i]) * own[i]


@kernel
def quantise(flat, step, inverse, limit, keep_sign, space, rounding, codes):
    """int32 codes of a chunk; False once a block has an element that would miss ``limit`` or become zero.

    Decoded values are rounded as ``rounding`` says (see ``round_block``): compared as they will come back.
    """
    scratch, decoded, bits, block_codes = space
    for start in range(0, flat.size, scratch.size):
        block = whole_block(flat[start : start + scratch.size], scratch)
        if keep_sign:
            _signed(block, step, inverse, decoded, block_codes)
        else:
            _nearest(block, step, inverse, decoded, block_codes)
        round_block(decoded, bits, rounding)
        if _misses(block, decoded, limit, keep_sign):
            return False
        target = codes[start : start + scratch.size]
        for i in range(target.size):
            target[i] = block_codes[i]
    return True


@kernel
def dequantise(codes, step, keep_sign, values):
    """Values of a chunk's int32 codes."""
    zero, offset = values.dtype.type(0), values.dtype.type(OFFSET)
    for i in range(values.size):
        code = values.dtype.type(codes[i])
        inward = offset if code > zero else -offset
        inward = inward if keep_sign and code != zero else zero
        values[i] = (code - inward) * step


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


_WORD = ir.IntType(64)


def _word_at(context, builder, kind, array, byte):
    """Pointer to eight bytes of a uint8 array, on no particular boundary."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [byte]), _WORD.as_pointer())


@intrinsic
def _load(typing_context, data, position):
    def generate(context, builder, signature, arguments):
        byte = builder.lshr(arguments[1], _WORD(3))
        word = builder.load(_word_at(context, builder, signature.args[0], arguments[0], byte), align=1)
        shifted = builder.lshr(word, builder.and_(arguments[1], _WORD(7)))
        return builder.and_(shifted, _WORD((1 << 57) - 1))

    return types.int64(data, types.int64), generate


@intrinsic
def _load_pair(typing_context, codes, at):
    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(16).as_pointer())
        return builder.zext(builder.load(address, align=1), _WORD)

    return types.int64(codes, types.int64), generate


@intrinsic
def _store(typing_context, target, at, bits):
    def generate(context, builder, signature, arguments):
        address = _word_at(context, builder, signature.args[0], arguments[0], arguments[1])
        builder.store(arguments[2], address, align=1)
        return context.get_dummy_value()

    return types.void(target, types.int64, types.int64), generate


@intrinsic
def _store_group(typing_context, target, at, group, size):
    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.gep(data, [arguments[1]])

        def store(nbytes):
            kind = ir.IntType(8 * nbytes)
            word = arguments[2] if nbytes == 4 else builder.trunc(arguments[2], kind)
            builder.store(word, builder.bitcast(address, kind.as_pointer()), align=1)

        # The size does not change within a loop, so no branch waits for it.
        with builder.if_else(builder.icmp_signed("==", arguments[3], _WORD(4))) as (four, fewer):
            with four:
                store(4)
            with fewer, builder.if_else(builder.icmp_signed("==", arguments[3], _WORD(2))) as (two, one):
                with two:
                    store(2)
                with one:
                    store(1)
        return context.get_dummy_value()

    return types.void(target, types.int64, types.uint32, types.int64), generate


@overload(_huffman.window)
def _window(data, position):
    return lambda data, position: _load(data, position)  # type: ignore[call-arg]


@overload(_huffman.pair)
def _pair(codes, at):
    return lambda codes, at: _load_pair(codes, at)  # type: ignore[call-arg]


@overload(_huffman.emit)
def _emit(target, at, bits):
    return lambda target, at, bits: _store(target, at, bits)  # type: ignore[call-arg]


@overload(_huffman.put_group)
def _put_group(target, at, group, size):
    return lambda target, at, group, size: _store_group(target, at, group, size)  # type: ignore[call-arg]


for _step in (
    _huffman.pair_symbols,
    _huffman.quad_symbols,
    _huffman.group_size,
    _huffman.count,
    _huffman.take_escaped,
    _huffman.put_escaped,
    _huffman.put_number,
    _huffman.number_at,
    _huffman.ascending,
    _huffman.depths,
    _huffman.limited,
    _huffman.code_lengths,
    _huffman.code_words,
    _huffman.encode,
    _huffman.decode_table,
    _huffman.decode,
):
    register_jitable(**PART)(_step)

compress: Any = kernel(_huffman.compress)
decompress: Any = kernel(_huffman.decompress)
