"""The heuristics of SOMAS (MLSys'23): buffers placed one after the other, the largest first."""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

from itertools import product

import numpy as np
from numba import njit

from squeezebox.memory._problem import Integers, Problem

_FAR = np.int64(2**62)


def somas(problem: Problem, seconds: float = 0.0) -> Integers:
    """The best of eight: two orders, two fits, with footprints and without.

    The orders are by falling size, among equals the first or the last issued before the others. The fits take
    the gap that leaves least over, or the lowest. A footprint is a shelf as high as the buffer that opens
    it: others may lie on it that may share bytes with that one.

    Args:
        problem: what is to be placed.
        seconds: not needed; this takes about a second for 10,000 buffers.
    """
    latest = np.arange(len(problem.sizes))[::-1]
    orders = [np.lexsort((tie, -problem.sizes)) for tie in (-latest, latest)]
    best, height = np.zeros(0, np.int64), _FAR
    for order, tightest, shelves in product(orders, (True, False), (False, True)):
        offsets = _placed(order, problem.sizes, problem.conflicts, tightest, shelves)
        reached = (offsets + problem.sizes).max(initial=0)
        if reached < height:
            best, height = offsets, reached
        if height == problem.lower_bound:
            break
    return best


def placed_around(offsets: Integers, order: Integers, problem: Problem) -> Integers:
    """Offsets of all: those given for the first ones in ``order``, and the tightest gaps for the others."""
    everywhere = np.zeros(len(order), np.int64)
    everywhere[order[: len(offsets)]] = offsets
    _fill(order, len(offsets), everywhere, problem.sizes, problem.conflicts)
    return everywhere


@njit(cache=True, nogil=True)
def _fill(order, fixed, offsets, sizes, conflicts):
    members, ends = np.empty(order.size, np.int64), np.zeros(2, np.int64)
    for place in range(order.size):
        item = order[place]
        if place >= fixed:
            offsets[item] = _gap(item, np.int64(0), _FAR, members[: ends[0]], offsets, sizes, conflicts, True)
        _insert(item, 0, 0, 1, members, ends, offsets)


@njit(cache=True, nogil=True)
def _placed(order, sizes, conflicts, tightest, shelves):
    """Offsets of all, placed in that order; without shelves there is one without end."""
    count = order.size
    offsets = np.zeros(count, np.int64)
    starts = np.zeros(count + 2, np.int64)  # of shelves, and last the end of the highest one
    starts[1] = 0 if shelves else _FAR
    members = np.empty(count, np.int64)  # shelf by shelf, each by offset
    ends = np.zeros(count + 1, np.int64)  # of shelves in members
    openers = np.full(count + 1, -1, np.int64)
    opened = 0 if shelves else 1
    for item in order:
        shelf, begin, offset = 0, 0, np.int64(-1)
        while shelf < opened:
            if openers[shelf] < 0 or not conflicts[item, openers[shelf]]:
                inside = members[begin : ends[shelf]]
                offset = _gap(
                    item, starts[shelf], starts[shelf + 1], inside, offsets, sizes, conflicts, tightest
                )
            if offset >= 0:
                break
            begin = ends[shelf]
            shelf += 1
        if offset < 0:
            offset = starts[shelf]
            starts[shelf + 1] = offset + sizes[item]
            openers[shelf], ends[shelf] = item, begin
            opened += 1
        offsets[item] = offset
        _insert(item, shelf, begin, opened, members, ends, offsets)
    return offsets


@njit(cache=True, nogil=True)
def _gap(item, start, end, inside, offsets, sizes, conflicts, tightest):
    """Where ``item`` fits between ``start`` and ``end`` without overlapping those inside, or -1."""
    best, least = np.int64(-1), _FAR
    for i in range(inside.size + 1):
        other = inside[i] if i < inside.size else -1
        if other >= 0 and not conflicts[item, other]:
            continue
        spare = (offsets[other] if other >= 0 else end) - start - sizes[item]
        if 0 <= spare < least or (spare >= 0 and best < 0):
            best, least = start, spare
            if not tightest:
                break
        if other >= 0:
            start = max(start, offsets[other] + sizes[other])
    return best


@njit(cache=True, nogil=True)
def _insert(item, shelf, begin, opened, members, ends, offsets):
    """Put ``item`` among its shelf's members, which are sorted by offset."""
    slot = ends[opened - 1]
    while slot > begin and (slot > ends[shelf] or offsets[members[slot - 1]] > offsets[item]):
        members[slot] = members[slot - 1]
        slot -= 1
    members[slot] = item
    for i in range(shelf, opened):
        ends[i] += 1
