"""What a schedule makes of a pipeline: microbatches in flight, versions of weights, a batch's seconds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from squeezebox.schedules import _orders
from squeezebox.schedules._action import Kind, Schedule
from squeezebox.schedules._simulate import Costs, simulate

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipe:
    """``ranks`` ranks with ``loops`` stages each, and the microbatches of one batch."""

    ranks: int
    loops: int
    microbatches: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """Seconds of a microbatch's passes through each stage, and over each boundary between two, one way."""

    forward: Sequence[float]
    backward: Sequence[float]
    transfers: Sequence[float]

    @property
    def both(self) -> list[float]:
        """Of forward and backward together."""
        return [sum(pair) for pair in zip(self.forward, self.backward, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """A schedule in closed form, or as it is on paper.

    ``placement`` has the rank of each stage. ``in_flight`` has, for a rank, a row for each moment that may be
    its fullest, and in it how many microbatches each of the rank's stages holds; ``pending``, row by row, how
    many of them have gradients of weights to come and no others. ``seconds`` is a batch's, without its
    all-reduce.
    ``versions`` counts a rank's weights, ``gradients`` its sets of gradients. Where ``waits``, a transfer
    keeps the stages on both sides from their next microbatch.
    """

    in_flight: Callable[[Pipe, int], Integers]
    seconds: Callable[[Pipe, Passes], float]
    pending: Callable[[Pipe, int], Integers] = lambda pipe, rank: np.zeros((1, pipe.loops), np.int64)
    suits: Callable[[Pipe], bool] = lambda pipe: pipe.loops == 1
    versions: Callable[[Pipe, int], int] = lambda pipe, rank: 1
    gradients: int = 1
    waits: bool = True
    placement: Callable[[Pipe], tuple[int, ...]] = lambda pipe: (*range(pipe.ranks),) * pipe.loops

    def stages(self, pipe: Pipe, rank: int) -> list[int]:
        """A rank's own, in their order."""
        return [stage for stage, owner in enumerate(self.placement(pipe)) if owner == rank]


def _whole_batch(pipe: Pipe, rank: int) -> Integers:
    return np.full((1, pipe.loops), pipe.microbatches)


def _down_to_one(pipe: Pipe, rank: int) -> Integers:
    """1F1B: as many as there are stages from this one on."""
    return np.array([[min(pipe.microbatches, pipe.ranks - rank)]])


def _always_all(pipe: Pipe, rank: int) -> Integers:
    """1F1B without an end: the next batch is in flight, too."""
    return np.array([[pipe.ranks - rank]])


def _put_off(pipe: Pipe, rank: int, reach: int) -> Integers:
    """ZB-H1 and, with a ``reach`` of 2, ZB-H2: gradients of weights are put off, on all ranks alike.

    In turn n come the n-th forward, the (n - reach (ranks - 1 - rank))-th gradient of inputs, and the
    (n - reach (ranks - 1))-th one of weights; a turn is at its fullest before and after the second of these.
    Columns: all in flight, and of these those with only the last one to come.
    """
    turns = np.arange(pipe.microbatches + reach * (pipe.ranks - 1))

    def done(count: Integers) -> Integers:
        return np.clip(count, 0, pipe.microbatches)

    forwards, weights = done(turns + 1), done(turns - reach * (pipe.ranks - 1))
    inputs = turns - reach * (pipe.ranks - 1 - rank)
    moments = [np.stack([forwards - weights, done(each) - weights], 1) for each in (inputs, inputs + 1)]
    return np.unique(np.concatenate(moments), axis=0)


def _in_turns(pipe: Pipe, rank: int) -> Integers:
    """Interleaved 1F1B: after each forward, those done at every stage less the backwards done.

    A rank's n-th forward is of loop (n // ranks) % loops, and its backwards go through the loops the other
    way, 2 (ranks - 1 - rank) + (loops - 1) ranks behind. After these, every ranks * loops turns are alike.
    """
    round_ = pipe.ranks * pipe.loops
    total = pipe.microbatches * pipe.loops
    ahead = min(total, 2 * (pipe.ranks - 1 - rank) + (pipe.loops - 1) * pipe.ranks)
    turns = np.arange(min(total, ahead + round_))[:, None]
    loops = np.arange(pipe.loops)[None, :]

    def done(count: Integers, places: Integers) -> Integers:
        # Of ``count`` turns, how many were of each loop.
        rounds, rest = np.divmod(count, round_)
        return rounds * pipe.ranks + np.clip(rest - places * pipe.ranks, 0, pipe.ranks)

    backwards = done(np.maximum(turns - ahead, 0), loops[:, ::-1])
    return np.unique(done(turns + 1, loops) - backwards, axis=0)


def _one_way(pipe: Pipe, seconds: Sequence[float], transfers: Sequence[float]) -> float:
    """The longest path of all microbatches through all stages, loop after loop: exact for any stages.

    It follows one microbatch over some stages, waits at the slowest of them for the others, and goes on at
    the same rank's stage of the next loop, with the first microbatch.
    """
    until: list[float] = []
    for end in range(len(seconds)):
        path = slowest = longest = 0.0
        for first in range(end, -1, -1):
            path += seconds[first] + (transfers[first] if first < end else 0.0)
            slowest = max(slowest, seconds[first])
            if first == 0 or first >= pipe.ranks:
                before = until[first - pipe.ranks] if first else 0.0
                longest = max(longest, before + path + (pipe.microbatches - 1) * slowest)
        until.append(longest)
    return until[-1]


def _there_and_back(pipe: Pipe, passes: Passes) -> float:
    """GPipe and Breadth-First: m t + (d - 1) t / v, for even stages of t / v on d ranks and v loops."""
    forward = _one_way(pipe, passes.forward, passes.transfers)
    return forward + _one_way(pipe, passes.backward[::-1], passes.transfers[::-1])


def _interval(cycle: Sequence[float], rest: Sequence[float], transfers: Sequence[float]) -> float:
    """Seconds from microbatch to microbatch where each stage has one more in flight than the next one.

    Stages s to j then do j - s + 1 microbatches while one goes from s to j and back: with even stages and
    transfers of x, t + 2 x (d - 1) / d. What a stage does meanwhile and nobody waits for is its ``rest``.
    """
    longest = max(own + more for own, more in zip(cycle, rest, strict=True))
    for first in range(len(cycle)):
        path = cycle[first] + rest[first]
        for last in range(first + 1, len(cycle)):
            path += cycle[last] + 2 * transfers[last - 1]
            longest = max(longest, path / (last - first + 1))
    return longest


def _flushed(pipe: Pipe, passes: Passes) -> float:
    """1F1B: (m + d - 1) t for even stages; one microbatch there and back, and all others behind it."""
    first = sum(passes.both) + 2 * sum(passes.transfers)
    return first + (pipe.microbatches - 1) * _steady(passes)


def _steady(passes: Passes) -> float:
    return _interval(passes.both, [0.0] * len(passes.forward), passes.transfers)


def _endless(pipe: Pipe, passes: Passes) -> float:
    """2BW and PipeDream: m t, as the next batch follows at once."""
    return pipe.microbatches * _steady(passes)


def _interleaved(pipe: Pipe, passes: Passes) -> float:
    """Interleaved 1F1B: m t + (d - 1) t / v, for even stages of t / v; transfers are waited for once."""
    ranks = [sum(passes.both[rank :: pipe.ranks]) for rank in range(pipe.ranks)]
    filling = (sum(ranks) - max(ranks)) / pipe.loops
    return pipe.microbatches * max(ranks) + filling + 2 * sum(passes.transfers)


def _zero_bubble(pipe: Pipe, passes: Passes) -> float:
    """ZB-H1: m t + (d - 1) (F + I - W) for even stages with m >= d; I and W are half of backward each.

    The first min(m, d) microbatches come without their W, of which one is left at the end.
    """
    later = [seconds / 2 for seconds in passes.backward]
    cycle = [sum(pair) for pair in zip(passes.forward, later, strict=True)]
    slowest = max(zip(passes.both, later, strict=True))
    filling = sum(cycle) + 2 * sum(passes.transfers) + slowest[1]
    without = (min(pipe.microbatches, pipe.ranks) - 1) * max(cycle)
    return (
        filling + without + max(pipe.microbatches - pipe.ranks, 0) * _interval(cycle, later, passes.transfers)
    )


def _counts(pipe: Pipe) -> tuple[int, int]:
    return pipe.ranks, pipe.microbatches


@functools.lru_cache(maxsize=8)  # each of a plan's stages asks
def _in_a_v(pipe: Pipe) -> Schedule:
    return _orders.zero_bubble_v(*_counts(pipe))


def _on_paper(schedule: Schedule, passes: Passes) -> float:
    """A batch's seconds, all transfers between ranks as slow as the slowest."""
    transfer = max(passes.transfers, default=0.0)
    costs = Costs(forward=(*passes.forward,), backward=(*passes.backward,), transfer=transfer)
    return simulate(schedule, costs).seconds


def _counted(schedule: Schedule, rank: int) -> Integers:
    """After each action: microbatches in flight at each of the rank's stages, and pending ones."""
    own = [stage for stage, owner in enumerate(schedule.placement) if owner == rank]
    now = np.zeros((2, len(own)), np.int64)
    found = []
    for action in schedule.orders[rank]:
        if action.kind is not Kind.UPDATE:
            change = {Kind.FORWARD: (1, 0), Kind.INPUT: (0, 1), Kind.WEIGHT: (-1, -1)}
            now[:, own.index(action.stage)] += change.get(action.kind, (-1, 0))
            found.append(now.ravel().copy())
    return np.unique(found, axis=0)


GPIPE = Flow(in_flight=_whole_batch, seconds=_there_and_back, waits=False)
ONE_F_ONE_B = Flow(in_flight=_down_to_one, seconds=_flushed)
INTERLEAVED = Flow(
    in_flight=_in_turns,
    seconds=_interleaved,
    suits=lambda pipe: pipe.loops > 1 and pipe.microbatches % pipe.ranks == 0,
    waits=False,
)
BREADTH_FIRST = replace(GPIPE, suits=lambda pipe: pipe.loops > 1)
ZERO_BUBBLE = Flow(
    in_flight=lambda pipe, rank: _put_off(pipe, rank, 1)[:, :1],
    pending=lambda pipe, rank: _put_off(pipe, rank, 1)[:, 1:],
    seconds=_zero_bubble,
)
ZERO_BUBBLE_2 = Flow(
    in_flight=lambda pipe, rank: _put_off(pipe, rank, 2)[:, :1],
    pending=lambda pipe, rank: _put_off(pipe, rank, 2)[:, 1:],
    seconds=lambda pipe, passes: _on_paper(_orders.zero_bubble(*_counts(pipe), doubled=True), passes),
)
ZERO_BUBBLE_V = Flow(
    in_flight=lambda pipe, rank: _counted(_in_a_v(pipe), rank)[:, : pipe.loops],
    pending=lambda pipe, rank: _counted(_in_a_v(pipe), rank)[:, pipe.loops :],
    seconds=lambda pipe, passes: _on_paper(_in_a_v(pipe), passes),
    suits=lambda pipe: pipe.loops == 2,
    placement=lambda pipe: _orders.v_shaped(pipe.ranks),
)
TWO_BW = Flow(
    in_flight=_always_all,
    seconds=_endless,
    suits=lambda pipe: pipe.loops == 1 and pipe.microbatches >= pipe.ranks,
    versions=lambda pipe, rank: 1 if rank == pipe.ranks - 1 else 2,
    gradients=2,
)
PIPEDREAM = Flow(
    in_flight=_always_all,
    seconds=_endless,
    suits=lambda pipe: pipe.loops == 1 and pipe.microbatches == 1,
    versions=lambda pipe, rank: pipe.ranks - rank,
)
