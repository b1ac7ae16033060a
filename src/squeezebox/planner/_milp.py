"""The optimum, as a mixed-integer linear programme solved by HiGHS."""

from __future__ import annotations

from typing import Any

import numpy as np

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
    result: Any = optimize.milp(
        table.seconds[rows, options],
        integrality=np.ones(len(rows)),
        bounds=optimize.Bounds(0, 1),
        constraints=_constraints(optimize, table, budget, rows, options),
        options={"time_limit": seconds, "mip_rel_gap": gap},
    )
    if result.status == 2:
        bytes_ = np.where(table.valid, table.held + table.working, np.iinfo(np.int64).max)
        raise infeasible(table, budget, bytes_.argmin(1))
    if result.x is None:
        raise OptionError(f"the solver found no plan within {seconds:g} s ({result.message}); allow more.")
    choice = np.zeros(len(table.valid), np.int64)
    taken = result.x > 0.5
    choice[rows[taken]] = options[taken]
    return table.plan(choice)


def _constraints(optimize: Any, table: Table, budget: Budget, rows: Integers, options: Integers) -> list[Any]:
    """One option a tensor; bytes at every distinct position; noise."""
    from scipy import sparse

    count, number = len(rows), np.arange(len(rows))
    single = sparse.csr_array((np.ones(count), (rows, number)), shape=(len(table.valid), count))
    positions = _distinct(table)
    held = (table.starts[rows, options] <= positions[:, None]) & (positions[:, None] < table.ends[rows])
    used = (table.first_use[rows] <= positions[:, None]) & (positions[:, None] < table.work_ends[rows])
    bytes_ = held * table.held[rows, options] + used * table.working[rows, options]
    room = budget.peak_bytes - np.asarray(table.profile.base_bytes, np.int64)[positions]
    scale = max(budget.peak_bytes, 1)
    constraints = [
        optimize.LinearConstraint(single, 1, 1),
        optimize.LinearConstraint(sparse.csr_array(bytes_ / scale), -np.inf, room / scale),
    ]
    if table.noise.any():
        unit = budget.noise or float(table.noise.max())
        noise = table.noise[rows, options][None, :] / unit
        constraints.append(optimize.LinearConstraint(noise, -np.inf, budget.noise / unit))
    return constraints


def _distinct(table: Table) -> Integers:
    """Of the positions between two events, at which the same tensors live, the one with the largest base."""
    base = np.asarray(table.profile.base_bytes, np.int64)
    events = np.unique(
        np.concatenate(([0], table.starts.ravel(), table.first_use, table.ends, table.work_ends))
    )
    starts = events[events < len(base)]
    ends = np.append(starts[1:], len(base))
    return np.array([start + base[start:end].argmax() for start, end in zip(starts, ends, strict=True)])
