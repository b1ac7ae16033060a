"""Greedy descent from the fastest options, then exact single and paired moves."""

from __future__ import annotations

import numpy as np

from squeezebox.planner._table import Floats, Integers, Table, infeasible, tabulate
from squeezebox.schema import Budget, Plan, Profile

_TINY = 1e-12  # seconds: so that free moves rank by their bytes
# prices of noise, as shares of the seconds a whole budget of it could buy; each is tried from the start
_PRICES = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)


def solve(profile: Profile, budget: Budget) -> Plan:
    """A plan whose every position stays within the budget, in nearly the least time.

    Starts from the fastest options and, while a position is over the budget, takes the move that frees
    most excess bytes for a second and a share of the noise; then takes back what was not needed. Noise has
    a price; several are tried and the best result is kept.

    Args:
        profile: bytes, seconds and noise of every option of every tensor.
        budget: most bytes at any position, and most relative gradient noise of all options together.

    Raises:
        BudgetError: no choice was found that fits.
        OptionError: the profile contradicts itself.
    """
    table = tabulate(profile)
    found = [_descend(table, budget, price) for price in _PRICES]
    fitting = [choice for choice in found if _fits(table, budget, choice)]
    if not fitting:
        least = _smallest(table, budget)
        if not _fits(table, budget, least):
            raise infeasible(table, budget, least)
        fitting = [least]
    polished = [_polish(table, budget, choice) for choice in fitting]
    return table.plan(min(polished, key=lambda choice: table.total(table.seconds, choice)))


def _fits(table: Table, budget: Budget, choice: Integers) -> bool:
    noisy = table.total(table.noise, choice) > budget.noise * (1 + 1e-9)
    return not noisy and int(table.usage(choice).max()) <= budget.peak_bytes


def _fastest(table: Table) -> Integers:
    """The fastest noiseless option of each tensor, the smallest of equals; else the least noisy one."""
    cost = np.where(table.valid, table.seconds + 1e-15 * table.held, np.inf)
    quiet = np.where(table.noise > 0.0, np.inf, cost)
    none = np.isinf(quiet).all(1)
    loud = np.where(table.valid, table.noise, np.inf).argmin(1)
    return np.asarray(np.where(none, loud, quiet.argmin(1)), np.int64)


def _descend(table: Table, budget: Budget, price: float) -> Integers:
    """From the fastest choice down, one move at a time, until all positions fit or no move helps."""
    choice = _fastest(table)
    rows = np.arange(len(choice))
    scale = price * max(float(table.seconds.max(initial=0.0)), _TINY) * max(len(choice), 1)
    fresh = table.valid.copy()  # nothing is taken twice, so this ends
    while True:
        excess = np.maximum(table.usage(choice) - budget.peak_bytes, 0)
        if not excess.any():
            return choice
        gain = _relief(table, excess, choice)
        left = budget.noise - table.total(table.noise, choice)
        seconds = table.seconds - table.seconds[rows, choice][:, None]
        noise = table.noise - table.noise[rows, choice][:, None]
        cost = np.maximum(seconds, 0.0) + scale * np.maximum(noise, 0.0) / max(budget.noise, 1e-30) + _TINY
        score = np.where(fresh & (gain > 0) & (noise <= left * (1 + 1e-12)), gain / cost, 0.0)
        if not score.any():
            return choice
        row, option = np.unravel_index(int(score.argmax()), score.shape)
        choice[row] = option
        fresh[row, option] = False


def _relief(table: Table, excess: Integers, choice: Integers) -> Floats:
    """Bytes too many, summed over positions, that each move would take away."""
    rows = np.arange(len(choice))
    over = np.concatenate(([0], np.cumsum(excess > 0)))
    held = over[table.last_use + 1] - over[table.saved_at]
    used = over[table.last_use + 1] - over[table.first_use]
    freed = table.held[rows, choice][:, None] - table.held
    released = table.working[rows, choice][:, None] - table.working
    return np.asarray(freed * held[:, None] + released * used[:, None], np.float64)


def _smallest(table: Table, budget: Budget) -> Integers:
    """The choice that goes down as far as the noise allows, whatever the time."""
    bytes_ = table.held + table.working
    quiet = np.where(table.valid & (table.noise <= 0.0), bytes_, np.iinfo(np.int64).max)
    choice = np.where((quiet == np.iinfo(np.int64).max).all(1), _fastest(table), quiet.argmin(1))
    rows = np.arange(len(choice))
    left = budget.noise - table.total(table.noise, choice)
    while True:
        freed = bytes_[rows, choice][:, None] - bytes_
        noise = table.noise - table.noise[rows, choice][:, None]
        able = table.valid & (freed > 0) & (noise <= left)
        if not able.any():
            return choice
        score = np.where(able, freed / np.maximum(noise, 1e-30), 0.0)
        row, option = np.unravel_index(int(score.argmax()), score.shape)
        left -= float(noise[row, option])
        choice[row] = option


def _polish(table: Table, budget: Budget, choice: Integers) -> Integers:
    """Single moves that save time and still fit, the best first, until there is none."""
    choice = choice.copy()
    rows = np.arange(len(choice))
    while True:
        usage = table.usage(choice)
        left = budget.noise * (1 + 1e-9) - table.total(table.noise, choice)
        seconds = table.seconds - table.seconds[rows, choice][:, None]
        noise = table.noise - table.noise[rows, choice][:, None]
        able = table.valid & (seconds < -_TINY) & (noise <= left)
        moves = np.argwhere(able)
        moves = moves[np.argsort(seconds[able], kind="stable")]
        taken = next((move for move in moves if _room(table, budget, usage, choice, *move)), None)
        if taken is None:
            return choice
        choice[taken[0]] = taken[1]


def _room(table: Table, budget: Budget, usage: Integers, choice: Integers, row: int, option: int) -> bool:
    """Whether one move leaves every position within the budget."""
    start, use, end = table.saved_at[row], table.first_use[row], table.last_use[row] + 1
    held = table.held[row, option] - table.held[row, choice[row]]
    working = table.working[row, option] - table.working[row, choice[row]]
    before = usage[start:use].max(initial=0) + held
    after = usage[use:end].max(initial=0) + held + working
    return bool(max(before, after) <= budget.peak_bytes)
