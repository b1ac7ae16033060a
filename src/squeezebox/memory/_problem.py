"""Buffers as arrays: sizes, and who may not share bytes with whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from squeezebox.schema import Buffer, OptionError

Integers = NDArray[np.int64]
Relation = NDArray[np.bool_]

_SEEDS = 32  # buffers from which a clique is grown where times do not tell one


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What a packer is given: offsets are wanted at which no two in conflict overlap.

    ``sizes`` are in units of the arena's alignment, as offsets are. ``conflicts`` is symmetric and false on
    its diagonal. No offsets need less than ``lower_bound``, the size of a set of which any two are in conflict.
    ``lower`` and ``upper`` are the buffers' times.
    """

    sizes: Integers
    lower: Integers
    upper: Integers
    conflicts: Relation
    lower_bound: int


def problem_of(buffers: Sequence[Buffer], conflicts: Relation | None, alignment: int) -> Problem:
    """The arrays of ``buffers``, checked.

    Raises:
        OptionError: a buffer ends before it begins or has a negative size, two have the same name, the
            alignment is below 1, or the relation has another shape or is not symmetric.
    """
    _check(buffers, alignment)
    lower = np.array([each.lower for each in buffers], np.int64)
    upper = np.array([each.upper for each in buffers], np.int64)
    sizes = np.array([-(-each.nbytes // alignment) for each in buffers], np.int64)
    overlaps = (lower[:, None] < upper) & (upper[:, None] > lower)
    np.fill_diagonal(overlaps, False)
    relation = overlaps if conflicts is None else _checked(conflicts, len(buffers))
    bound = _clique(sizes, relation, _fullest(sizes, lower, upper, relation))
    return Problem(sizes=sizes, lower=lower, upper=upper, conflicts=relation, lower_bound=bound)


def _check(buffers: Sequence[Buffer], alignment: int) -> None:
    if alignment < 1:
        raise OptionError(f"alignment {alignment} is below 1; give bytes such as 64.")
    names: set[str] = set()
    for each in buffers:
        if each.lower >= each.upper:
            raise OptionError(
                f"buffer '{each.name}' lives during [{each.lower}, {each.upper}), which is no time at all; "
                "its upper must be greater than its lower."
            )
        if each.nbytes < 0:
            raise OptionError(f"buffer '{each.name}' has {each.nbytes} bytes; sizes are from 0.")
        if each.name in names:
            raise OptionError(f"two buffers are called '{each.name}'; names tell them apart.")
        names.add(each.name)


def _checked(conflicts: Relation, count: int) -> Relation:
    relation = np.array(conflicts, np.bool_)
    if relation.shape != (count, count):
        raise OptionError(f"conflicts has shape {relation.shape}; {count} buffers need ({count}, {count}).")
    if not np.array_equal(relation, relation.T):
        first, second = np.argwhere(relation != relation.T)[0]
        raise OptionError(f"conflicts says two things of buffers {first} and {second}; make it symmetric.")
    np.fill_diagonal(relation, False)
    return relation


def _fullest(sizes: Integers, lower: Integers, upper: Integers, relation: Relation) -> Integers:
    """The buffers that live when most bytes do, as far as any two of them are in conflict."""
    if not len(sizes):
        return np.zeros(0, np.int64)
    times = np.unique(lower)
    change = np.zeros(len(times) + 1, np.int64)
    np.add.at(change, np.searchsorted(times, lower), sizes)
    np.add.at(change, np.searchsorted(times, upper), -sizes)
    moment = times[np.cumsum(change)[:-1].argmax()]
    alive = np.flatnonzero((lower <= moment) & (moment < upper))
    within = relation[np.ix_(alive, alive)].sum(1) == len(alive) - 1
    return alive[within] if within.all() else np.zeros(0, np.int64)


def _clique(sizes: Integers, relation: Relation, start: Integers) -> int:
    """Bytes of the largest clique found by adding the largest buffer again and again."""
    order = np.argsort(-sizes, kind="stable")
    cliques = [_grown(start, sizes, order, relation)]
    cliques += [_grown(seed[None], sizes, order, relation) for seed in order[:_SEEDS]]
    return max(cliques)


def _grown(clique: Integers, sizes: Integers, order: Integers, relation: Relation) -> int:
    open_: Relation = np.asarray(relation[clique].all(0))
    total = int(sizes[clique].sum())
    for each in order:
        if open_[each]:
            total += int(sizes[each])
            open_ &= relation[each]
    return total
