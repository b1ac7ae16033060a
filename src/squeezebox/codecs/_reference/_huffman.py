"""Loops of Huffman coding: bytes to symbols of one, two or four codes, to four bit streams, and back.

The CPU backend compiles these very functions, so the two cannot differ; without it they are slow. Each is
written in the subset of Python that numba compiles, on flat numpy arrays. They come from the caller, each of
one dtype: numba takes seconds to compile an allocation, a sort, a view or an assignment of arrays.
"""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code=assignment
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import numpy as np

# No code is longer, so that a table of 4096 entries decodes one symbol and a window of 57 bits four.
LONGEST = 12
# Quads are used while at most one pair in this many does not fit in one, pairs likewise.
RARE = 48
# Bytes before the code lengths.
HEAD = 24
# Two codes of a group without a symbol, as ``expand`` has it: 7 and 7.
ESCAPED = 0x0707
# Numbers of scratch that code lengths and code words take.
ROOM = 4096


def window(data, position):
    """57 bits of the bytes ``data``, from bit ``position`` on; needs eight bytes there."""
    at = int(position) >> 3
    return (int.from_bytes(data[at : at + 8].tobytes(), "little") >> (int(position) & 7)) & ((1 << 57) - 1)


def pair(codes, at):
    """Two codes as one number, the first one lowest."""
    return int(codes[at]) | int(codes[at + 1]) << 8


def emit(target, at, bits):
    """Write ``bits`` as eight bytes from byte ``at`` on."""
    target[at : at + 8] = np.frombuffer(int(bits).to_bytes(8, "little"), np.uint8)


def put_group(target, at, group, size):
    """Write the lowest ``size`` bytes of ``group`` from byte ``at`` on."""
    for place in range(size):
        target[at + place] = (int(group) >> (8 * place)) & 255


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


def quad_symbols(pairs, merged, symbols, groups):
    """Two symbols of pairs as one: ``merged[a] + 25 * merged[b]``, 625 if that is more."""
    for i in range(groups):
        symbols[i] = min(np.int64(merged[pairs[2 * i]]) + 25 * np.int64(merged[pairs[2 * i + 1]]), 625)


def count(symbols, groups, tables, number):
    """How often each of ``number`` symbols occurs, from the start of ``tables``; groups are a multiple of 4.

    Four tables, so that equal neighbours do not wait for each other.
    """
    for i in range(4 * number):
        tables[i] = 0
    first, second = tables[:number], tables[number : 2 * number]
    third, fourth = tables[2 * number : 3 * number], tables[3 * number :]
    for i in range(0, groups, 4):
        first[symbols[i]] += 1
        second[symbols[i + 1]] += 1
        third[symbols[i + 2]] += 1
        fourth[symbols[i + 3]] += 1
    for i in range(number):
        first[i] += second[i] + third[i] + fourth[i]


def take_escaped(codes, size, symbols, groups, escape, target, at):
    """The groups of 2 or 4 codes whose symbol is ``escape``, in order; returns where they end."""
    for i in range(groups):
        if symbols[i] == escape:
            target[at], target[at + 1] = codes[size * i], codes[size * i + 1]
            if size == 4:
                target[at + 2], target[at + 3] = codes[size * i + 2], codes[size * i + 3]
            at += size
    return at


def put_escaped(codes, size, data, at):
    """The inverse: groups that begin and end with ESCAPED, as no other does, become the next one."""
    for i in range(0, codes.size - size + 1, size):
        if (pair(codes, i) == ESCAPED) & (pair(codes, i + size - 2) == ESCAPED) and at + size <= data.size:
            codes[i], codes[i + 1] = data[at], data[at + 1]
            if size == 4:
                codes[i + 2], codes[i + 3] = data[at + 2], data[at + 3]
            at += size


def put_number(target, at, number):
    """A number of four bytes."""
    for place in range(4):
        target[at + place] = (number >> (8 * place)) & 255


def number_at(data, at):
    """The inverse of ``put_number``."""
    number = 0
    for place in range(4):
        number |= np.int64(data[at + place]) << (8 * place)
    return number


def ascending(keys, used):
    """Sort the first ``used`` keys, by Shell's method: they are a few hundred."""
    gap = used // 2
    while gap > 0:
        for i in range(gap, used):
            key, at = keys[i], i
            while at >= gap and keys[at - gap] > key:
                keys[at] = keys[at - gap]
                at -= gap
            keys[at] = key
        gap = 1 if gap == 2 else gap * 5 // 11


def depths(weights, depth, used):
    """Depth of each leaf in Huffman's tree over ``used`` ascending weights, by two queues; at least two.

    Both arrays have room for twice the leaves: the tree's inner nodes follow them.
    """
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
            total += weights[pick]
        weights[fresh] = total
    depth[2 * used - 2] = 0
    for i in range(2 * used - 3, -1, -1):
        depth[i] = depth[depth[i]] + 1


def limited(depth, used, sizes):
    """How many codes of each length to use if none may be longer than LONGEST.

    Cutting the longest ones short leaves too little room; lengthening some shorter ones makes it.
    """
    sizes[1] = 0
    for i in range(used):
        sizes[min(depth[i], LONGEST)] += 1
    room = 0
    for size in range(1, LONGEST + 1):
        room += sizes[size] << (LONGEST - size)
    while room > 1 << LONGEST:
        size = LONGEST - 1
        while sizes[size] == 0:
            size -= 1
        sizes[size] -= 1
        sizes[size + 1] += 1
        room -= 1 << (LONGEST - size - 1)


def code_lengths(counts, number, lengths, room):
    """Bits of each symbol's code, 0 where it never occurs, at most LONGEST; fewer than 1024 symbols."""
    sizes, keys = room[: LONGEST + 2], room[LONGEST + 2 : 1024 + LONGEST + 2]
    used = 0
    for i in range(number):
        lengths[i] = 0
        if counts[i] > 0:
            keys[used] = np.int64(counts[i]) * 1024 + i
            used += 1
    ascending(keys, used)
    for size in range(LONGEST + 2):
        sizes[size] = 0
    sizes[1] = 1
    if used > 1:
        weights = room[1024 + LONGEST + 2 :]
        depth = weights[2 * used :]
        for i in range(used):
            weights[i] = keys[i] >> 10
        depths(weights, depth, used)
        limited(depth, used, sizes)
    size = LONGEST
    for i in range(used):
        while sizes[size] == 0:
            size -= 1
        lengths[keys[i] & 1023] = size
        sizes[size] -= 1


def code_words(lengths, number, book, room):
    """Canonical codes, first bit lowest, plus 65536 * length; False if the lengths are of no prefix code."""
    following = room[: LONGEST + 3]
    for size in range(LONGEST + 3):
        following[size] = 0
    for i in range(number):
        size = np.int64(lengths[i])
        if size > LONGEST:
            return False
        if size:
            following[size + 1] += 1
    # So far following[size + 1] counts the words of a size; now following[size] becomes its first word.
    code = 0
    for size in range(1, LONGEST + 2):
        code = (code + following[size]) << 1
        following[size] = code
    # Kraft's inequality: of more words, one would begin another.
    if following[LONGEST + 1] > 1 << (LONGEST + 1):
        return False
    for i in range(number):
        size = np.int64(lengths[i])
        value, reverse = following[size], 0
        following[size] += 1
        for bit in range(size):
            reverse |= ((value >> bit) & 1) << (size - 1 - bit)
        book[i] = reverse | size << 16
    return True


def encode(symbols, first, last, book, target, start):
    """A multiple of 4 symbols as one bit stream from byte ``start`` on; returns where it ends.

    Up to eight bytes behind the end are written too.
    """
    bits = held = 0
    at = start
    for i in range(first, last, 4):
        a, b = np.int64(book[symbols[i]]), np.int64(book[symbols[i + 1]])
        c, d = np.int64(book[symbols[i + 2]]), np.int64(book[symbols[i + 3]])
        bits |= (a & 0xFFFF) << held
        held += a >> 16
        bits |= (b & 0xFFFF) << held
        held += b >> 16
        bits |= (c & 0xFFFF) << held
        held += c >> 16
        bits |= (d & 0xFFFF) << held
        held += d >> 16
        # Four words of at most 12 bits and the 7 that may be left over fit 64.
        emit(target, at, bits)
        at += held >> 3
        bits >>= held & 56
        held &= 7
    return at + 1


def compress(codes, doubles, merged, pairs, symbols, tables, room, target):
    """One chunk's bytes into ``target``; how many.

    Args:
        codes: uint8, a multiple of 64.
        doubles: the same memory as uint16.
        merged: see ``quad_symbols``.
        pairs: uint8, room for half as many.
        symbols: uint16, room for as many.
        tables: uint32, room for 4 * 626.
        room: int64, room for ROOM.
        target: uint8, room for 3 times as many and 1024 more.
    """
    pair_symbols(doubles, pairs)
    size = group_size(pairs, merged)
    groups, number = codes.size // size, 626 if size == 4 else 256
    if size == 4:
        quad_symbols(pairs, merged, symbols, groups)
    else:
        source = pairs if size == 2 else codes
        for i in range(groups):
            symbols[i] = source[i]
    count(symbols, groups, tables, number)
    book, lengths = tables[number : 2 * number], tables[2 * number :]
    code_lengths(tables, number, lengths, room)
    escaped = size > 1 and tables[number - 1] > 0
    code_words(lengths, number, book, room)
    put_number(target, 0, size)
    for i in range(number // 2):
        target[HEAD + i] = lengths[2 * i] | lengths[2 * i + 1] << 4
    end = HEAD + number // 2
    quarter = groups // 4
    for row in range(4):
        start = end
        end = encode(symbols, row * quarter, (row + 1) * quarter, book, target, start)
        put_number(target, 8 + 4 * row, end - start)
    emit(target, end, 0)
    start = end + 8
    end = start
    if escaped:
        end = take_escaped(codes, size, symbols, groups, number - 1, target, start)
    put_number(target, 4, end - start)
    return end


def decode_table(book, number, table):
    """16 * symbol + length for every LONGEST bits that may come next."""
    for entry in range(table.size):
        table[entry] = 0
    for symbol in range(number):
        size = np.int64(book[symbol]) >> 16
        if size:
            for entry in range(np.int64(book[symbol]) & 0xFFFF, table.size, 1 << size):
                table[entry] = symbol << 4 | size


def decode(data, starts, table, expand, size, target):
    """The inverse of ``encode`` for four streams at once, each a quarter: ``expand[symbol]`` goes out.

    ``data`` has at least eight bytes; nothing is read behind them, whatever the streams say.
    """
    quarter = target.size // 4
    last = 8 * data.size - 64
    at_a, at_b, at_c, at_d = starts[0], starts[1], starts[2], starts[3]
    # Each window has bits for four symbols, and no stream waits for another one's lengths.
    for i in range(0, quarter, 4 * size):
        at_a, at_b, at_c, at_d = min(at_a, last), min(at_b, last), min(at_c, last), min(at_d, last)
        bits_a, bits_b = window(data, at_a), window(data, at_b)
        bits_c, bits_d = window(data, at_c), window(data, at_d)
        for place in range(4):
            j = i + size * place
            entry_a, entry_b = np.int64(table[bits_a & 4095]), np.int64(table[bits_b & 4095])
            entry_c, entry_d = np.int64(table[bits_c & 4095]), np.int64(table[bits_d & 4095])
            put_group(target, j, expand[entry_a >> 4], size)
            put_group(target, j + quarter, expand[entry_b >> 4], size)
            put_group(target, j + 2 * quarter, expand[entry_c >> 4], size)
            put_group(target, j + 3 * quarter, expand[entry_d >> 4], size)
            bits_a >>= entry_a & 15
            bits_b >>= entry_b & 15
            bits_c >>= entry_c & 15
            bits_d >>= entry_d & 15
            at_a += entry_a & 15
            at_b += entry_b & 15
            at_c += entry_c & 15
            at_d += entry_d & 15


def decompress(data, expand, size, tables, room, codes):
    """The inverse of ``compress``, into ``codes``, a multiple of 64; False if the parts do not fit.

    Args:
        data: uint8.
        expand: uint32, the codes of each symbol.
        size: how many codes that are.
        tables: uint32, room for twice as many and for 2048 more.
        room: int64, room for ROOM.
        codes: uint8.
    """
    number = expand.size
    starts, end = room[LONGEST + 3 :], HEAD + number // 2
    if data.size < end + 8:
        return False
    for row in range(4):
        starts[row] = 8 * end
        end += number_at(data, 8 + 4 * row)
    escaped = number_at(data, 4)
    if end + 8 + escaped != data.size or escaped % size or (escaped and size == 1):
        return False
    lengths, book, table = tables[:number], tables[number : 2 * number], tables[-(1 << LONGEST) :]
    for i in range(number // 2):
        lengths[2 * i], lengths[2 * i + 1] = data[HEAD + i] & 15, data[HEAD + i] >> 4
    if not code_words(lengths, number, book, room):
        return False
    decode_table(book, number, table)
    decode(data, starts, table, expand, size, codes)
    if escaped > 0:
        put_escaped(codes, size, data, end + 8)
    return True
