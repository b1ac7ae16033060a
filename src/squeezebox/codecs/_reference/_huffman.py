"""Loops of Huffman coding: bytes to symbols of one, two or four codes, to four bit streams, and back.

The CPU backend compiles these very functions, so the two cannot differ; without it they are slow. Each is
written in the subset of Python that numba compiles, on flat numpy arrays.
"""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import numpy as np

# No code is longer, so that a table of 4096 entries decodes one symbol and a window of 57 bits four.
LONGEST = 12


def window(data, position):
    """57 bits of the bytes ``data``, from bit ``position`` on; needs eight bytes there."""
    at = position >> 3
    return (int.from_bytes(data[at : at + 8].tobytes(), "little") >> (position & 7)) & ((1 << 57) - 1)


def emit(target, at, bits):
    """Write ``bits`` as eight bytes from byte ``at`` on."""
    target[at : at + 8] = np.frombuffer(int(bits).to_bytes(8, "little"), np.uint8)


def pair_symbols(pairs, symbols):
    """Pairs of codes in [-8, 7] as ``a + 8 | (b + 8) << 4``; 255 if one is outside, or both are 7.

    ``pairs`` holds two 8-bit codes in each uint16.
    """
    for i in range(symbols.size):
        pair = np.int32(pairs[i])
        both = ((pair & 0x7F7F) + 0x0808) ^ (pair & 0x8080)
        symbols[i] = 255 if both & 0xF0F0 else (both | both >> 4) & 255


def group_size(symbols, merged, rare):
    """How many codes should share a symbol, by a sample of the pairs' symbols.

    Four, unless more than one pair in ``rare`` does not fit in a quad; then two, unless as many do not fit
    in a pair either.
    """
    looked = outside = escaped = 0
    for i in range(0, symbols.size, 17):
        looked += 1
        outside += merged[symbols[i]] > 24
        escaped += symbols[i] == 255
    if outside * rare <= looked:
        return 4
    return 2 if escaped * rare <= looked else 1


def quad_symbols(pairs, merged, symbols):
    """Two symbols of pairs as one: ``merged[a] + 25 * merged[b]``, 625 if that is more."""
    for i in range(symbols.size):
        symbols[i] = min(int(merged[pairs[2 * i]]) + 25 * int(merged[pairs[2 * i + 1]]), 625)


def count(symbols, tables):
    """How often each symbol occurs, into ``tables[0]``; their number is a multiple of 4.

    Four tables, so that equal neighbours do not wait for each other.
    """
    tables[:] = 0
    first, second, third, fourth = tables[0], tables[1], tables[2], tables[3]
    for i in range(0, symbols.size, 4):
        first[symbols[i]] += 1
        second[symbols[i + 1]] += 1
        third[symbols[i + 2]] += 1
        fourth[symbols[i + 3]] += 1
    for i in range(first.size):
        first[i] += second[i] + third[i] + fourth[i]


def take_escaped(groups, symbols, escape, escaped):
    """The groups whose symbol is ``escape``, in order."""
    taken = 0
    for i in range(symbols.size):
        if symbols[i] == escape:
            escaped[taken] = groups[i]
            taken += 1


def put_escaped(groups, mark, escaped):
    """The inverse: groups equal to ``mark`` become the next escaped one."""
    taken = 0
    for i in range(groups.size):
        if groups[i] == mark and taken < escaped.size:
            groups[i] = escaped[taken]
            taken += 1


def depths(weights, depth):
    """Depth of each leaf in Huffman's tree over ascending ``weights``, by the two queues; needs two leaves.

    Both arrays have room for twice the leaves: the tree's inner nodes follow them.
    """
    used = weights.size // 2
    leaf, node = 0, used
    for fresh in range(used, 2 * used - 1):
        total = 0
        for _ in range(2):
            if leaf < used and (node >= fresh or weights[leaf] <= weights[node]):
                pick = leaf
                leaf += 1
            else:
                pick = node
                node += 1
            depth[pick] = fresh  # for now its parent
            total += int(weights[pick])
        weights[fresh] = total
    depth[2 * used - 2] = 0
    for i in range(2 * used - 3, -1, -1):
        depth[i] = depth[depth[i]] + 1


def limited(depth, sizes):
    """How many codes of each length to use if none may be longer than LONGEST.

    Cutting the longest ones short leaves too little room; lengthening some shorter ones makes it.
    """
    sizes[:] = 0
    for i in range(depth.size):
        sizes[min(int(depth[i]), LONGEST)] += 1
    room = 0
    for size in range(1, LONGEST + 1):
        room += int(sizes[size]) << (LONGEST - size)
    while room > 1 << LONGEST:
        size = LONGEST - 1
        while sizes[size] == 0:
            size -= 1
        sizes[size] -= 1
        sizes[size + 1] += 1
        room -= 1 << (LONGEST - size - 1)


def code_lengths(counts, lengths):
    """Bits of each symbol's code, 0 where it never occurs, at most LONGEST; fewer than 1024 symbols."""
    lengths[:] = 0
    keys = np.zeros(counts.size, np.int64)
    used = 0
    for i in range(counts.size):
        if counts[i] > 0:
            keys[used] = int(counts[i]) * 1024 + i
            used += 1
    order = np.sort(keys[:used])
    sizes = np.zeros(LONGEST + 1, np.int64)
    sizes[1] = 1
    if used > 1:
        weights, depth = np.zeros(2 * used, np.int64), np.zeros(2 * used, np.int64)
        weights[:used] = order // 1024
        depths(weights, depth)
        limited(depth[:used], sizes)
    size = LONGEST
    for i in range(used):
        while sizes[size] == 0:
            size -= 1
        lengths[order[i] % 1024] = size
        sizes[size] -= 1


def code_words(lengths, book):
    """Canonical codes, first bit lowest, plus 65536 * length; False if the lengths are of no prefix code."""
    following = np.zeros(LONGEST + 2, np.int64)
    for i in range(lengths.size):
        if lengths[i] > LONGEST:
            return False
        if lengths[i]:
            following[lengths[i] + 1] += 1
    code = 0
    for size in range(1, LONGEST + 2):
        code = (code + int(following[size])) << 1
        following[size] = code
    if following[LONGEST + 1] > 1 << (LONGEST + 1):
        return False
    for i in range(lengths.size):
        size = int(lengths[i])
        value, reverse = int(following[size]), 0
        following[size] += 1
        for bit in range(size):
            reverse |= ((value >> bit) & 1) << (size - 1 - bit)
        book[i] = reverse | size << 16
    return True


def encode(symbols, book, target, start):
    """A multiple of 4 symbols as one bit stream from byte ``start`` on; returns where it ends.

    Up to eight bytes behind the end are written too.
    """
    bits = held = 0
    at = start
    for i in range(0, symbols.size, 4):
        first, second = int(book[symbols[i]]), int(book[symbols[i + 1]])
        third, fourth = int(book[symbols[i + 2]]), int(book[symbols[i + 3]])
        bits |= (first & 0xFFFF) << held
        held += first >> 16
        bits |= (second & 0xFFFF) << held
        held += second >> 16
        bits |= (third & 0xFFFF) << held
        held += third >> 16
        bits |= (fourth & 0xFFFF) << held
        held += fourth >> 16
        emit(target, at, bits)
        at += held >> 3
        bits >>= held & 56
        held &= 7
    return at + 1


def compress(groups, symbols, escape, tables, lengths, target, ends, escaped):
    """Code lengths and the four streams of the symbols, and after them the groups without one.

    Args:
        groups: the codes, those of one symbol as one unsigned integer.
        symbols: their symbols; a multiple of 16.
        escape: the symbol of groups that have none, or -1.
        tables: room for ``count``.
        lengths: uint8, receives the code length of each symbol.
        target: uint8, receives the streams and 8 zero bytes.
        ends: int64, receives 0 and the ends of the four streams, then the number of escaped groups.
        escaped: room for as many groups, receives them.
    """
    count(symbols, tables)
    code_lengths(tables[0], lengths)
    book = np.zeros(lengths.size, np.uint32)
    code_words(lengths, book)
    quarter = symbols.size // 4
    ends[0] = 0
    for row in range(4):
        ends[row + 1] = encode(symbols[row * quarter : (row + 1) * quarter], book, target, ends[row])
    target[ends[4] : ends[4] + 8] = 0
    ends[5] = 0
    if escape >= 0 and tables[0, escape] > 0:
        ends[5] = tables[0, escape]
        take_escaped(groups, symbols, escape, escaped)


def decode_table(book, table):
    """16 * symbol + length for every LONGEST bits that may come next."""
    table[:] = 0
    for symbol in range(book.size):
        size = int(book[symbol]) >> 16
        if size:
            for entry in range(int(book[symbol]) & 0xFFFF, table.size, 1 << size):
                table[entry] = symbol << 4 | size


def decode(data, starts, table, expand, groups):
    """The inverse of ``encode`` for four streams at once, each a quarter: ``expand[symbol]`` goes out.

    ``data`` has at least eight bytes; nothing is read behind them, whatever the streams say.
    """
    quarter = groups.size // 4
    last = 8 * data.size - 64
    a, b = groups[:quarter], groups[quarter : 2 * quarter]
    c, d = groups[2 * quarter : 3 * quarter], groups[3 * quarter :]
    at_a, at_b, at_c, at_d = int(starts[0]), int(starts[1]), int(starts[2]), int(starts[3])
    for i in range(0, quarter, 4):
        at_a, at_b, at_c, at_d = min(at_a, last), min(at_b, last), min(at_c, last), min(at_d, last)
        bits_a, bits_b = window(data, at_a), window(data, at_b)
        bits_c, bits_d = window(data, at_c), window(data, at_d)
        for j in range(i, i + 4):
            entry_a, entry_b = int(table[bits_a & 4095]), int(table[bits_b & 4095])
            entry_c, entry_d = int(table[bits_c & 4095]), int(table[bits_d & 4095])
            a[j], b[j] = expand[entry_a >> 4], expand[entry_b >> 4]
            c[j], d[j] = expand[entry_c >> 4], expand[entry_d >> 4]
            bits_a >>= entry_a & 15
            bits_b >>= entry_b & 15
            bits_c >>= entry_c & 15
            bits_d >>= entry_d & 15
            at_a += entry_a & 15
            at_b += entry_b & 15
            at_c += entry_c & 15
            at_d += entry_d & 15


def decompress(lengths, streams, starts, expand, escaped, groups):
    """The inverse of ``compress``; False if the lengths are those of no prefix code."""
    book, table = np.zeros(lengths.size, np.uint32), np.zeros(1 << LONGEST, np.uint16)
    if not code_words(lengths, book):
        return False
    decode_table(book, table)
    decode(streams, starts, table, expand, groups)
    if escaped.size > 0:
        put_escaped(groups, expand[expand.size - 1], escaped)
    return True
