"""The reference's Huffman loops, compiled: the same source, so the same bytes."""

from __future__ import annotations

from typing import Any

from numba import njit
from numba.extending import register_jitable

from squeezebox.codecs._cpu._blocks import OPTIONS
from squeezebox.codecs._reference import _huffman

register_jitable(_huffman.put)
register_jitable(_huffman.refill)

pair_symbols: Any = njit(**OPTIONS)(_huffman.pair_symbols)
escaped_codes: Any = njit(**OPTIONS)(_huffman.escaped_codes)
split_symbols: Any = njit(**OPTIONS)(_huffman.split_symbols)
count: Any = njit(**OPTIONS)(_huffman.count)
code_lengths: Any = njit(**OPTIONS)(_huffman.code_lengths)
code_words: Any = njit(**OPTIONS)(_huffman.code_words)
decode_table: Any = njit(**OPTIONS)(_huffman.decode_table)
encode: Any = njit(**OPTIONS)(_huffman.encode)
decode: Any = njit(**OPTIONS)(_huffman.decode)
