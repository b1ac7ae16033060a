"""One chunk of 8-bit codes, Huffman coded: one, two or four neighbouring codes are a symbol.

Layout, little endian: codes in a symbol (u1), 3 unused bytes, bytes of escaped codes (u4), bytes of the
four streams (u4 each), code lengths of the symbols (4 bits each, the even one low), the streams, eight
zero bytes, the escaped codes.
"""

from __future__ import annotations

import struct
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from squeezebox.codecs._reference._huffman import LONGEST
from squeezebox.codecs._workers import scratch
from squeezebox.schema import FormatError

HEADER = struct.Struct("<BxxxI4I")
# Number of symbols for each size of group; the last one stands for a group that has no symbol.
SYMBOLS = {1: 256, 2: 256, 4: 626}
GROUPS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
# Fewer codes than this do not repay the table of code lengths.
FEWEST = 4096
# Codes are padded to a multiple of this: groups of four, in four streams, four of them at a time.
MULTIPLE = 64
# Quads are tried while at most one pair in this many is too large for them, pairs likewise.
RARE = 48
# What a stream may write or read behind its end.
SPARE = 8


class Loops(Protocol):
    """What ``_reference/_huffman.py`` offers, interpreted or compiled."""

    pair_symbols: Any
    quad_symbols: Any
    group_size: Any
    compress: Any
    decompress: Any


def _merged() -> NDArray[np.uint16]:
    """For each symbol of a pair, ``a + 5 * b`` with both codes in [-2, 2] seen from -2; 999 for others."""
    first, second = np.arange(256) % 16 - 6, np.arange(256) // 16 - 6
    fits = (first >= 0) & (first < 5) & (second >= 0) & (second < 5)
    return np.where(fits, first + 5 * second, 999).astype(np.uint16)


def _expand(size: int) -> NDArray[Any]:
    """The codes of every symbol, seen as one integer; the escape's are those of no other symbol."""
    symbols = np.arange(SYMBOLS[size])
    if size == 1:
        return symbols.astype(np.uint8)
    if size == 2:
        columns = [symbols % 16 - 8, symbols // 16 - 8]
    else:
        columns = [symbols // 5**place % 5 - 2 for place in range(4)]
        columns = [np.where(symbols == SYMBOLS[4] - 1, 7, column) for column in columns]
    return np.stack(columns, 1).astype(np.int8).view(GROUPS[size]).reshape(-1)


MERGED = _merged()
EXPAND = {size: _expand(size) for size in SYMBOLS}


def _padded(codes: NDArray[Any]) -> NDArray[Any]:
    missing = -codes.size % MULTIPLE
    return np.pad(codes, (0, missing)) if missing else codes


def _symbols(loops: Loops, codes: NDArray[np.int8]) -> tuple[int, NDArray[Any]]:
    """(codes in a symbol, symbols): the largest groups that most codes fit in."""
    pairs = scratch("pairs", codes.size // 2, np.uint8)
    loops.pair_symbols(codes.view(np.uint16), pairs)
    size = loops.group_size(pairs, MERGED, RARE)
    if size == 4:
        symbols = scratch("quads", codes.size // 4, np.uint16)
        loops.quad_symbols(pairs, MERGED, symbols)
        return 4, symbols
    return (2, pairs) if size == 2 else (1, codes.view(np.uint8))


def compress(loops: Loops, codes: NDArray[np.int8]) -> bytes | None:
    """The chunk's bytes, or None where there are too few codes to be worth it."""
    if codes.size < FEWEST:
        return None
    codes = _padded(codes)
    size, symbols = _symbols(loops, codes)
    groups, lengths = codes.view(GROUPS[size]), np.empty(SYMBOLS[size], np.uint8)
    tables = scratch("tables", 4 * SYMBOLS[size], np.uint32).reshape(4, -1)
    target = scratch("streams", symbols.size * LONGEST // 8 + 64, np.uint8)
    ends = np.empty(6, np.int64)
    escaped = scratch("escaped", groups.size, groups.dtype)
    escape = -1 if size == 1 else SYMBOLS[size] - 1
    loops.compress(groups, symbols, escape, tables, lengths, target, ends, escaped)
    escaped = escaped[: ends[5]]
    header = HEADER.pack(size, escaped.nbytes, *map(int, np.diff(ends[:5])))
    table = (lengths[0::2] | lengths[1::2] << 4).astype(np.uint8)
    return b"".join((header, table.tobytes(), target[: ends[4] + SPARE].tobytes(), escaped.tobytes()))


def _open(data: NDArray[np.uint8]) -> tuple[int, NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """(codes in a symbol, code lengths, streams, their first bits, escaped groups), sizes checked."""
    head = HEADER.size
    size, escaped, *sizes = HEADER.unpack(data[:head].tobytes()) if data.size >= head else (0, 0)
    if size not in SYMBOLS:
        raise FormatError(f"a Huffman chunk of {data.size} bytes has symbols of {size} codes; damaged.")
    start = head + SYMBOLS[size] // 2
    end = start + sum(sizes) + SPARE
    if end + escaped != data.size or escaped % size:
        raise FormatError(f"a Huffman chunk of {data.size} bytes claims {end + escaped}; damaged.")
    table = data[head:start]
    lengths = np.stack((table & 15, table >> 4), 1).reshape(-1)
    starts = 8 * np.concatenate(([0], np.cumsum(sizes)[:3])).astype(np.int64)
    groups = np.frombuffer(data[end:].tobytes(), dtype=GROUPS[size])
    return size, lengths, data[start:end], starts, groups


def decompress(loops: Loops, data: NDArray[np.uint8], codes: NDArray[np.int8]) -> None:
    """The inverse of ``compress``, into ``codes``; FormatError if the parts do not fit together."""
    size, lengths, streams, starts, escaped = _open(data)
    whole = codes.size % MULTIPLE == 0
    target = codes if whole else np.empty(codes.size + -codes.size % MULTIPLE, np.int8)
    if not loops.decompress(lengths, streams, starts, EXPAND[size], escaped, target.view(GROUPS[size])):
        raise FormatError("a Huffman chunk's code lengths are those of no prefix code; damaged.")
    if not whole:
        codes[:] = target[: codes.size]
