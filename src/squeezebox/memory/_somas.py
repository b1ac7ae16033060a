"""The heuristics of SOMAS: buffers placed one after the other, in two orders and with two fits."""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import numpy as np
from numba import njit

from squeezebox.memory._problem import Integers, Problem


def somas(problem: Problem, seconds: float = 0.0) -> Integers:
    """Offsets by the heuristics of SOMAS, the best of all: at once, whatever ``seconds``."""
    order = np.lexsort((problem.lower, -problem.sizes))
    return first_fit(order, problem.sizes, problem.conflicts)  # type: ignore[no-any-return]


@njit(cache=True, nogil=True)
def first_fit(order, sizes, conflicts):
    """Each buffer in turn at the lowest offset at which it overlaps none in conflict."""
    offsets = np.zeros(sizes.size, np.int64)
    placed = np.empty(sizes.size, np.int64)  # by offset
    for count in range(order.size):
        item = order[count]
        end = np.int64(0)
        for i in range(count):
            other = placed[i]
            if conflicts[item, other] and offsets[other] + sizes[other] > end:
                if offsets[other] >= end + sizes[item]:
                    break
                end = offsets[other] + sizes[other]
        offsets[item] = end
        slot = count
        while slot > 0 and offsets[placed[slot - 1]] > end:
            placed[slot] = placed[slot - 1]
            slot -= 1
        placed[slot] = item
    return offsets
