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
# Quads are used while at most one pair in this many does not fit in one, pairs likewise.
RARE = 48
# Bytes before the code lengths.
HEAD = 24


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


def group_size(symbols, merged):
    """How many codes should share a symbol, by a sample of the pairs' symbols.

    Four, unless more than one pair in RARE does not fit in a quad; then two, unless as many do not fit in a
    pair either.
    """
    looked = outside = escaped = 0
    for i in range(0, symbols.size, 17):
        looked += 1
        outside += merged[symbols[i]] > 24
        escaped += symbols[i] == 255
    if outside * RARE <= looked:
        return 4
    return 2 if escaped * RARE <= looked else 1


def quad_symbols(pairs, merged, symbols):
    """Two symbols of pairs as one: ``merged[a] + 25 * merged[b]``, 625 if that is more."""
    for i in range(symbols.size):
        symbols[i] = min(int(merged[pairs[2 * i]]) + 25 * int(merged[pairs[2 * i + 1]]), 625)


def count(symbols, tables):
    """How often each symbol occurs, into the first quarter of ``tables``; their number is a multiple of 4.

    Four tables, so that equal neighbours do not wait for each other.
    """
    tables[:] = 0
    number = tables.size // 4
    first, second = tables[:number], tables[number : 2 * number]
    third, fourth = tables[2 * number : 3 * number], tables[3 * number :]
    for i in range(0, symbols.size, 4):
        first[symbols[i]] += 1
        second[symbols[i + 1]] += 1
        third[symbols[i + 2]] += 1
        fourth[symbols[i + 3]] += 1
    for i in range(number):
        first[i] += second[i] + third[i] + fourth[i]


def take_escaped(codes, size, symbols, escape, target, at):
    """The groups of ``size`` codes whose symbol is ``escape``, in order; returns where they end."""
    for i in range(symbols.size):
        if symbols[i] == escape:
            for j in range(size):
                target[at + j] = np.int32(codes[size * i + j]) & 255
            at += size
    return at


def put_escaped(groups, mark, size, data, at, codes):
    """The inverse: groups equal to ``mark`` become the next escaped one."""
    for i in range(groups.size):
        if groups[i] == mark and at + size <= data.size:
            for j in range(size):
                codes[size * i + j] = ((np.int32(data[at + j]) + 128) & 255) - 128
            at += size


def put_number(target, at, number):
    """A number of four bytes."""
    for place in range(4):
        target[at + place] = (number >> (8 * place)) & 255


def number_at(data, at):
    """The inverse of ``put_number``."""
    number = 0
    for place in range(4):
        number |= int(data[at + place]) << (8 * place)
    return number


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
    # So far following[size + 1] counts the words of a size; now following[size] becomes its first word.
    code = 0
    for size in range(1, LONGEST + 2):
        code = (code + int(following[size])) << 1
        following[size] = code
    # Kraft's inequality: of more words, one would begin another.
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
        # Four words of at most 12 bits and the 7 that may be left over fit 64.
        emit(target, at, bits)
        at += held >> 3
        bits >>= held & 56
        held &= 7
    return at + 1


def streams(codes, size, symbols, tables, target):
    """One chunk's bytes into ``target``, for groups of ``size`` codes and their symbols; how many."""
    number = tables.size // 4
    lengths, book = np.zeros(number, np.uint8), np.zeros(number, np.uint32)
    count(symbols, tables)
    code_lengths(tables[:number], lengths)
    code_words(lengths, book)
    put_number(target, 0, size)
    for i in range(number // 2):
        target[HEAD + i] = lengths[2 * i] | lengths[2 * i + 1] << 4
    end = HEAD + number // 2
    quarter = symbols.size // 4
    for row in range(4):
        start = end
        end = encode(symbols[row * quarter : (row + 1) * quarter], book, target, start)
        put_number(target, 8 + 4 * row, end - start)
    emit(target, end, 0)
    start = end + 8
    end = start
    if size > 1 and tables[number - 1] > 0:
        end = take_escaped(codes, size, symbols, number - 1, target, start)
    put_number(target, 4, end - start)
    return end


def compress(codes, merged, pairs, quads, tables, target):
    """One chunk's bytes into ``target``; how many.

    Args:
        codes: a multiple of 64.
        merged: see ``quad_symbols``.
        pairs: uint8, room for half as many.
        quads: uint16, room for a quarter as many.
        tables: uint32, room for 4 * 626.
        target: uint8, room for 3 times as many and 1024 more.
    """
    pair_symbols(codes.view(np.uint16), pairs)
    size = group_size(pairs, merged)
    if size == 4:
        quad_symbols(pairs, merged, quads)
        return streams(codes, size, quads, tables, target)
    if size == 2:
        return streams(codes, size, pairs, tables[:1024], target)
    return streams(codes, size, codes.view(np.uint8), tables[:1024], target)


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
    # Each window has bits for four symbols, and no stream waits for another one's lengths.
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


def decompress(data, expand, groups, codes):
    """The inverse of ``compress``, into ``groups``, seen as ``codes`` too; False if the parts do not fit."""
    size, number = codes.size // groups.size, expand.size
    starts, end = np.zeros(5, np.int64), HEAD + number // 2
    if data.size < end + 8:
        return False
    for row in range(4):
        starts[row] = 8 * end
        end += number_at(data, 8 + 4 * row)
    escaped = number_at(data, 4)
    if end + 8 + escaped != data.size or escaped % size:
        return False
    lengths, book = np.zeros(number, np.uint8), np.zeros(number, np.uint32)
    for i in range(number // 2):
        lengths[2 * i], lengths[2 * i + 1] = data[HEAD + i] & 15, data[HEAD + i] >> 4
    table = np.zeros(1 << LONGEST, np.uint16)
    if not code_words(lengths, book):
        return False
    decode_table(book, table)
    decode(data, starts, table, expand, groups)
    if escaped > 0:
        put_escaped(groups, expand[number - 1], size, data, end + 8, codes)
    return True
