"""A profile as arrays: one row a tensor, one column an option."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from squeezebox.schema import Action, Budget, BudgetError, Option, OptionError, Plan, Profile, TensorProfile

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Begun = tuple[Integers, Integers]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Table:
    """Options padded to the longest list; ``valid`` marks the real ones."""

    profile: Profile
    base: Integers
    valid: NDArray[np.bool_]
    held: Integers
    working: Integers
    making: Integers
    packing: Integers
    seconds: Floats
    noise: Floats
    starts: Integers  # from where on each option holds its bytes,
    ends: Integers  # and one past the last such position
    saved: Integers
    first_use: Integers
    work_ends: Integers  # one past the last position with its buffer
    gaps: Integers  # a row each: the tensor's, and from where to before where it has no buffer
    children: Integers  # rows with an option that is made from others, once for each, the last saved first
    made: Integers  # that option,
    remakes: NDArray[np.bool_]  # also marked among all options
    sources: Integers  # and the row it is made from,
    suits: NDArray[np.bool_]  # of which these options suit it
    together: Integers  # how many of children have this row and option
    levels: tuple[Integers, ...]  # places in children: of rows from which none are made, only such, and so on
    lent: Integers  # a row for each of children and each gap of its source: where that is in both

    def usage(self, choice: Integers, begun: Begun | None = None) -> Integers:
        """Bytes at every position if tensor ``t`` takes option ``choice[t]``; ``begun``: by begins()."""
        rows = np.arange(len(choice))
        begins, wanted = self.begins(choice) if begun is None else begun
        held, working = self.held[rows, choice], self.working[rows, choice]
        making, packing = self.making[rows, choice], self.packing[rows, choice]
        owners, away, back = self.idle(wanted)
        gone = np.where(self.remakes[owners, choice[owners]], 0, working[owners])
        starts = (self.starts[rows, choice], begins, begins, self.saved, back)
        ends = (self.ends[rows, choice], self.work_ends, begins + 1, self.saved + 1, away)
        bytes_ = np.concatenate((held, working, making, packing, gone)).astype(np.float64)
        steps = np.bincount(
            np.concatenate((*starts, *ends)), np.concatenate((bytes_, -bytes_)), len(self.base) + 1
        )
        return self.base + np.cumsum(steps[:-1]).astype(np.int64)  # sums below 2**53 are exact

    def begins(self, choice: Integers) -> Begun:
        """From where on each tensor is there unpacked, and from where on all the time, for others' sake.

        The first is its own first use, or that of one made from it; the second is past all positions where
        none is.
        """
        active = choice[self.children] == self.made
        children, sources = self.children[active], self.sources[active]
        wanted = np.full(len(choice), len(self.base), np.int64)
        begins, known = self.first_use.copy(), None
        while known is None or (begins[children] < known).any():
            known = begins[children]
            np.minimum.at(wanted, sources, known)
            np.minimum(begins, wanted, out=begins)
        return begins, wanted

    def idle(self, wanted: Integers) -> tuple[Integers, Integers, Integers]:
        """The gaps (row, from where, to before where) of what is wanted from then on all the time."""
        owners, starts, ends = self.gaps.T
        return owners, starts, np.maximum(np.minimum(ends, wanted[owners]), starts)

    def allowed(self, choice: Integers) -> NDArray[np.bool_]:
        """Options that one tensor may change to while the others stay: what serves is not taken away."""
        allowed = self.valid.copy()
        lost = ~self._suited(choice)
        allowed[self.children[lost], self.made[lost]] = False
        active = choice[self.children] == self.made
        np.logical_and.at(allowed, self.sources[active], self.suits[active])
        return allowed

    def is_sound(self, choice: Integers) -> bool:
        """Whether what is made from others has sources that suit it."""
        return not self.lost(choice).any()

    def lost(self, choice: Integers) -> NDArray[np.bool_]:
        """Which of ``children`` are made from what does not suit them."""
        return np.asarray((choice[self.children] == self.made) & ~self._suited(choice), bool)

    def _suited(self, choice: Integers) -> NDArray[np.bool_]:
        return self.suits[np.arange(len(self.suits)), choice[self.sources]]

    def weighted(self, weights: Floats, choice: Integers, begun: Begun) -> Floats:
        """Bytes of every option, each position's by its weight, the other tensors as they are chosen.

        ``begun`` is what :meth:`begins` found for the choice.
        """
        before = np.concatenate(([0.0], np.cumsum(weights)))
        begins, wanted = begun
        held = self.held * (before.take(self.ends) - before.take(self.starts))
        owners, starts, ends = self.idle(wanted)
        away = np.bincount(owners, before[ends] - before[starts], len(choice))[:, None]
        there = (before[self.work_ends] - before[begins])[:, None]
        working = self.working * (there - np.where(self.remakes, 0.0, away))
        passing = self.making * weights[begins][:, None] + self.packing * weights[self.saved][:, None]
        bytes_ = np.asarray(held + working + passing, np.float64)
        first, sources = self.first_use[self.sources], self.sources
        begun_children = begins[self.children]
        earlier = before[first] - before[np.minimum(begun_children, first)]
        at, gap = self.lent.T
        _, start, end = self.gaps[gap].T
        since = np.clip(begun_children[at], start, end)
        earlier = earlier + np.bincount(at, before[end] - before[since], len(earlier))
        lent = self.working[sources, choice[sources]] * earlier
        places = self.children * bytes_.shape[1] + self.made
        bytes_ += np.bincount(places, lent, bytes_.size).reshape(bytes_.shape)
        return bytes_

    def floor(self, *, quiet: bool) -> int:
        """Bytes that every choice has at some position: of each tensor at each the least of any option.

        ``quiet``: of those without noise, where there are such.
        """
        least = self.base.copy()
        silent = self.valid & ((self.noise <= 0.0) | (not quiet))
        for row in range(len(self.valid)):
            able = silent[row] if silent[row].any() else self.valid[row]
            works_until = int(self.work_ends[row])
            begin, end = int(self.starts[row][able].min()), int(max(self.ends[row][able].max(), works_until))
            gaps = self.gaps[self.gaps[:, 0] == row][:, 1:]
            moments = (self.first_use[row], works_until, self.saved[row], self.saved[row] + 1)
            changes = np.concatenate([self.starts[row], self.ends[row], gaps.ravel(), moments])
            first = np.unique(np.clip(changes, begin, end))[:-1]  # of positions that are alike
            at = first[:, None]
            there = (at >= self.first_use[row]) & (at < works_until)
            there &= ~((at >= gaps[:, 0]) & (at < gaps[:, 1])).any(1, keepdims=True)
            held = np.where((at >= self.starts[row]) & (at < self.ends[row]), self.held[row], 0)
            bytes_ = held + np.where(there, self.working[row], 0)
            bytes_ += np.where(at == self.saved[row], self.packing[row], 0)
            least[begin:end] += np.repeat(bytes_[:, able].min(1), np.diff(first, append=end))
        return int(least.max())

    def total(self, values: Floats, choice: Integers) -> float:
        """Sum of the chosen options' values."""
        return float(values[np.arange(len(choice)), choice].sum())

    def plan(self, choice: Integers) -> Plan:
        """The choices as a Plan."""
        usage = self.usage(choice)
        tensors = self.profile.tensors
        return Plan(
            choices={tensor.key: tensor.options[i] for tensor, i in zip(tensors, choice, strict=True)},
            predicted_peak_bytes=int(usage.max()),
            predicted_seconds=self.total(self.seconds, choice),
            predicted_noise=self.total(self.noise, choice),
            peak_position=int(usage.argmax()),
        )


def as_chosen(profile: Profile, choices: Mapping[str, Option]) -> Table:
    """The profile as if these options, by key, were the only ones."""
    tensors = tuple(replace(tensor, options=(choices[tensor.key],)) for tensor in profile.tensors)
    return tabulate(replace(profile, tensors=tensors))


def tabulate(profile: Profile) -> Table:
    """The profile as arrays.

    Raises:
        OptionError: there are no positions, a tensor has no option or a life outside the positions, or two
            tensors share a key.
    """
    tensors, last = profile.tensors, len(profile.base_bytes) - 1
    for tensor in tensors:
        if not tensor.options or not 0 <= tensor.saved_at <= tensor.first_use <= tensor.last_use <= last:
            raise OptionError(
                f"tensor '{tensor.key}' has {len(tensor.options)} options and lives from {tensor.saved_at} "
                f"over {tensor.first_use} to {tensor.last_use}; it needs an option and a life in 0 to {last}."
            )
    if last < 0 or len({tensor.key for tensor in tensors}) < len(tensors):
        raise OptionError(
            f"a profile of {last + 1} positions and {len(tensors)} tensors has no or equal ones."
        )
    width = max((len(tensor.options) for tensor in tensors), default=1)
    gaps = np.array([(row, gap[0], gap[1] + 1) for row, t in enumerate(tensors) for gap in t.gaps], np.int64)
    gaps = gaps.reshape(-1, 3)
    lasting = _column(tensors, width, "lasting", np.bool_)
    return Table(
        profile=profile,
        base=np.array(profile.base_bytes, np.int64),
        valid=np.array([[i < len(t.options) for i in range(width)] for t in tensors], bool).reshape(
            -1, width
        ),
        held=_column(tensors, width, "held_bytes", np.int64),
        working=_column(tensors, width, "working_bytes", np.int64),
        making=_column(tensors, width, "making_bytes", np.int64),
        packing=_column(tensors, width, "packing_bytes", np.int64),
        seconds=_column(tensors, width, "seconds", np.float64),
        noise=_column(tensors, width, "noise", np.float64),
        starts=np.where(lasting, 0, _starts(tensors, width)),
        ends=np.where(lasting, last, np.array([[t.last_use] for t in tensors], np.int64).reshape(-1, 1)) + 1,
        saved=np.array([tensor.saved_at for tensor in tensors], np.int64),
        first_use=np.array([tensor.first_use for tensor in tensors], np.int64),
        work_ends=np.array([1 + max(t.last_use, min(t.idle_until, last)) for t in tensors], np.int64),
        gaps=gaps,
        **_derivations(tensors, width, gaps),
    )


def _derivations(tensors: tuple[TensorProfile, ...], width: int, gaps: Integers) -> dict[str, Any]:
    """Which option of which row is made from which other rows."""
    rows = {tensor.key: row for row, tensor in enumerate(tensors)}
    exact = _column(tensors, width, "serves", np.bool_)
    near = _column(tensors, width, "approximates", np.bool_)
    links: list[tuple[int, int, int]] = []
    suits: list[NDArray[np.bool_]] = []
    for row in sorted(range(len(tensors)), key=lambda row: -tensors[row].saved_at):
        tensor = tensors[row]
        for number, option in enumerate(tensor.options):
            if not option.sources:
                continue
            known = [rows[key] for key in option.sources if key in rows]
            early = all(tensors[source].saved_at < tensor.saved_at for source in known)
            if len(known) < len(option.sources) or not early:
                raise OptionError(
                    f"tensor '{tensor.key}' is made from {', '.join(option.sources)}; those are not all in "
                    "the profile and saved before it."
                )
            links += [(row, number, source) for source in known]
            suits += [(near if option.tolerates else exact)[source] for source in known]
    children, made, sources = np.array(links, np.int64).reshape(-1, 3).T
    remakes = np.zeros((len(tensors), width), bool)
    remakes[children, made] = True
    pairs = Counter((child, again) for child, again, _ in links)
    depth = np.zeros(len(tensors), np.int64)
    for child, _, source in links:
        depth[source] = max(depth[source], depth[child] + 1)
    return {
        "remakes": remakes,
        "together": np.array([pairs[child, again] for child, again, _ in links], np.int64),
        "levels": tuple(
            np.nonzero(depth[children] == level)[0] for level in range(depth.max(initial=-1) + 1)
        ),
        "children": children,
        "made": made,
        "sources": sources,
        "suits": np.array(suits, bool).reshape(-1, width),
        "lent": np.argwhere(sources[:, None] == gaps[:, 0]),
    }


def _starts(tensors: tuple[TensorProfile, ...], width: int) -> Integers:
    """Where each option begins to hold its bytes."""
    starts = np.zeros((len(tensors), width), np.int64)
    for row, tensor in enumerate(tensors):
        kept = [option.action is Action.KEEP for option in tensor.options]
        later = min(max(tensor.saved_at, tensor.dropped_at), tensor.last_use + 1)
        starts[row, : len(kept)] = [later if keep else tensor.saved_at for keep in kept]
    return starts


def _column(tensors: tuple[TensorProfile, ...], width: int, name: str, dtype: type) -> NDArray[Any]:
    table: NDArray[Any] = np.zeros((len(tensors), width), dtype)
    for row, tensor in enumerate(tensors):
        table[row, : len(tensor.options)] = [getattr(option, name) for option in tensor.options]
    return table


def infeasible(table: Table, budget: Budget, least: Integers) -> BudgetError:
    """The error for a budget that nothing meets, given the smallest choice found."""
    usage = table.usage(least)
    position = int(usage.argmax())
    base = table.base[position]
    return BudgetError(
        f"no plan keeps every position within {budget.peak_bytes} bytes at noise {budget.noise:g}: the "
        f"smallest found needs {int(usage[position])} bytes, at position {position}, of which {base} are "
        "parameters, gradients, optimizer state and operators' own memory. Raise the budget to that, allow "
        "more noise, or make the batch smaller."
    )
