"""Prices for bytes and noise, then greedy repair and exact single moves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from squeezebox.planner._table import Begun, Floats, Integers, Table, as_chosen, infeasible, tabulate
from squeezebox.schema import Budget, Option, Plan, Profile

_ROUNDS = 200  # of the ascent, at most:
_PATIENCE = 50  # of them without a better one end it
_KEPT = 24  # rounds that are repaired,
_POLISHED = 12  # of those, the fastest:
_MANY = 300  # tensors, from which on there are fewer of both, and more moves at a time
_MOVES = 25  # times tensors: of all repairs together
_EXCHANGES = 25_000  # tried, times positions
_WORTHWHILE = 1e-3  # of the time, to go on from there
_LAST = 4  # moves that may be the last, tried each time
_TINY = 1e-12  # seconds: so that free moves rank by their bytes


@dataclass(frozen=True, slots=True)
class _Limits:
    """A budget in the table's terms, and what passing it may cost: the seconds of the slowest choice."""

    bytes_: int
    noise: float
    scale: float

    def excess(self, table: Table, choice: Integers, begun: Begun | None = None) -> tuple[Floats, float]:
        """By how much each position and the noise pass the budget, relative to it; negative below."""
        noise = table.total(table.noise, choice)
        over = noise / self.noise - 1.0 if self.noise > 0.0 else 0.0
        return table.usage(choice, begun) / self.bytes_ - 1.0, over

    def fits(self, table: Table, choice: Integers) -> bool:
        """Whether the choice stays within the budget."""
        noisy = table.total(table.noise, choice) > self.noise * (1 + 1e-9)
        return not noisy and int(table.usage(choice).max()) <= self.bytes_


def solve(profile: Profile, budget: Budget, *, exchange: bool = True) -> Plan:
    """A plan whose every position stays within the budget, in nearly the least time.

    The bytes at every position and the noise are given prices (Lagrangian relaxation), which a subgradient
    ascent raises where the budget is passed and lowers where it is not; each round, every tensor takes what
    is cheapest for it. The best rounds are made to fit by the moves that free most for their cost, and
    single moves take back what was not needed.

    Args:
        profile: bytes, seconds and noise of every option of every tensor.
        budget: most bytes at any position, and most relative gradient noise of all options together.
        exchange: try at the end to let one tensor take a faster option and others make room.

    Raises:
        BudgetError: no choice was found that fits.
        OptionError: the profile contradicts itself.
    """
    table = tabulate(profile)
    choice = _fitting(table, budget)
    return table.plan(_exchanged(table, _limits(table, budget), choice) if exchange else choice)


def first_fit(profile: Profile, budget: Budget) -> Plan | None:
    """Any plan within the budget, fast or not; None if none was found.

    Args:
        profile: see :func:`solve`.
        budget: see :func:`solve`.

    Raises:
        OptionError: the profile contradicts itself.
    """
    table = tabulate(profile)
    limits = _limits(table, budget)
    repaired = _all_repaired(table, limits, _tried(table, limits))
    found = next((choice for choice in repaired if choice is not None), None)
    return None if found is None else table.plan(found)


def peak(profile: Profile, choices: Mapping[str, Option]) -> int:
    """The most bytes at any position with these options."""
    usage = as_chosen(profile, choices).usage(np.zeros(len(profile.tensors), np.int64))
    return int(usage.max())


def _limits(table: Table, budget: Budget) -> _Limits:
    scale = float(np.where(table.valid, table.seconds, 0.0).max(1, initial=0.0).sum()) or 1.0
    return _Limits(max(budget.peak_bytes, 1), budget.noise, scale)


def _fitting(table: Table, budget: Budget) -> Integers:
    """The fastest of the choices that prices, repair and polish lead to."""
    limits, effort = _limits(table, budget), _effort(table)
    tried = list(_tried(table, limits))
    fitting = [choice for choice in _all_repaired(table, limits, tried) if choice is not None]
    if not fitting:
        least = min(tried, key=lambda choice: _worst(table, limits, choice))
        raise infeasible(table, budget, least)
    fitting.sort(key=lambda choice: table.total(table.seconds, choice))
    fastest = _unlike(fitting)[: math.ceil(effort * _POLISHED)]
    polished = [_polish(table, limits, choice) for choice in fastest]
    return min(polished, key=lambda choice: table.total(table.seconds, choice))


def _effort(table: Table) -> float:
    return min(1.0, _MANY / max(len(table.valid), 1))


def _tried(table: Table, limits: _Limits) -> Iterator[Integers]:
    """Choices to be made to fit."""
    quick = _fastest(table)
    yield from (quick, _leanest(table, quiet=True), _leanest(table, quiet=False))
    yield from _ascend(table, limits, quick)[: math.ceil(_effort(table) * _KEPT)]


def _all_repaired(table: Table, limits: _Limits, tried: Iterable[Integers]) -> Iterator[Integers | None]:
    turns = iter(range(_MOVES * len(table.valid)))
    return (repaired for choice in tried for repaired in _repaired(table, limits, choice, turns=turns))


def _worst(table: Table, limits: _Limits, choice: Integers) -> float:
    bytes_, noise = limits.excess(table, choice)
    return float(bytes_.max()) + 10.0 * max(noise, 0.0)


def _fastest(table: Table) -> Integers:
    """The fastest noiseless option of each tensor, the smallest of equals; else the least noisy one."""
    cost = np.where(table.valid, table.seconds + 1e-15 * table.held, np.inf)
    quiet = np.where(table.noise > 0.0, np.inf, cost)
    none = np.isinf(quiet).all(1)
    loud = np.where(table.valid, table.noise, np.inf).argmin(1)
    return np.asarray(np.where(none, loud, quiet.argmin(1)), np.int64)


def _leanest(table: Table, *, quiet: bool) -> Integers:
    """The option of each tensor that holds least and needs no other tensor; ``quiet``: without noise.

    Where only the lowest peak fits, prices for bytes may find no way there.
    """
    able = table.valid & ((table.noise <= 0.0) | (not quiet))
    able &= ~table.remakes
    passing = table.working + table.making + table.packing
    cost = np.where(able, table.held + 1e-6 * passing, np.inf)
    return np.asarray(np.where(able.any(1), cost.argmin(1), _fastest(table)), np.int64)


def _ascend(table: Table, limits: _Limits, quick: Integers) -> list[Integers]:
    """The choices of the rounds that passed the budget least and took least time."""
    prices, noise_price = np.zeros(len(table.base)), 0.0
    usable = table.valid & ((table.noise <= 0.0) | (limits.noise > 0.0))
    found: list[tuple[float, Integers]] = []
    choice, best, since = quick, math.inf, 0
    for number in range(_ROUNDS):
        begun = table.begins(choice)
        bytes_, noise = limits.excess(table, choice, begun)
        passed = max(float(bytes_.max()), noise, 0.0)
        time = table.total(table.seconds, choice) / limits.scale
        found.append((time + 20.0 * passed, choice))
        best, since = (found[-1][0], 0) if found[-1][0] < best else (best, since + 1)
        if since == _PATIENCE:
            break
        norm = float(np.sqrt((np.maximum(bytes_, 0.0) ** 2).sum() + noise**2)) + 1e-9
        step = limits.scale / (norm * (1.0 + 0.1 * number))
        prices = np.maximum(prices + step * bytes_, 0.0)
        noise_price = max(noise_price + step * noise, 0.0)
        choice = _cheapest(table, limits, prices, noise_price, usable, choice, begun)
    found.sort(key=lambda pair: pair[0])
    return _unlike([choice for _, choice in found])


def _unlike(choices: list[Integers]) -> list[Integers]:
    """The first few that differ."""
    kept: dict[bytes, Integers] = {}
    for choice in choices:
        if len(kept) < _KEPT:
            kept.setdefault(choice.tobytes(), choice)
    return list(kept.values())


def _cheapest(
    table: Table,
    limits: _Limits,
    prices: Floats,
    noise_price: float,
    usable: NDArray[np.bool_],
    last: Integers,
    begun: Begun,
) -> Integers:
    """What each tensor takes at these prices, in seconds for the whole budget at one position."""
    costs = table.seconds + table.weighted(prices, last, begun) / limits.bytes_
    if limits.noise > 0.0:
        costs = costs + noise_price * table.noise / limits.noise
    costs = np.where(usable, costs, np.inf)
    for links in table.levels:  # what it is worth to those made from a tensor that it suits
        rows, options = table.children[links], table.made[links]
        others = costs[rows]
        own, others[np.arange(len(links)), options] = costs[rows, options], np.inf
        without = others.min(1)
        worth = np.where(without < np.inf, np.maximum(without - own, 0.0), limits.scale)
        share = (worth / table.together[links])[:, None]
        np.add.at(costs, table.sources[links], np.where(table.suits[links], 0.0, share))
    choice = np.asarray(costs.argmin(1), np.int64)
    while not table.is_sound(choice):
        before = choice.copy()
        for link in np.nonzero(table.lost(choice))[0][::-1]:
            row, option, source = table.children[link], table.made[link], table.sources[link]
            if choice[row] == option and not table.suits[link, choice[source]]:
                costs[row, option] = np.inf
                choice[row] = costs[row].argmin()
        if (choice == before).all():  # there is nothing else for it
            break
    return choice


@dataclass(slots=True)
class _Repair:
    """A choice on its way into the budget."""

    choice: Integers
    fresh: NDArray[np.bool_]  # options that are not taken yet; nothing is taken twice, so this ends
    found: list[Integers]  # choices on the way that fit
    ways: tuple[bool, ...]  # to count no more than is needed, or not: both while they make the same moves

    def take(self, choice: Integers) -> None:
        """Move to that choice."""
        rows = np.flatnonzero(choice != self.choice)
        self.fresh[rows, choice[rows]] = False
        self.choice = choice

    def parted(self, choice: Integers) -> _Repair:
        """The second way, which moves to that choice; this one goes on alone."""
        first, second = self.ways
        other = _Repair(self.choice, self.fresh.copy(), [*self.found], (second,))
        other.take(choice)
        self.ways = (first,)
        return other


def _repaired(
    table: Table,
    limits: _Limits,
    choice: Integers,
    *,
    fixed: int | None = None,
    ways: tuple[bool, ...] = (True, False),
    turns: Iterator[int] | None = None,
) -> Iterator[Integers | None]:
    """The choice made to fit by a few moves, one each turn and none of the fixed row; or None.

    Moves are made by what they free for their cost; the ``ways`` to count that are tried in turn, and once
    where they come to the same. Where a single move would be the last, the cheapest such is remembered.
    """
    fresh = table.valid.copy()
    if fixed is not None:
        fresh[fixed] = False
    waiting = [_Repair(_quieted(table, limits, choice), fresh, [], ways)]
    turns = itertools.count() if turns is None else turns
    while waiting:
        repair = waiting.pop()
        while (moves := _moves(table, limits, repair)) and next(turns, None) is not None:
            waiting += [repair.parted(move) for move in moves[1:]]
            repair.take(moves[0])
        yield min(repair.found, key=lambda choice: table.total(table.seconds, choice), default=None)


def _moves(table: Table, limits: _Limits, repair: _Repair) -> list[Integers]:
    """The choice after a move, or after one for each way where these differ; none where the repair ends."""
    choice, rows = repair.choice, np.arange(len(repair.choice))
    begun = table.begins(choice)
    over = np.maximum(table.usage(choice, begun) - limits.bytes_, 0)
    needed = int(over.sum())
    if not needed:
        repair.found += [choice] if limits.fits(table, choice) else []
        return []
    relief = table.weighted((over > 0).astype(np.float64), choice, begun)
    gain = relief[rows, choice][:, None] - relief
    spent = table.total(table.noise, choice)
    left = max(limits.noise - spent, 0.0)
    able = repair.fresh & table.allowed(choice) & (gain > 0)
    row, option = np.nonzero(able)
    noise = table.noise[row, option] - table.noise[row, choice[row]]
    quiet = noise <= left * (1 + 1e-12)
    if not quiet.any():
        return []
    row, option, noise = row[quiet], option[quiet], noise[quiet]
    gain, seconds = gain[row, option], table.seconds[row, option] - table.seconds[row, choice[row]]
    enough = gain >= needed
    if enough.any():
        last = _finished(table, limits, choice, begun, (row[enough], option[enough]), over)
        repair.found += [last] if last is not None else []
    cost = np.maximum(seconds, 0.0) + limits.scale * np.maximum(noise, 0.0) / max(left, 1e-30) + _TINY
    moves = []
    for frugal in repair.ways if enough.any() else repair.ways[:1]:
        score = np.zeros(able.shape)
        score[row, option] = (np.minimum(gain, needed) if frugal else gain) / cost
        moved = _moved(table, choice, score)
        if table.total(table.noise, moved) > left + spent:
            moved = _moved(table, choice, score, single=True)
        moves.append(moved)
    return moves[:1] if len(moves) > 1 and (moves[0] == moves[1]).all() else moves


def _finished(
    table: Table,
    limits: _Limits,
    choice: Integers,
    begun: Begun,
    moves: tuple[Integers, Integers],
    over: Integers,
) -> Integers | None:
    """The choice after the cheapest single move that makes it fit, of those enough where it is worst."""
    rows, worst = np.arange(len(choice)), np.zeros(len(over))
    worst[over.argmax()] = 1.0
    relief = table.weighted(worst, choice, begun)
    row, option = moves
    seconds = table.seconds[row, option] - table.seconds[row, choice[row]]
    enough = relief[rows, choice][row] - relief[row, option] >= over.max()
    order = np.argsort(seconds[enough], kind="stable")[:_LAST]
    for each in np.flatnonzero(enough)[order]:
        moved = choice.copy()
        moved[row[each]] = option[each]
        if limits.fits(table, moved):
            return moved
    return None


def _quieted(table: Table, limits: _Limits, choice: Integers) -> Integers:
    """The choice whose noise fits, by the moves that cost fewest bytes for the noise they take away."""
    rows = np.arange(len(choice))
    while table.total(table.noise, choice) > limits.noise * (1 + 1e-9):
        noise = table.noise[rows, choice][:, None] - table.noise
        bytes_ = np.maximum(table.held - table.held[rows, choice][:, None], 1)
        score = np.where(table.allowed(choice) & (noise > 0.0), noise / bytes_, 0.0)
        if not score.any():
            break
        choice = _moved(table, choice, score)
    return choice


def _moved(table: Table, choice: Integers, score: Floats, *, single: bool = False) -> Integers:
    """The choice after the move of highest score; of many tensors, after a few such that go together."""
    count = 1 if single else math.ceil(len(choice) / _MANY)
    if count == 1:
        row, option = divmod(int(score.argmax()), score.shape[1])
        moved = choice.copy()
        moved[row] = option if score[row, option] > 0.0 else choice[row]
        return moved
    rows = np.argsort(-score.max(1), kind="stable")[:count]
    rows = rows[score[rows].max(1) > 0.0]
    moved = choice.copy()
    moved[rows] = score[rows].argmax(1)
    return moved if table.is_sound(moved) else _moved(table, choice, score, single=True)


def _polish(table: Table, limits: _Limits, choice: Integers) -> Integers:
    """Single moves that save time and still fit, the best first, until there is none."""
    choice, rows = choice.copy(), np.arange(len(choice))
    while True:
        seconds = table.seconds - table.seconds[rows, choice][:, None]
        noise = table.noise - table.noise[rows, choice][:, None]
        left = limits.noise * (1 + 1e-9) - table.total(table.noise, choice)
        able = table.allowed(choice) & (seconds < -_TINY) & (noise <= left) & _room(table, limits, choice)
        before = choice.copy()
        for row, option in _by_gain(able, seconds):
            moved = choice.copy()
            moved[row] = option
            if choice[row] == before[row] and limits.fits(table, moved) and table.is_sound(moved):
                choice = moved
        if (choice == before).all():
            return choice


def _exchanged(table: Table, limits: _Limits, choice: Integers) -> Integers:
    """The choice after exchanges: one tensor takes a faster option, and others make room."""
    rows = np.arange(len(choice))
    best = table.total(table.seconds, choice)
    tried: set[tuple[int, int]] = set()
    for number in range(max(_EXCHANGES // len(table.base), 1)):
        seconds = table.seconds - table.seconds[rows, choice][:, None]
        moves = _by_gain(table.allowed(choice) & (seconds < -_TINY), seconds)
        move = next((move for move in moves if move not in tried), None)
        if move is None:
            break
        tried.add(move)
        moved = choice.copy()
        moved[move[0]] = move[1]
        fitting = next(_repaired(table, limits, moved, fixed=move[0], ways=(number % 2 == 0,)))
        fitting = None if fitting is None else _polish(table, limits, fitting)
        if fitting is not None and table.total(table.seconds, fitting) < best * (1 - _WORTHWHILE):
            choice, best = fitting, table.total(table.seconds, fitting)
            tried.clear()
    return choice


def _by_gain(able: NDArray[np.bool_], seconds: Floats) -> Iterator[tuple[int, int]]:
    moves = np.argwhere(able)
    order = np.argsort(seconds[able], kind="stable")
    return ((int(row), int(option)) for row, option in moves[order])


def _room(table: Table, limits: _Limits, choice: Integers) -> NDArray[np.bool_]:
    """Single moves that leave every position within the budget, as far as the tensor itself goes.

    One to or from being made from others also changes from when on those are there.
    """
    rows, taken = np.arange(len(choice))[:, None], choice[:, None]
    begun, wanted = table.begins(choice)
    begins, work_ends, saved = (each[:, None] for each in (begun, table.work_ends, table.saved))
    old, until = table.starts[rows, taken], table.ends[rows, taken]
    changes = [
        (table.starts, table.ends, table.held),
        (old, until, -table.held[rows, taken]),
        (begins, work_ends, table.working - table.working[rows, taken]),
        (begins, begins + 1, table.making - table.making[rows, taken]),
        (saved, saved + 1, table.packing - table.packing[rows, taken]),
    ]
    edges = [table.starts, old, begins, begins + 1, saved, saved + 1, table.ends, until, work_ends]
    working = np.where(table.remakes, 0, table.working)
    for start, end in _gaps(table, wanted):
        changes.append((start, end, working[rows, taken] - working))
        edges += [start, end]
    edges = list(np.sort(np.stack(np.broadcast_arrays(*edges)), axis=0))
    free, fits = _Lowest(limits.bytes_ - table.usage(choice)), table.valid.copy()
    for start, end in itertools.pairwise(edges):
        more = sum(np.where((first <= start) & (start < last), bytes_, 0) for first, last, bytes_ in changes)
        fits &= free.between(start, end) >= more
    return fits


def _gaps(table: Table, wanted: Integers) -> Iterator[tuple[Integers, Integers]]:
    """Every tensor's first gap, then its second, and so on, as columns; nothing long where there is none."""
    owners, starts, ends = table.idle(wanted)
    number = np.arange(len(owners)) - np.searchsorted(owners, owners)
    for turn in range(number.max(initial=-1) + 1):
        columns = np.zeros((2, len(wanted), 1), np.int64)
        now = number == turn
        columns[:, owners[now], 0] = starts[now], ends[now]
        yield columns[0], columns[1]


class _Lowest:
    """The lowest of any range of a list, at once: lists of the lowest of 1, 2, 4, ... from each place on."""

    def __init__(self, values: Integers) -> None:
        rows, reach = [values], 1
        while 2 * reach <= len(values):
            last = rows[-1]
            rows.append(np.append(np.minimum(last[:-reach], last[reach:]), last[-reach:]))
            reach *= 2
        self._rows = np.array(rows)

    def between(self, starts: Integers, ends: Integers) -> Integers:
        """From ``starts`` to before ``ends``, element by element; the largest integer where that is empty."""
        filled = ends > starts
        level = np.frexp(np.where(filled, ends - starts, 1))[1] - 1
        first, second = np.where(filled, starts, 0), np.where(filled, ends - 2**level, 0)
        low = np.minimum(self._rows[level, first], self._rows[level, second])
        return np.where(filled, low, np.iinfo(np.int64).max)
