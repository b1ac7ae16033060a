"""Loops of Huffman coding: bytes to four bit streams and back.

The CPU backend compiles these very functions, so the two cannot differ; without it they are slow. Each is
written in the subset of Python that numba compiles, on flat numpy arrays, and allocates what it returns.
"""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import numpy as np

# No code is longer than 11 bits, so that a table of 2048 entries decodes one symbol. Symbol 255 of
# ``pair_symbols`` stands for a pair with a code outside [-7, 7].


def pair_symbols(codes, symbols):
    """One symbol for two neighbouring codes; the number of pairs that do not fit."""
    escapes = 0
    for i in range(symbols.size):
        first = np.int32(codes[2 * i]) + 7
        second = np.int32(codes[2 * i + 1]) + 7
        fits = (first >= 0) & (first < 15) & (second >= 0) & (second < 15)
        symbols[i] = (first << 4) | second if fits else 255
        escapes += not fits
    return escapes


def escaped_codes(codes, symbols, escaped):
    """The pairs that do not fit, in order."""
    taken = 0
    if escaped.size == 0:
        return
    for i in range(symbols.size):
        if symbols[i] == 255:
            escaped[taken] = codes[2 * i]
            escaped[taken + 1] = codes[2 * i + 1]
            taken += 2


def split_symbols(symbols, escaped, codes):
    """The inverse of ``pair_symbols``; ``escaped`` holds the pairs that did not fit, in order."""
    for i in range(symbols.size):
        codes[2 * i] = (np.int32(symbols[i]) >> 4) - 7
        codes[2 * i + 1] = (np.int32(symbols[i]) & 15) - 7
    if escaped.size == 0:
        return
    taken = 0
    for i in range(symbols.size):
        if symbols[i] == 255 and taken + 1 < escaped.size:
            codes[2 * i] = escaped[taken]
            codes[2 * i + 1] = escaped[taken + 1]
            taken += 2


def count(symbols, stride):
    """About how often each byte occurs: 8 of every ``8 * stride`` are looked at, and none counts as never.

    Four tables, so that equal neighbours do not wait for each other.
    """
    tables = np.zeros((4, 256), np.uint32)
    first, second, third, fourth = tables[0], tables[1], tables[2], tables[3]
    for start in range(0, symbols.size - 7, 8 * stride):
        for i in range(start, start + 8, 4):
            first[symbols[i]] += 1
            second[symbols[i + 1]] += 1
            third[symbols[i + 2]] += 1
            fourth[symbols[i + 3]] += 1
    return tables.sum(0).astype(np.int64) * 64 + 1


def code_lengths(counts):
    """Bits of each symbol's code, 0 where its count is, at most 11; needs two counts above 0.

    Huffman's two queues over the sorted counts; counts are halved until no code is too long.
    """
    lengths = np.zeros(256, np.int64)
    weights = counts.copy()
    used = int((counts > 0).sum())
    parents = np.zeros(2 * used - 1, np.int64)
    depths = np.zeros(2 * used - 1, np.int64)
    heap = np.zeros(2 * used - 1, np.int64)
    while True:
        order = np.sort((weights * 256 + np.arange(256))[counts > 0])
        heap[:used] = order // 256
        leaf, node = 0, used
        for fresh in range(used, 2 * used - 1):
            total = 0
            for _ in range(2):
                if leaf < used and (node >= fresh or heap[leaf] <= heap[node]):
                    pick = leaf
                    leaf += 1
                else:
                    pick = node
                    node += 1
                parents[pick] = fresh
                total += heap[pick]
            heap[fresh] = total
        for position in range(2 * used - 3, -1, -1):
            depths[position] = depths[parents[position]] + 1
        if depths[:used].max() <= 11:
            for position in range(used):
                lengths[order[position] % 256] = depths[position]
            return lengths
        weights = (weights + 1) // 2


def code_words(lengths):
    """Canonical codes, first bit lowest; all -1 if the lengths are not those of a prefix code."""
    words = np.full(256, -1, np.int64)
    filled = 0
    for symbol in range(256):
        if lengths[symbol]:
            filled += 1 << (11 - min(lengths[symbol], 11))
    if filled > 2048 or lengths.max() > 11:
        return words
    code = 0
    for length in range(1, 12):
        for symbol in range(256):
            if lengths[symbol] == length:
                reverse = 0
                for bit in range(length):
                    reverse |= ((code >> bit) & 1) << (length - 1 - bit)
                words[symbol] = reverse
                code += 1
        code <<= 1
    return words


def decode_table(lengths, words):
    """Symbol + 256 * length for every 11 bits that may come next."""
    table = np.zeros(2048, np.uint16)
    for symbol in range(256):
        length = lengths[symbol]
        if length:
            for entry in range(words[symbol], 2048, 1 << length):
                table[entry] = symbol | (length << 8)
    return table


def put(bits, held, first, second, target, at):
    """Append two (code + 65536 * length) entries; whole words go out."""
    bits |= (first & 0xFFFF) << held
    held += first >> 16
    bits |= (second & 0xFFFF) << held
    held += second >> 16
    target[at] = bits & 0xFFFFFFFF
    full = held >> 5
    return bits >> (full << 5), held & 31, at + full


def encode(symbols, lengths, words, out):
    """Four quarters of the symbols as four bit streams, one a row of ``out``; the words each one takes.

    The number of symbols is a multiple of 8; a row needs ``11 * quarter // 32 + 2`` words.
    """
    book = (words & 0xFFFF) | (lengths << 16)
    quarter = symbols.size // 4
    a, b = symbols[:quarter], symbols[quarter : 2 * quarter]
    c, d = symbols[2 * quarter : 3 * quarter], symbols[3 * quarter :]
    row_a, row_b, row_c, row_d = out[0], out[1], out[2], out[3]
    bits_a = bits_b = bits_c = bits_d = 0
    held_a = held_b = held_c = held_d = 0
    at_a = at_b = at_c = at_d = 0
    for i in range(0, quarter, 2):
        first, second = int(book[a[i]]), int(book[a[i + 1]])
        bits_a, held_a, at_a = put(bits_a, held_a, first, second, row_a, at_a)
        first, second = int(book[b[i]]), int(book[b[i + 1]])
        bits_b, held_b, at_b = put(bits_b, held_b, first, second, row_b, at_b)
        first, second = int(book[c[i]]), int(book[c[i + 1]])
        bits_c, held_c, at_c = put(bits_c, held_c, first, second, row_c, at_c)
        first, second = int(book[d[i]]), int(book[d[i + 1]])
        bits_d, held_d, at_d = put(bits_d, held_d, first, second, row_d, at_d)
    row_a[at_a], row_b[at_b], row_c[at_c], row_d[at_d] = bits_a, bits_b, bits_c, bits_d
    return np.array([at_a + 1, at_b + 1, at_c + 1, at_d + 1])


def refill(bits, held, words, at):
    """At least 32 bits held; past the end the last word comes again."""
    need = 1 if held < 32 else 0
    word = int(words[min(at, words.size - 1)]) * need
    return bits | (word << held), held + 32 * need, at + need


def decode(words, starts, table, symbols):
    """The inverse of ``encode`` for streams that start at ``starts``, one after the other in ``words``."""
    quarter = symbols.size // 4
    a, b = symbols[:quarter], symbols[quarter : 2 * quarter]
    c, d = symbols[2 * quarter : 3 * quarter], symbols[3 * quarter :]
    bits_a = bits_b = bits_c = bits_d = 0
    held_a = held_b = held_c = held_d = 0
    at_a, at_b, at_c, at_d = int(starts[0]), int(starts[1]), int(starts[2]), int(starts[3])
    for i in range(0, quarter, 2):
        bits_a, held_a, at_a = refill(bits_a, held_a, words, at_a)
        bits_b, held_b, at_b = refill(bits_b, held_b, words, at_b)
        bits_c, held_c, at_c = refill(bits_c, held_c, words, at_c)
        bits_d, held_d, at_d = refill(bits_d, held_d, words, at_d)
        for j in range(i, i + 2):
            entry_a, entry_b = int(table[bits_a & 2047]), int(table[bits_b & 2047])
            entry_c, entry_d = int(table[bits_c & 2047]), int(table[bits_d & 2047])
            a[j], b[j], c[j], d[j] = entry_a & 255, entry_b & 255, entry_c & 255, entry_d & 255
            bits_a >>= entry_a >> 8
            bits_b >>= entry_b >> 8
            bits_c >>= entry_c >> 8
            bits_d >>= entry_d >> 8
            held_a -= entry_a >> 8
            held_b -= entry_b >> 8
            held_c -= entry_c >> 8
            held_d -= entry_d >> 8
