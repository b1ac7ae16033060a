"""One chunk of 8-bit codes, Huffman coded: pairs of small codes as one symbol, or each code as one.

Layout, little endian: mode (u1: 1 single, 2 pairs), 3 unused bytes, bytes of escaped codes (u4), words of
the four streams (u4 each), code lengths of the 256 symbols (4 bits each, the even one low), the streams'
words (u4), the escaped codes.
"""

from __future__ import annotations

import struct
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from squeezebox.schema import FormatError

SINGLE, PAIRS = 1, 2
HEADER = struct.Struct("<BxxxI4I")
LENGTHS_BYTES = 128
# Fewer codes than this do not repay the table of code lengths.
FEWEST = 4096
# Pairs are given up for single codes when more than one in this many does not fit.
ESCAPES = 32
# Symbols are padded to a multiple of this: two for each of four streams.
LANES = 8


class Loops(Protocol):
    """What ``_reference/_huffman.py`` offers, interpreted or compiled."""

    pair_symbols: Any
    escaped_codes: Any
    split_symbols: Any
    count: Any
    code_lengths: Any
    code_words: Any
    decode_table: Any
    encode: Any
    decode: Any


def _padded(codes: NDArray[Any], multiple: int) -> NDArray[Any]:
    missing = -codes.size % multiple
    return np.pad(codes, (0, missing)) if missing else codes


def _symbols(loops: Loops, codes: NDArray[np.int8]) -> tuple[int, NDArray[np.uint8], NDArray[np.int8]]:
    """(mode, symbols, escaped codes)."""
    even = _padded(codes, 2 * LANES)
    symbols = np.empty(even.size // 2, np.uint8)
    escapes = loops.pair_symbols(even, symbols)
    if escapes * ESCAPES > symbols.size:
        return SINGLE, _padded(codes, LANES).view(np.uint8), codes[:0]
    escaped = np.empty(2 * escapes, np.int8)
    loops.escaped_codes(even, symbols, escaped)
    return PAIRS, symbols, escaped


def compress(loops: Loops, codes: NDArray[np.int8]) -> bytes | None:
    """The chunk's bytes, or None where there are too few codes to be worth it."""
    if codes.size < FEWEST:
        return None
    mode, symbols, escaped = _symbols(loops, codes)
    lengths = loops.code_lengths(loops.count(symbols, 4 if symbols.size > FEWEST else 1))
    streams = np.empty((4, 11 * (symbols.size // 4) // 32 + 2), np.uint32)
    sizes = loops.encode(symbols, lengths, loops.code_words(lengths), streams)
    table = (lengths[0::2] | lengths[1::2] << 4).astype(np.uint8)
    parts = [HEADER.pack(mode, escaped.size, *map(int, sizes)), table.tobytes()]
    parts += [streams[row, : sizes[row]].tobytes() for row in range(4)]
    return b"".join((*parts, escaped.tobytes()))


def _open(data: NDArray[np.uint8]) -> tuple[int, NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """(mode, code lengths, streams' starts, streams' words, escaped codes), sizes checked."""
    start = HEADER.size + LENGTHS_BYTES
    if data.size < start:
        raise FormatError(f"a Huffman chunk has only {data.size} bytes; truncated.")
    mode, escaped_bytes, *sizes = HEADER.unpack(data[: HEADER.size].tobytes())
    end = start + 4 * sum(sizes)
    if mode not in (SINGLE, PAIRS) or end == start or end + escaped_bytes != data.size:
        raise FormatError(f"a Huffman chunk of {data.size} bytes claims {end + escaped_bytes}; damaged.")
    table = data[HEADER.size : start]
    lengths = np.stack((table & 15, table >> 4), 1).reshape(-1).astype(np.int64)
    words = np.frombuffer(data[start:end].tobytes(), dtype="<u4")
    starts = np.concatenate(([0], np.cumsum(sizes)[:3])).astype(np.int64)
    return mode, lengths, starts, words, data[end:].view(np.int8)


def decompress(loops: Loops, data: NDArray[np.uint8], codes: NDArray[np.int8]) -> None:
    """The inverse of ``compress``, into ``codes``; FormatError if the parts do not fit together."""
    mode, lengths, starts, words, escaped = _open(data)
    book = loops.code_words(lengths)
    if not lengths.any() or (book[lengths > 0] < 0).any():
        raise FormatError("a Huffman chunk's code lengths are those of no prefix code; damaged.")
    padded = codes.size + -codes.size % (2 * LANES if mode == PAIRS else LANES)
    target = codes if padded == codes.size else np.empty(padded, np.int8)
    symbols = target.view(np.uint8) if mode == SINGLE else np.empty(padded // 2, np.uint8)
    loops.decode(words, starts, loops.decode_table(lengths, book), symbols)
    if mode == PAIRS:
        loops.split_symbols(symbols, escaped, target)
    if target is not codes:
        codes[:] = target[: codes.size]
