"""The reference's Huffman loops, compiled: the same source, so the same bytes."""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload, register_jitable

from squeezebox.codecs._cpu._numba import PART, kernel
from squeezebox.codecs._reference import _huffman

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
