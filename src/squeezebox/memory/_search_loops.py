"""Depth-first search for offsets within a capacity, compiled.

After MiniMalloc (Moffitt, ASPLOS'23): buffers are placed in the order of their offsets, each as low as those
below it let it (every packing can be pushed down into one of these), the lowest first; whatever would leave
a gap in which another one fits is passed over; and what is left is searched apart where it falls apart in
time. The bound is stronger than the paper's: the buffers of a clique lie on each other, none below its own
lowest offset, so taking them in the order of these gives the least height that the clique can reach, as for
one machine and jobs with release times.
"""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from squeezebox.memory._problem import Integers, Relation

FOUND, UNKNOWN, IMPOSSIBLE = 1, 0, -1
_FAR = np.int64(2**62)


class Case(NamedTuple):
    """A problem with its buffers in order of preference; lists of lists are flat, with their starts."""

    sizes: Integers
    lower: Integers
    upper: Integers
    by_lower: Integers
    neighbour_starts: Integers
    neighbours: Integers
    clique_starts: Integers
    cliques: Integers
    tops: Integers  # scratch, one for each clique


class State(NamedTuple):
    """Where the search is. Rows and entries are by depth: how many buffers have been placed before."""

    offsets: Integers
    placed: Relation
    least: Integers  # (depth, buffer): lowest offset that those placed below allow
    part_of: Integers  # (depth, buffer): which part of the problem it belongs to
    part: Integers  # being searched
    parts: Integers  # how many there are
    following: Integers  # (part): the next one, or -1
    entry: Integers  # (part): depth at which it is begun
    split: Integers  # (part): depth at which it came about
    level: Integers  # offset of the last buffer placed in this part
    last: Integers  # that buffer, or -1
    chosen: Integers
    covered: Relation  # may another choice help, should what follows fail?
    candidates: Integers  # (depth, buffer)
    taken: Integers
    ends: Integers
    release: Integers  # scratch (buffer): lowest offset in this part from here on
    order: Integers  # scratch, buffers by release


def begin(count):
    """The state before anything is placed."""
    rows, parts = count + 2, 4 * count + 8
    integers = [np.zeros(rows, np.int64) for _ in range(7)]
    part, numbers, level, last, chosen, taken, ends = integers
    numbers[0], last[0] = 1, -1
    return State(
        offsets=np.zeros(count, np.int64),
        placed=np.zeros(count, np.bool_),
        least=np.zeros((rows, count), np.int64),
        part_of=np.zeros((rows, count), np.int64),
        part=part,
        parts=numbers,
        following=np.full(parts, -1, np.int64),
        entry=np.zeros(parts, np.int64),
        split=np.zeros(parts, np.int64),
        level=level,
        last=last,
        chosen=chosen,
        covered=np.ones(rows, np.bool_),
        candidates=np.zeros((rows, count), np.int64),
        taken=taken,
        ends=ends,
        release=np.zeros(count, np.int64),
        order=np.arange(count),
    )


@njit(cache=True, nogil=True)
def fit(case, state, capacity, limit, depth):
    """Look for offsets within ``capacity``, from ``depth`` (at first 0) on, at up to ``limit`` nodes.

    Returns:
        FOUND (``state.offsets``), IMPOSSIBLE, or UNKNOWN and the depth from which to go on.
    """
    for _ in range(limit):
        if not _enter(case, state, depth):
            return FOUND, depth
        _expand(case, state, depth, capacity)
        while state.taken[depth] == state.ends[depth]:
            part = state.part[depth]
            # If a part fails at its first buffer, no choice within the parts before it helps: undo the split.
            back = (state.split[part] if state.entry[part] == depth else depth) - 1
            if back < 0:
                return IMPOSSIBLE, depth
            for i in range(back, depth):
                state.placed[state.chosen[i]] = False
            depth = back
            if not state.covered[depth]:  # no other choice here would be of more use to the rest
                state.taken[depth] = state.ends[depth]
        _place(case, state, depth)
        depth += 1
    return UNKNOWN, depth


@njit(cache=True, nogil=True)
def _enter(case, state, depth):
    """Go on to the next part where one is done; False where all are."""
    part = state.part[depth]
    while _pieces(case, state, depth, part, -1) == 0:
        part = state.following[part]
        if part < 0:
            return False
        state.entry[part] = depth
        state.level[depth], state.last[depth] = 0, -1
    state.part[depth] = part
    return True


@njit(cache=True, nogil=True)
def _pieces(case, state, depth, part, label):
    """How many pieces the part's open buffers form in time; marked from ``label`` on if that is not -1."""
    pieces, reach = 0, np.int64(0)
    for buffer in case.by_lower:
        if state.placed[buffer] or state.part_of[depth, buffer] != part:
            continue
        if pieces == 0 or case.lower[buffer] >= reach:
            pieces += 1
            reach = case.upper[buffer]
        reach = max(reach, case.upper[buffer])
        if label >= 0:
            state.part_of[depth, buffer] = label + pieces - 1
    return pieces


@njit(cache=True, nogil=True)
def _expand(case, state, depth, capacity):
    """Fill in the node's candidates: none if no packing within the capacity follows from here."""
    state.taken[depth] = state.ends[depth] = 0
    lowest = _release(case, state, depth)
    if not _within(case, state, capacity):
        return
    part, first = state.part[depth], state.parts[depth]
    pieces = _pieces(case, state, depth, part, -1)
    if pieces > 1:
        _pieces(case, state, depth, part, first)
        split = state.split[part] if state.entry[part] == depth else depth
        for new in range(first, first + pieces):
            state.following[new] = new + 1 if new + 1 < first + pieces else state.following[part]
            state.split[new], state.entry[new] = split, depth
        state.part[depth], state.parts[depth] = first, first + pieces
        state.level[depth], state.last[depth] = 0, -1
        lowest = _release(case, state, depth)
    _list(state, depth, lowest)


@njit(cache=True, nogil=True)
def _release(case, state, depth):
    """Set and sort the part's releases; the offset below which the next buffer must begin."""
    lowest = _FAR
    for buffer in range(case.sizes.size):
        state.release[buffer] = _FAR
        if not state.placed[buffer] and state.part_of[depth, buffer] == state.part[depth]:
            release = max(state.least[depth, buffer], state.level[depth])
            state.release[buffer] = release
            lowest = min(lowest, release + max(case.sizes[buffer], 1))
    order = state.order
    for i in range(1, order.size):  # nearly sorted already
        buffer, slot = order[i], i
        while slot > 0 and _after(state.release, order[slot - 1], buffer):
            order[slot] = order[slot - 1]
            slot -= 1
        order[slot] = buffer
    return lowest


@njit(cache=True, nogil=True)
def _after(release, first, second):
    return release[first] > release[second] or (release[first] == release[second] and first > second)


@njit(cache=True, nogil=True)
def _within(case, state, capacity):
    """Whether each clique's open buffers fit under the capacity, taken in the order of their releases."""
    case.tops[:] = 0
    for buffer in state.order:
        release = state.release[buffer]
        if release == _FAR:
            break
        for i in range(case.clique_starts[buffer], case.clique_starts[buffer + 1]):
            top = max(case.tops[case.cliques[i]], release) + case.sizes[buffer]
            case.tops[case.cliques[i]] = top
            if top > capacity:
                return False
    return True


@njit(cache=True, nogil=True)
def _list(state, depth, lowest):
    """The candidates, the lowest first: those that leave no gap, and at equal offsets go on in order."""
    count = 0
    for buffer in state.order:
        release = state.release[buffer]
        if release >= lowest:
            break
        if release > state.level[depth] or buffer > state.last[depth]:
            state.candidates[depth, count] = buffer
            count += 1
    state.ends[depth] = count


@njit(cache=True, nogil=True)
def _place(case, state, depth):
    """Place the next candidate at its release, and lift what may not share bytes with it."""
    buffer = state.candidates[depth, state.taken[depth]]
    state.taken[depth] += 1
    offset = max(state.least[depth, buffer], state.level[depth])
    end = offset + case.sizes[buffer]
    state.offsets[buffer], state.placed[buffer], state.chosen[depth] = offset, True, buffer
    state.least[depth + 1] = state.least[depth]
    state.part_of[depth + 1] = state.part_of[depth]
    state.covered[depth] = False
    for i in range(case.neighbour_starts[buffer], case.neighbour_starts[buffer + 1]):
        other = case.neighbours[i]
        if not state.placed[other]:
            state.covered[depth] = True
            state.least[depth + 1, other] = max(state.least[depth + 1, other], end)
    state.part[depth + 1], state.parts[depth + 1] = state.part[depth], state.parts[depth]
    state.level[depth + 1], state.last[depth + 1] = offset, buffer
