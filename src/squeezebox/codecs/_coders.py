"""Bytes in, fewer bytes out: Blosc2, imported on first use, and Huffman coding of one chunk of 8-bit codes.

Huffman's layout, little endian: codes in a symbol (u1), 3 unused bytes, bytes of escaped codes (u4), bytes of
the four streams (u4 each), code lengths of the symbols (4 bits each, the even one low), the streams, eight
zero bytes, the escaped codes.
"""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from squeezebox.codecs._reference._huffman import LONGEST, ROOM
from squeezebox.codecs._workers import scratch
from squeezebox.schema import CodecError, FormatError

# Blosc2's header, which comes on top of data that it stores unchanged.
HEADER_BYTES = 32


@lru_cache(maxsize=1)
def _library() -> ModuleType:
    try:
        import blosc2
    except ImportError as missing:
        raise CodecError(
            "the 'entropy' and 'lossless' codecs need Blosc2, which is not installed; pip install blosc2."
        ) from missing
    blosc2.set_releasegil(True)
    module: ModuleType = blosc2
    return module


def compress_bytes(data: NDArray[Any]) -> bytes:
    """One Blosc2 chunk: bit shuffle for codes of one byte, byte shuffle for wider items, then zstd 1."""
    blosc2 = _library()
    shuffle = blosc2.Filter.BITSHUFFLE if data.dtype.kind == "i" else blosc2.Filter.SHUFFLE
    packed: bytes = blosc2.compress2(
        data,
        codec=blosc2.Codec.ZSTD,
        clevel=1,
        filters=[blosc2.Filter.NOFILTER] * 5 + [shuffle],
        typesize=data.itemsize,
        blocksize=max(data.nbytes, 32),
        nthreads=1,
    )
    return packed


def decompress_bytes(packed: NDArray[np.uint8], out: NDArray[Any]) -> None:
    """Fill ``out`` from one chunk; FormatError if the chunk says it holds another size."""
    blosc2 = _library()
    if packed.nbytes < HEADER_BYTES:
        raise FormatError(f"a compressed chunk has only {packed.nbytes} bytes; truncated.")
    size, held, _ = blosc2.get_cbuffer_sizes(packed)
    if size != out.nbytes or held != packed.nbytes:
        raise FormatError(
            f"a compressed chunk claims {held} bytes for {size}, but {packed.nbytes} for {out.nbytes} "
            "were expected; damaged."
        )
    try:
        blosc2.decompress2(packed, dst=out, nthreads=1)
    except (RuntimeError, ValueError) as failure:
        raise FormatError(f"Blosc2 cannot decode a chunk of {packed.nbytes} bytes; damaged.") from failure


# Number of symbols for each size of group; the last one stands for a group that has no symbol.
SYMBOLS = {1: 256, 2: 256, 4: 626}
_GROUPS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
# Fewer codes than this do not repay the table of code lengths.
FEWEST = 4096
# Codes are padded to a multiple of this: groups of four, in four streams, four of them at a time.
MULTIPLE = 64


class Loops(Protocol):
    """What ``_reference/_huffman.py`` offers, interpreted or compiled."""

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
        return symbols.astype(np.uint32)
    if size == 2:
        columns = [symbols % 16 - 8, symbols // 16 - 8]
    else:
        columns = [symbols // 5**place % 5 - 2 for place in range(4)]
        columns = [np.where(symbols == SYMBOLS[4] - 1, 7, column) for column in columns]
    return np.stack(columns, 1).astype(np.int8).view(_GROUPS[size]).reshape(-1).astype(np.uint32)


MERGED = _merged()
EXPAND = {size: _expand(size) for size in SYMBOLS}


def compress_codes(loops: Loops, codes: NDArray[np.int8]) -> bytes | None:
    """The chunk's bytes, or None where there are too few codes to be worth it."""
    if codes.size < FEWEST:
        return None
    missing = -codes.size % MULTIPLE
    codes = np.pad(codes, (0, missing)) if missing else codes
    pairs, symbols = scratch("pairs", codes.size // 2, np.uint8), scratch("symbols", codes.size, np.uint16)
    tables, room = scratch("tables", 4 * SYMBOLS[4], np.uint32), scratch("room", ROOM, np.int64)
    target = scratch("bytes", 3 * codes.size + 1024, np.uint8)
    raw, doubles = codes.view(np.uint8), codes.view(np.uint16)
    nbytes = loops.compress(raw, doubles, MERGED, pairs, symbols, tables, room, target)
    return target[:nbytes].tobytes()


def decompress_codes(loops: Loops, data: NDArray[np.uint8], codes: NDArray[np.int8]) -> None:
    """The inverse of ``compress_codes``, into ``codes``; FormatError if the parts do not fit together."""
    size = int(data[0]) if data.size else 0
    missing = -codes.size % MULTIPLE
    target = np.empty(codes.size + missing, np.int8) if missing else codes
    tables = scratch("tables", 2 * SYMBOLS[4] + (1 << LONGEST), np.uint32)
    room, raw = scratch("room", ROOM, np.int64), target.view(np.uint8)
    if size not in SYMBOLS or not loops.decompress(data, EXPAND[size], size, tables, room, raw):
        raise FormatError(f"the parts of a Huffman chunk of {data.size} bytes do not fit together; damaged.")
    if missing:
        codes[:] = target[: codes.size]
