"""Bytes that live while each operator of a joint graph runs, for any choice of what forward saves; compiled.

A storage lives from the operator that writes it to the last that reads it, itself or through views and
operators that Inductor fuses into their readers, which write nothing.
"""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

INPUT, VIEW, FUSED, SUM, KERNEL = range(5)
COMPUTED, KEPT, PACKED = range(3)  # what becomes of a value that backward reads
UNKNOWN = np.int64(-(1 << 62))  # of an error that was not measured
_READS = 4  # of an operator that Inductor writes to memory if several read it
_MANY = 1 << 20

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Nodes(NamedTuple):
    """A joint graph's nodes, by their places in it; what each reads is flat, with where that begins."""

    starts: Integers
    sources: Integers
    root: Integers  # the node that made its storage
    nbytes: Integers  # of that storage
    packed: Integers  # bytes of the node's value in fewer bits,
    packing: Integers  # and what packing it takes besides
    kind: NDArray[np.int8]
    heavy: Flags  # Inductor writes it to memory if several read it
    item: Flags  # one of several results, which were written when the node before was
    drawn: Flags  # computed again, it would have another value
    seconds: NDArray[np.float64]  # of computing it again,
    writing: NDArray[np.float64]  # more where Inductor writes it to memory then,
    unpacking: NDArray[np.float64]  # seconds of packing and unpacking
    result: Flags  # of forward
    gradient: Flags  # given back by backward
    spent: Flags  # a gradient that is used up as soon as it is there,
    spending: Integers  # and what that takes besides
    forward: Integers  # that run in forward,
    backward: Integers  # and those of backward, and its results


class Errors(NamedTuple):
    """By how many bytes the model here was too low at each node, in forward and in backward."""

    ahead: Integers
    back: Integers


@njit(cache=True, nogil=True)
def _reads(nodes, node, unpacked):
    """Where in ``sources`` what a node reads is; where it is unpacked, none of it."""
    return range(nodes.starts[node], nodes.starts[node if unpacked else node + 1])


@njit(cache=True, nogil=True)
def order_of(nodes, saved):
    """Backward with what it computes again or unpacks, right before the first use."""
    count = len(nodes.root)
    done, queued = saved == KEPT, np.zeros(count, np.bool_)
    for node in range(count):
        if nodes.kind[node] == INPUT:
            done[node] = True
    order, length = np.empty(count, np.int64), 0
    stack = np.empty(count, np.int64)
    for wanted in nodes.backward:
        first, top = length, 0
        if not done[wanted] and not queued[wanted]:
            queued[wanted], stack[0], top = True, wanted, 1
        while top:
            top -= 1
            node = stack[top]
            order[length] = node
            length += 1
            for read in _reads(nodes, node, saved[node] == PACKED):
                source = nodes.sources[read]
                if not done[source] and not queued[source]:
                    queued[source], stack[top] = True, source
                    top += 1
        if length > first + 1:
            order[first:length] = np.sort(order[first:length])
    return order[:length]


@njit(cache=True, nogil=True)
def _written(nodes, order, kept, packed, unpacked):
    """Nodes whose results Inductor writes to memory, unlike views and what it fuses into all readers."""
    count = len(nodes.root)
    readers, outside = np.zeros(count, np.int64), packed.copy()
    for number in range(len(order) - 1, -1, -1):
        node = order[number]
        is_view, is_kernel = nodes.kind[node] == VIEW, nodes.kind[node] == KERNEL
        for read in _reads(nodes, node, unpacked[node]):
            source = nodes.sources[read]
            readers[source] = min(_MANY, readers[source] + (readers[node] if is_view else 1))
            outside[source] |= outside[node] if is_view else is_kernel
    written, reads = np.zeros(count, np.bool_), np.ones(count, np.int64)
    for node in order:
        if nodes.kind[node] == VIEW and not unpacked[node]:
            continue
        if nodes.kind[node] == FUSED or unpacked[node]:
            total = 0
            for read in _reads(nodes, node, unpacked[node]):
                total += reads[nodes.sources[read]]
            reads[node] = min(total, _MANY)
            several = readers[node] > 1 and (total > _READS or nodes.heavy[node])
            if not (several or outside[node] or kept[nodes.root[node]] or nodes.spent[node]):
                continue
            reads[node] = 1
        written[node] = True
    return written


@njit(cache=True, nogil=True)
def _use(nodes, order, there, kept, packed, unpacked):
    """Bytes that live while each operator runs, and the nodes that are written to memory.

    Of the nodes of ``order``, those ``packed`` are held in fewer bits from when they are written, and those
    ``unpacked`` were until they are read.
    """
    count, length = len(nodes.root), len(order)
    written, within = _written(nodes, order, kept, packed, unpacked), np.zeros(count, np.bool_)
    within[order] = True
    reached = np.full(count, -1, np.int64)  # the last place that reads it, as far as it is known
    last = np.full(count, -1, np.int64)
    changes = np.zeros(length + 2, np.int64)
    for number in range(length - 1, -1, -1):
        node = order[number]
        until = number if written[node] or packed[node] or nodes.spent[node] else reached[node]
        if unpacked[node]:
            changes[0] += nodes.packed[node]
            changes[max(until, number) + 1] -= nodes.packed[node]
        for read in _reads(nodes, node, unpacked[node]):
            source = nodes.sources[read]
            if within[source] and not written[source]:
                reached[source] = max(reached[source], until)
            else:
                root = nodes.root[source]
                last[root] = max(last[root], until)
    born = np.where(there, 0, -1)
    for number, node in enumerate(order):
        if written[node] and born[nodes.root[node]] < 0:
            born[nodes.root[node]] = max(number - int(nodes.item[node]), 0)
    _pack(nodes, order, packed, changes)
    for root in range(count):
        if born[root] >= 0:
            changes[born[root]] += nodes.nbytes[root]
            changes[length if kept[root] else max(last[root], born[root]) + 1] -= nodes.nbytes[root]
    return np.cumsum(changes[:length]), written


@njit(cache=True, nogil=True)
def _pack(nodes, order, packed, changes):
    """Codes live from when they are written to the end."""
    for number, node in enumerate(order):
        if packed[node]:
            changes[number] += nodes.packed[node] + nodes.packing[node]
            changes[number + 1] -= nodes.packing[node]


@njit(cache=True, nogil=True)
def uses(nodes, saved, order):
    """Of each operator of forward, and of each of backward's ``order``; which of these are written."""
    count = len(nodes.root)
    held, back = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    for node in range(count):
        if saved[node] == KEPT and nodes.kind[node] != INPUT:
            held[nodes.root[node]] = True
        if nodes.gradient[node]:
            back[nodes.root[node]] = True
    ahead = held.copy()
    for node in range(count):
        if nodes.result[node]:
            ahead[nodes.root[node]] = True
    none, packed = np.zeros(count, np.bool_), saved == PACKED
    first, _ = _use(nodes, nodes.forward, none, ahead, packed, none)
    second, written = _use(nodes, order, held, back, none, packed)
    return first, second, written


@njit(cache=True, nogil=True)
def _corrected(used, order, errors):
    """With each kernel's error, and between two kernels with the larger one."""
    before, known = np.empty(len(order), np.int64), np.int64(0)
    for number, node in enumerate(order):
        known = errors[node] if errors[node] != UNKNOWN else known
        before[number] = known
    known = np.int64(0)
    for number in range(len(order) - 1, -1, -1):
        node = order[number]
        known = errors[node] if errors[node] != UNKNOWN else known
        used[number] += max(before[number], known)
    return used


@njit(cache=True, nogil=True)
def evaluate(nodes, saved, errors, limit):
    """(peak, the node at whose time it is, seconds of what is computed again, excess over the limit)."""
    order = order_of(nodes, saved)
    ahead, back, written = uses(nodes, saved, order)
    ahead, back = _corrected(ahead, nodes.forward, errors.ahead), _corrected(back, order, errors.back)
    runs_ahead = np.zeros(len(nodes.root), np.bool_)
    runs_ahead[nodes.forward] = True
    peak, at, excess, seconds = np.int64(-1), 0, 0.0, 0.0
    for number, node in enumerate(nodes.forward):
        if ahead[number] > peak:
            peak, at = ahead[number], node
        if ahead[number] > limit:
            excess += float(ahead[number] - limit) ** 2
    for number, node in enumerate(order):
        back[number] += nodes.spending[node]
        if back[number] > peak:
            peak, at = back[number], node
        if back[number] > limit:
            excess += float(back[number] - limit) ** 2
        if saved[node] == PACKED:
            seconds += nodes.unpacking[node]
        elif runs_ahead[node]:
            seconds += nodes.seconds[node] + (nodes.writing[node] if written[node] else 0.0)
            if nodes.drawn[node]:
                excess = math.inf
    return peak, at, seconds, excess


def no_errors(count: int) -> Errors:
    """Before anything was measured."""
    return Errors(np.full(count, UNKNOWN), np.full(count, UNKNOWN))
