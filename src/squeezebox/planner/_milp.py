"""The optimum, as a mixed-integer linear programme solved by HiGHS."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from squeezebox.planner._table import Integers, Table, infeasible, tabulate
from squeezebox.schema import Budget, OptionError, Plan, Profile


def optimum(profile: Profile, budget: Budget, *, seconds: float = 60.0, gap: float = 1e-4) -> Plan:
    """The plan of least time within the budget: one binary an option, one row a position.

    Args:
        profile: see :class:`squeezebox.schema.Profile`.
        budget: bytes and noise.
        seconds: time limit of the solver; what it has found until then counts.
        gap: relative distance to the bound at which it may stop.

    Raises:
        BudgetError: there is no such plan.
        OptionError: scipy is not installed, the solver found nothing in time, or the profile contradicts
            itself.
    """
    try:
        from scipy import optimize
    except ImportError as missing:
        raise OptionError("the optimum needs scipy, which is not installed; pip install scipy.") from missing
    table = tabulate(profile)
    rows, options = np.nonzero(table.valid)
    early = _early(table)
    result: Any = optimize.milp(
        np.concatenate((table.seconds[rows, options], np.zeros(len(early)))),
        integrality=np.concatenate((np.ones(len(rows)), np.zeros(len(early)))),
        bounds=optimize.Bounds(0, 1),
        constraints=_constraints(optimize, table, budget, rows, options, early),
        options={"time_limit": seconds, "mip_rel_gap": gap},
    )
    if result.status == 2:
        bytes_ = np.where(table.valid, table.held + table.working, np.iinfo(np.int64).max)
        bytes_[table.children, table.made] = np.iinfo(np.int64).max
        raise infeasible(table, budget, bytes_.argmin(1))
    if result.x is None:
        raise OptionError(f"the solver found no plan within {seconds:g} s ({result.message}); allow more.")
    choice = np.zeros(len(table.valid), np.int64)
    taken = result.x[: len(rows)] > 0.5
    choice[rows[taken]] = options[taken]
    return table.plan(choice)


def _early(table: Table) -> list[tuple[int, int, int]]:
    """(row, option, position): may the row, in that option, be there unpacked from that position on?

    That is before its own first use, or on through a gap between two, for the sake of one made from it; one
    variable each, in order.
    """
    until = table.first_use.copy()
    np.maximum.at(until, table.gaps[:, 0], table.gaps[:, 2])
    wanted: dict[int, set[int]] = {}
    for child, source in zip(table.children.tolist(), table.sources.tolist(), strict=True):
        first = int(table.first_use[child])
        positions = {first, *(position for position in wanted.get(child, ()) if position < first)}
        before = {position for position in positions if position < until[source]}
        wanted.setdefault(source, set()).update(before)
    lends = np.zeros_like(table.valid)
    np.logical_or.at(lends, table.sources, table.suits)
    return [
        (row, int(option), position)
        for row, positions in wanted.items()
        for option in np.nonzero(lends[row] & table.valid[row] & (table.working[row] > 0))[0]
        for position in sorted(positions)
        if position < table.first_use[row] or not table.remakes[row, option]
    ]


def _constraints(
    optimize: Any,
    table: Table,
    budget: Budget,
    rows: Integers,
    options: Integers,
    early: list[tuple[int, int, int]],
) -> list[Any]:
    """One option a tensor; bytes at every distinct position; noise; sources that serve, early enough."""
    from scipy import sparse

    count, number = len(rows), np.arange(len(rows))
    width = count + len(early)
    single = sparse.csr_array((np.ones(count), (rows, number)), shape=(len(table.valid), width))
    positions = _distinct(table)
    at = positions[:, None]
    held = (table.starts[rows, options] <= at) & (at < table.ends[rows, options])
    used = _unpacked(table, positions, rows, options)
    bytes_ = held * table.held[rows, options] + used * table.working[rows, options]
    bytes_ = bytes_ + (table.first_use[rows] == positions[:, None]) * table.making[rows, options]
    bytes_ = bytes_ + (table.saved[rows] == positions[:, None]) * table.packing[rows, options]
    bytes_ = np.hstack((bytes_, _early_bytes(table, positions, early)))
    room = budget.peak_bytes - table.base[positions]
    scale = max(budget.peak_bytes, 1)
    constraints = [
        optimize.LinearConstraint(single, 1, 1),
        optimize.LinearConstraint(sparse.csr_array(bytes_ / scale), -np.inf, room / scale),
    ]
    links = list(
        _links(
            table,
            {pair: at for at, pair in enumerate(zip(rows.tolist(), options.tolist(), strict=True))},
            early,
        )
    )
    if links:
        entries = [(at, column, value) for at, (terms, _) in enumerate(links) for column, value in terms]
        at, columns, values = map(np.array, zip(*entries, strict=True))
        matrix = sparse.csr_array((values, (at, columns)), shape=(len(links), width))
        constraints.append(optimize.LinearConstraint(matrix, -np.inf, [limit for _, limit in links]))
    if table.noise.any():
        unit = budget.noise or float(table.noise.max())
        noise = np.concatenate((table.noise[rows, options] / unit, np.zeros(len(early))))
        constraints.append(optimize.LinearConstraint(noise[None, :], -np.inf, budget.noise / unit))
    return constraints


def _unpacked(table: Table, positions: Integers, rows: Integers, options: Integers) -> NDArray[np.bool_]:
    """Whether each option of each row is there unpacked for its own sake, by position."""
    at = positions[:, None]
    gaps = np.zeros((len(positions), len(table.valid)), bool)
    for row, start, end in table.gaps:
        gaps[:, row] |= (start <= positions) & (positions < end)
    there = (table.first_use[rows] <= at) & (at < table.work_ends[rows])
    return np.asarray(there & (table.remakes[rows, options] | ~gaps[:, rows]), bool)


def _early_bytes(table: Table, positions: Integers, early: list[tuple[int, int, int]]) -> Integers:
    """What each early variable adds at each position, until the next one of its row and option."""
    rows, options, starts = np.array(early, np.int64).reshape(-1, 3).T
    ends = [
        int(table.work_ends[row]) if after[:2] != (row, option) else after[2]
        for (row, option, _), after in zip(early, [*early[1:], (-1, -1, 0)], strict=False)
    ]
    inside = (starts <= positions[:, None]) & (positions[:, None] < np.array(ends, np.int64))
    inside &= ~_unpacked(table, positions, rows, options)
    bytes_ = inside * table.working[rows, options]
    return np.asarray(bytes_ + (starts == positions[:, None]) * table.making[rows, options], np.int64)


def _links(
    table: Table, columns: Mapping[tuple[int, int], int], early: list[tuple[int, int, int]]
) -> Iterator[tuple[list[tuple[int, int]], int]]:
    """Rows (terms, limit): what is made from others needs them to serve, and there when it is used."""
    number = {variable: len(columns) + at for at, variable in enumerate(early)}
    made_from: dict[int, list[tuple[int, int]]] = {}
    pairs = zip(table.children.tolist(), table.made.tolist(), table.sources.tolist(), strict=True)
    for (child, again, source), suits in zip(pairs, table.suits, strict=True):
        made_from.setdefault(source, []).append((child, again))
        suitable = np.nonzero(suits & table.valid[source])[0]
        yield [(columns[child, again], 1), *((columns[source, int(o)], -1) for o in suitable)], 0
    for (row, option, position), column in number.items():
        for child, again in made_from[row]:
            direct = table.first_use[child] == position
            needed = columns[child, again] if direct else number.get((child, again, position))
            if needed is not None:
                yield [(needed, 1), (columns[row, option], 1), (column, -1)], 1
    for first, second in pairwise(early):
        if first[:2] == second[:2]:
            yield [(number[first], 1), (number[second], -1)], 0


def _distinct(table: Table) -> Integers:
    """Of the positions between two events, at which the same tensors live, the one with the largest base."""
    base = table.base
    passing = (table.saved, table.saved + 1, table.first_use, table.first_use + 1)
    lives = (table.starts.ravel(), *passing, table.ends.ravel(), table.work_ends, table.gaps[:, 1:].ravel())
    events = np.unique(np.concatenate(([0], *lives)))
    starts = events[events < len(base)]
    ends = np.append(starts[1:], len(base))
    return np.array([start + base[start:end].argmax() for start, end in zip(starts, ends, strict=True)])
