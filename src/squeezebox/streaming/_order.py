"""An order of a graph's nodes in which parts read few rows of other parts."""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

_WORTH = 0.9  # of the rows that the given order reads: another order is taken where it reads no more
_ROUNDS = 8
_Array = np.ndarray[Any, Any]


def better_order(edges: _Array, count: int, parts: int) -> _Array | None:
    """The nodes in an order whose parts read clearly fewer rows, None if the given one does.

    Tried are breadth first from the nodes with fewest neighbours, as Cuthill and McKee do, which suits meshes
    and chains; and communities, found by propagating labels and no larger than a part, one behind another.

    Args:
        edges: 2 x edges of node numbers.
        count: how many nodes.
        parts: how many parts they are cut into.
    """
    ends, near = _neighbours(edges, count)
    breadth = _breadth_first(ends, near, np.argsort(np.diff(ends), kind="stable"))
    best, fewest = None, _WORTH * rows_read(edges, np.arange(count), parts)
    for order in (breadth, _communities(ends, near, breadth, max(count // parts, 1))):
        rows = rows_read(edges, order, parts)
        if rows < fewest:
            best, fewest = order, rows
    return best


def rows_read(edges: _Array, order: _Array, parts: int) -> int:
    """Rows that equal parts of an order read, their own included: the non-empty blocks of part x row."""
    part = np.empty(len(order), np.int64)
    part[order] = np.arange(len(order)) * parts // len(order)
    other = part[edges[0]] != part[edges[1]]
    return len(order) + int(np.unique(part[edges[1][other]] * len(order) + edges[0][other]).size)


def _neighbours(edges: _Array, count: int) -> tuple[_Array, _Array]:
    """Of every node the nodes that an edge joins it with, one behind another, and where they end."""
    begun = np.concatenate([edges[0], edges[1]])
    near = np.concatenate([edges[1], edges[0]])[np.argsort(begun, kind="stable")]
    return np.concatenate([[0], np.cumsum(np.bincount(begun, minlength=count))]), near


def _communities(ends: _Array, near: _Array, breadth: _Array, most: int) -> _Array:
    """Nodes by community; communities, and nodes in them, as breadth first comes to them."""
    count = len(breadth)
    labels, sizes = np.arange(count), np.ones(count, np.int64)
    for _ in range(_ROUNDS):
        if _propagate(ends, near, labels, sizes, most, breadth) < count // 100:
            break
    place, first = np.empty(count, np.int64), np.full(count, count)
    place[breadth] = np.arange(count)
    np.minimum.at(first, labels, place)
    return np.lexsort((place, first[labels]))


@njit(cache=True, nogil=True)
def _breadth_first(ends, near, starts):
    count = starts.shape[0]
    seen, order = np.zeros(count, np.bool_), np.empty(count, np.int64)
    filled = head = 0
    for start in starts:
        if not seen[start]:
            seen[start] = True
            order[filled] = start
            filled += 1
        while head < filled:
            for at in range(ends[order[head]], ends[order[head] + 1]):
                if not seen[near[at]]:
                    seen[near[at]] = True
                    order[filled] = near[at]
                    filled += 1
            head += 1
    return order


@njit(cache=True, nogil=True)
def _propagate(ends, near, labels, sizes, most, order):
    """Give every node its neighbours' most frequent label that has room; returns how many have changed."""
    counts, changed = np.zeros(labels.shape[0], np.int64), 0
    for node in order:
        nodes = near[ends[node] : ends[node + 1]]
        for each in nodes:
            counts[labels[each]] += 1
        best = labels[node]
        for each in nodes:
            label = labels[each]
            if counts[label] > counts[best] and sizes[label] < most:
                best = label
        for each in nodes:
            counts[labels[each]] = 0
        if best != labels[node]:
            sizes[labels[node]] -= 1
            sizes[best] += 1
            labels[node] = best
            changed += 1
    return changed
