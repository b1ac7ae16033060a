"""The best devices, order and cuts of one schedule over devices that are not alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from squeezebox.planner._split import planned_stage
from squeezebox.planner._stages import Place, Runs
from squeezebox.planner._table import Floats, Integers
from squeezebox.schedules import FLOWS, PUBLISHED, Costs, Passes, Pipe, make, simulate
from squeezebox.schema import Devices, PipelinePlan, StagePlan, human_bytes

_NEAR = 1.1  # of the seconds of a split, up to which one that is near is given to the simulator


class Split(NamedTuple):
    """Devices in the order of stages, where these end, and a batch's seconds as the search has them."""

    devices: tuple[int, ...]
    ends: tuple[int, ...]
    seconds: float


class _State(NamedTuple):
    """The best ways to the end of each block, a row for each next device; and the device and block before."""

    cost: Floats
    before: Integers
    first: Integers
    after: tuple[int, ...]


Table = dict[tuple[int, int], _State]  # by the set of devices, and the last one


class Search:
    """One schedule and depth: what each stage costs on each device, and the best of all splits."""

    def __init__(
        self, blocks: Runs, devices: Devices, speed: float, schedule: str, pipe: Pipe, *, in_order: bool
    ) -> None:
        self._runs, self._devices, self._schedule, self._pipe = blocks, devices, schedule, pipe
        numbers = range(len(devices.devices))
        self.order = tuple(numbers) if in_order else None
        self._factors = [speed / device.speed for device in devices.devices]
        self._outputs = [0, *(block.output_bytes for block in blocks.profile.blocks[:-1]), 0]
        self._waits = FLOWS[schedule].waits
        self._crossing = {
            (one, other): np.array([devices.link(one, other).seconds(nbytes) for nbytes in self._outputs])
            for one, other in itertools.permutations(numbers, 2)
        }
        self._places = [Place.of(schedule, pipe, stage) for stage in range(pipe.ranks)]
        self._held = [
            np.where(np.isfinite(blocks.seconds), blocks.held(place), np.inf) for place in self._places
        ]
        self._seconds = [
            [
                factor * np.where(held <= device.memory_bytes, blocks.seconds, np.inf).min(0)
                for factor, device in zip(self._factors, devices.devices, strict=True)
            ]
            for held in self._held
        ]
        self._alike = _alike(devices)
        # No batch takes less than one microbatch on the fastest device.
        singly = np.diagonal(np.stack([each for own in self._seconds for each in own]).min(0), 1)
        self._floor = float(singly.sum())

    def bottleneck(self, order: tuple[int, ...] | None = None) -> Split | None:
        """Of all whose slowest stage is as fast as can be, the one that takes the least in all."""
        slowest = _least(self._table(np.maximum, np.inf, order))
        return self._best(slowest, order) if np.isfinite(slowest) else None

    def improved(self, split: Split, least: float) -> Split:
        """The best of all, if one might take less than ``least``: less in all for a slower stage.

        Of each slowest stage that may be, from the slowest on, that with the least sum.
        """
        many, fastest, total = self._pipe.microbatches - 1, self._slowest(split), self._floor
        if not PUBLISHED[self._schedule].flushes:
            return split
        limit = np.inf
        while True:
            least = min(least, split.seconds)
            limit = min(limit, (least - total) / many if many else np.inf)
            other = self._best(limit, self.order) if limit >= fastest else None
            if other is None:
                return split
            slowest = self._slowest(other)
            total = other.seconds - many * slowest
            split = min(split, other, key=lambda each: each.seconds)
            limit = float(np.nextafter(slowest, 0.0))

    def begun(self) -> Split | None:
        """The best of some orders: the fastest devices, and chains whose slowest link is the fastest."""
        depth = self._pipe.ranks
        by_speed = sorted(range(len(self._factors)), key=lambda each: self._factors[each])[:depth]
        orders = {tuple(by_speed), tuple(by_speed[::-1]), _by_memory(self._devices, self._pipe.ranks)}
        orders |= {_chain(self._devices, among, depth) for among in (by_speed, range(len(self._factors)))}
        found = [self.simulated(split) for order in orders if (split := self.bottleneck(order))]
        return min(found, default=None, key=lambda split: split.seconds)

    def moved(self, split: Split) -> Split:
        """Moves one device or cut at a time, as long as a batch takes less by the simulator."""
        while True:
            near = (found for found in self._near(split) if found.seconds < _NEAR * split.seconds)
            best = min(map(self.simulated, near), default=split, key=lambda each: each.seconds)
            if best.seconds >= split.seconds:
                return split
            split = best

    def _near(self, split: Split) -> Iterator[Split]:
        """Two devices swapped, or one replaced, with the best cuts for that; or a cut moved by one block."""
        for order in () if self.order else _moves(split.devices, len(self._factors)):
            if found := self.bottleneck(order):
                yield found
        for number, step in itertools.product(range(len(split.ends) - 1), (-1, 1)):
            ends = [*split.ends]
            ends[number] += step
            moved = Split(split.devices, tuple(ends), 0.0)
            if [0, *ends] == sorted({0, *ends}) and np.isfinite(self._slowest(moved)):
                yield moved

    def simulated(self, split: Split) -> Split:
        """With a batch's seconds by the simulator."""
        return split._replace(seconds=self.plan(split).seconds)

    def plan(self, split: Split) -> PipelinePlan:
        """The plan, with a batch's seconds by the simulator, or without a flush by the closed form."""
        policies = [self._policy(*each) for each in self._stages(split)]
        stages = []
        for (stage, device, first, end), policy in zip(self._stages(split), policies, strict=True):
            own = planned_stage(self._runs, first, end, self._runs.policies[policy], self._places[stage])
            factor = self._factors[device]
            stages.append(
                replace(
                    own,
                    forward_seconds=factor * own.forward_seconds,
                    backward_seconds=factor * own.backward_seconds,
                )
            )
        held = [
            int(self._held[stage][policy, first, end])
            for (stage, _, first, end), policy in zip(self._stages(split), policies, strict=True)
        ]
        names = [self._devices.devices[device].name for device in split.devices]
        return PipelinePlan(
            schedule=self._schedule,
            ranks=self._pipe.ranks,
            replicas=1,
            microbatch=self._runs.profile.microbatch,
            microbatches=self._pipe.microbatches,
            stages=tuple(stages),
            seconds=self._batch_seconds(split, stages),
            rank_peak_bytes=tuple(held),
            devices=tuple(names),
            processes=tuple(sorted(split.devices).index(device) for device in split.devices),
        )

    def shortage(self, *, exact: bool) -> tuple[float, str]:
        """How much a device lacks at least, and a sentence on that; else of the largest devices in a row."""
        order = self.order if exact else _by_memory(self._devices, self._pipe.ranks)
        table = self._table(np.maximum, np.inf, order, short=True)
        total = _least(table)
        if not np.isfinite(total):
            return total, ""
        devices, ends = _traced(table, total)
        lacks, stage, device, first, end = max(
            (float(self._short(stage, device)[first, end]), stage, device, first, end)
            for stage, device, first, end in self._stages(Split(devices, ends, 0.0))
        )
        own, blocks = self._devices.devices[device], self._runs.profile.blocks
        names = [each.name for each in self._devices.devices]
        return lacks, (
            f"'{own.name}' is short by {human_bytes(lacks)}: stage {stage} ('{blocks[first].name}' to "
            f"'{blocks[end - 1].name}') holds {human_bytes(own.memory_bytes + lacks)} there by "
            f"{self._schedule} with {self._pipe.microbatches} microbatches of "
            f"{self._runs.profile.microbatch} over {', '.join(names[each] for each in devices)}"
        )

    def _best(self, limit: float, order: tuple[int, ...] | None) -> Split | None:
        """The least sum of all whose stages take up to ``limit`` each."""
        table = self._table(np.add, limit, order)
        total = _least(table)
        if not np.isfinite(total):
            return None
        split = Split(*_traced(table, total), 0.0)
        many, slowest = self._pipe.microbatches - 1, self._slowest(split)
        flushes = PUBLISHED[self._schedule].flushes
        return split._replace(seconds=(total if flushes else slowest) + many * slowest)

    def _table(
        self, join: np.ufunc, limit: float, order: tuple[int, ...] | None, *, short: bool = False
    ) -> Table:
        """Dynamic programming over sets of devices S, the last one k, the next one n, and blocks up to j.

        A(S, k, n, j) = min over i, p of join{A(S - k, p, k, i), cost of blocks i up to j on k}, with what
        crosses from p and to n.
        """
        table: Table = {}
        for size in range(1, self._pipe.ranks + 1):
            for chosen in self._sets(size, order):
                for last in chosen if order is None else chosen[-1:]:
                    rest = _bits(chosen) - (1 << last)
                    ways = [
                        (before, table[rest, before])
                        for before in chosen
                        if (rest, before) in table and last in table[rest, before].after
                    ]
                    if ways or size == 1:
                        after = self._after(chosen, order)
                        table[_bits(chosen), last] = self._state(
                            ways, size - 1, last, after, join, limit, short
                        )
        return table

    def _state(
        self,
        ways: Sequence[tuple[int, _State]],
        stage: int,
        last: int,
        after: tuple[int, ...],
        join: np.ufunc,
        limit: float,
        short: bool,
    ) -> _State:
        own = self._short(stage, last) if short else self._seconds[stage][last]
        nothing = np.zeros(len(own))
        known = np.stack([state.cost[state.after.index(last)] for _, state in ways] or [nothing])
        if not ways:
            known[0, 1:] = np.inf
        entering = np.stack([self._crossing[before, last] for before, _ in ways] or [nothing])
        leaving = np.stack([self._crossing[last, each] if each >= 0 else nothing for each in after])
        crossed = entering[None, :, :, None] + leaving[:, None, None, :]
        if short:
            crossed = np.zeros_like(crossed)
        waiting = own + (crossed if self._waits else np.zeros_like(crossed))
        cost = np.where(waiting <= limit, own + crossed if join is np.add else waiting, np.inf)
        joined = join(known[None, :, :, None], cost).reshape(len(after), -1, len(own))
        place = joined.argmin(1)
        return _State(
            np.take_along_axis(joined, place[:, None], 1)[:, 0],
            np.array([before for before, _ in ways] or [-1])[place // len(own)],
            place % len(own),
            after,
        )

    def _short(self, stage: int, device: int) -> Floats:
        """Bytes that a device lacks for each run of blocks, by the policy that holds the least."""
        lacks: Floats = self._held[stage].min(0) - self._devices.devices[device].memory_bytes
        return lacks

    def _sets(self, size: int, order: tuple[int, ...] | None) -> Iterator[tuple[int, ...]]:
        if order is not None:
            yield order[:size]
            return
        for chosen in itertools.combinations(range(len(self._factors)), size):
            if self._is_first(chosen):
                yield chosen

    def _after(self, chosen: tuple[int, ...], order: tuple[int, ...] | None) -> tuple[int, ...]:
        """Devices that may follow; -1 after the last stage."""
        if len(chosen) == self._pipe.ranks:
            return (-1,)
        if order is not None:
            return (order[len(chosen)],)
        others = [each for each in range(len(self._factors)) if each not in chosen]
        return tuple(each for each in others if self._is_first((*chosen, each)))

    def _is_first(self, chosen: Sequence[int]) -> bool:
        """Whether of devices that are alike there are the first ones only."""
        return all({*same[: len({*same} & {*chosen})]} <= {*chosen} for same in self._alike)

    def _stages(self, split: Split) -> list[tuple[int, int, int, int]]:
        """Number, device, first block and end of each stage."""
        runs_ = pairwise((0, *split.ends))
        return [(stage, split.devices[stage], *blocks) for stage, blocks in enumerate(runs_)]

    def _slowest(self, split: Split) -> float:
        found = []
        for stage, device, first, end in self._stages(split):
            entering = self._crossing[split.devices[stage - 1], device][first] if stage else 0.0
            is_last = stage + 1 == len(split.ends)
            leaving = 0.0 if is_last else self._crossing[device, split.devices[stage + 1]][end]
            waited = entering + leaving if self._waits else 0.0  # added up as in the table, to the bit
            found.append(float(self._seconds[stage][device][first, end] + waited))
        return max(found)

    def _policy(self, stage: int, device: int, first: int, end: int) -> int:
        """The fastest that fits."""
        fits = self._held[stage][:, first, end] <= self._devices.devices[device].memory_bytes
        return int(np.where(fits, self._runs.seconds[:, first, end], np.inf).argmin())

    def _batch_seconds(self, split: Split, stages: Sequence[StagePlan]) -> float:
        crossing = tuple(
            float(self._crossing[one, other][end])
            for (one, other), end in zip(pairwise(split.devices), split.ends, strict=False)
        )
        forward = tuple(stage.forward_seconds for stage in stages)
        backward = tuple(stage.backward_seconds for stage in stages)
        if not PUBLISHED[self._schedule].flushes:
            passes = Passes(forward=forward, backward=backward, transfers=crossing)
            return FLOWS[self._schedule].seconds(self._pipe, passes)
        order = make(self._schedule, self._pipe.ranks, self._pipe.microbatches)
        return simulate(order, Costs(forward=forward, backward=backward, transfer=crossing)).seconds


def _bits(devices: Sequence[int]) -> int:
    return sum(1 << each for each in devices)


def _least(table: Table) -> float:
    """Of all that end with the last stage."""
    return float(min((state.cost[0, -1] for state in table.values() if state.after == (-1,)), default=np.inf))


def _traced(table: Table, total: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Devices and ends of the stages that this total is of."""
    chosen, last = next(
        key for key, state in table.items() if state.after == (-1,) and state.cost[0, -1] == total
    )
    devices, ends, after = [last], [table[chosen, last].cost.shape[1] - 1], -1
    while chosen != 1 << last:
        state = table[chosen, last]
        row = state.after.index(after)
        before, first = int(state.before[row, ends[-1]]), int(state.first[row, ends[-1]])
        chosen, last, after = chosen - (1 << last), before, last
        devices.append(before)
        ends.append(first)
    return tuple(devices[::-1]), tuple(ends[::-1])


def _alike(devices: Devices) -> list[tuple[int, ...]]:
    """Devices in groups that may be exchanged: as much memory, as fast, and with like links to all others."""
    groups: list[list[int]] = []
    for number in range(len(devices.devices)):
        for group in groups:
            if all(_like(devices, number, other) for other in group):
                group.append(number)
                break
        else:
            groups.append([number])
    return [tuple(group) for group in groups]


def _like(devices: Devices, one: int, other: int) -> bool:
    mine, theirs = devices.devices[one], devices.devices[other]
    others = [each for each in range(len(devices.devices)) if each not in (one, other)]
    return (mine.memory_bytes, mine.speed) == (theirs.memory_bytes, theirs.speed) and all(
        devices.link(one, each) == devices.link(other, each) for each in others
    )


def _chain(devices: Devices, among: Sequence[int], depth: int) -> tuple[int, ...]:
    """Rows in which each next one has the fastest link: of these, the one whose slowest link is fastest."""
    best, chosen = -1.0, tuple[int, ...]()
    for start in among:
        order, slowest = [start], np.inf
        while len(order) < depth:
            speed = {
                each: devices.link(order[-1], each).bytes_per_second for each in among if each not in order
            }
            order.append(max(speed, key=lambda each: speed[each]))  # noqa: B023
            slowest = min(slowest, speed[order[-1]])
        if slowest > best:
            best, chosen = slowest, tuple(order)
    return chosen


def _by_memory(devices: Devices, depth: int) -> tuple[int, ...]:
    """The largest devices first: the first stage has most microbatches in flight."""
    nbytes = [device.memory_bytes for device in devices.devices]
    return tuple(sorted(range(len(nbytes)), key=lambda each: -nbytes[each])[:depth])


def _moves(order: tuple[int, ...], count: int) -> Iterator[tuple[int, ...]]:
    """Two devices swapped, or one that is not used in the place of one that is."""
    for one, other in itertools.combinations(range(len(order)), 2):
        moved = [*order]
        moved[one], moved[other] = moved[other], moved[one]
        yield tuple(moved)
    for place in range(len(order)):
        for device in (each for each in range(count) if each not in order):
            yield (*order[:place], device, *order[place + 1 :])
