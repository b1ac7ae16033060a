"""The published orders: GPipe, 1F1B, PipeDream, 2BW, interleaved, Breadth-First and zero bubble."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, count, pairwise
from math import lcm

from squeezebox.schedules._action import Action, Kind, Schedule
from squeezebox.schedules._simulate import validate
from squeezebox.schema import OptionError, PlanError

Passes = Iterator[tuple[Kind, int, int]]  # kind, stage and microbatch, of one rank
Version = Callable[[int, int], int]  # by stage and microbatch
Turns = Callable[[int, int], Iterator[Action]]  # of a rank, from a batch on


def gpipe(ranks: int, microbatches: int, *, batches: int = 1) -> Schedule:
    """All forwards of a batch, then all backwards (arXiv:1811.06965).

    Raises:
        OptionError: a count is below 1.
    """
    return _looped("gpipe", ranks, 1, microbatches, batches)


def breadth_first(ranks: int, microbatches: int, *, loops: int, batches: int = 1) -> Schedule:
    """Each of a rank's ``loops`` stages takes the whole batch before the next one (arXiv:2211.05953).

    Raises:
        OptionError: a count is below 1.
    """
    return _looped("breadth-first", ranks, loops, microbatches, batches)


def one_f_one_b(ranks: int, microbatches: int, *, batches: int = 1) -> Schedule:
    """1F1B with a flush after each batch: PipeDream-Flush (arXiv:2006.09503, section 3.1).

    Stage s, counted from 0, has at most ``ranks - s`` microbatches in flight.

    Raises:
        OptionError: a count is below 1.
    """
    _require(ranks=ranks, microbatches=microbatches, batches=batches)

    def passes(rank: int) -> Passes:
        lags = {Kind.FORWARD: 0, Kind.BACKWARD: ranks - 1 - rank}
        return ((kind, rank, number) for kind, number in _staggered(lags, microbatches))

    return _flushing("1f1b", range(ranks), microbatches, batches, passes)


def interleaved(ranks: int, microbatches: int, *, loops: int, batches: int = 1) -> Schedule:
    """1F1B over ``loops`` stages a rank (Megatron-LM, arXiv:2104.04473, section 2.2).

    Raises:
        OptionError: the microbatches are no multiple of the ranks, or a count is below 1.
    """
    _require(ranks=ranks, microbatches=microbatches, batches=batches, loops=loops)
    if microbatches % ranks:
        raise OptionError(
            f"interleaved 1F1B takes microbatches in groups of {ranks}, one for each rank; {microbatches} is "
            "no multiple of it. Change the number of microbatches, or take breadth_first()."
        )
    total = microbatches * loops

    def nth(rank: int, number: int, *, backward: bool) -> tuple[int, int]:
        # A group of ``ranks`` microbatches goes through all loops before the next group does.
        group, within = divmod(number, ranks * loops)
        loop, place = divmod(within, ranks)
        return (loops - 1 - loop if backward else loop) * ranks + rank, group * ranks + place

    def passes(rank: int) -> Passes:
        # Megatron-LM's warm-up: forwards before the first backward.
        ahead = min(total, 2 * (ranks - 1 - rank) + (loops - 1) * ranks)
        for kind, number in _staggered({Kind.FORWARD: 0, Kind.BACKWARD: ahead}, total):
            yield kind, *nth(rank, number, backward=kind is Kind.BACKWARD)

    return _flushing("interleaved-1f1b", [*range(ranks)] * loops, microbatches, batches, passes)


def zero_bubble(ranks: int, microbatches: int, *, doubled: bool = False, batches: int = 1) -> Schedule:
    """Backward in two parts, of which the second fills the waits (arXiv:2401.10241, section 2).

    ZB-H1: 1F1B in which rank r puts gradients of weights off by r microbatches, so that all ranks hold as
    many activations as 1F1B's first one; waits are (ranks - 1) * (F + I - W). ``doubled`` is ZB-H2: ranks go
    as far ahead again and hold up to ``2 * ranks - 1`` microbatches, and where F = I = W none waits between
    its first action and its last.

    Raises:
        OptionError: a count is below 1.
    """
    _require(ranks=ranks, microbatches=microbatches, batches=batches)
    reach = 2 if doubled else 1

    def passes(rank: int) -> Passes:
        ahead, later = reach * (ranks - 1 - rank), reach * rank
        lags = {Kind.FORWARD: 0, Kind.INPUT: ahead, Kind.WEIGHT: ahead + later}
        return ((kind, rank, number) for kind, number in _staggered(lags, microbatches))

    name = "zb-h2" if doubled else "zb-h1"
    return _flushing(name, range(ranks), microbatches, batches, passes)


def zero_bubble_v(ranks: int, microbatches: int, *, batches: int = 1) -> Schedule:
    """ZB-V (arXiv:2401.10241, section 6): two stages a rank, the second ones from the last rank to the first.

    Rank r has the stages r and 2 ranks - 1 - r. So a microbatch's last forward and first backward are at the
    first rank, and all ranks hold as many activations as 1F1B's first one: 2 ranks halves. Where F = I = W
    and there are 2 ranks - 1 microbatches or more, no rank waits between its first action and its last.

    Raises:
        OptionError: a count is below 1.
    """
    _require(ranks=ranks, microbatches=microbatches, batches=batches)

    def passes(rank: int) -> Passes:
        numbers: dict[tuple[Kind, int], Iterator[int]] = defaultdict(count)
        for times, actions in _v_phases(ranks, rank, max(microbatches, 2 * ranks - 1)):
            for kind, stage in actions * times:
                number = next(numbers[kind, stage])
                if number < microbatches:
                    yield kind, stage, number

    return _flushing("zb-v", v_shaped(ranks), microbatches, batches, passes)


def v_shaped(ranks: int) -> tuple[int, ...]:
    """The rank of each of 2 ranks stages that go to the last rank and back."""
    return (*range(ranks), *reversed(range(ranks)))


def _v_phases(ranks: int, rank: int, total: int) -> list[tuple[int, list[tuple[Kind, int]]]]:
    """How often a rank does what in ZB-V, one after the other, with 2 ranks - 1 microbatches or more."""
    left = ranks - rank
    forward, inputs, weights = (
        [(kind, stage) for stage in (rank, 2 * ranks - 1 - rank)]
        for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
    )
    down, up = ([each[way] for each in (forward, inputs, weights)] for way in (0, 1))
    return [
        (2 * left - 1, forward[:1]),
        (rank, forward[::-1]),
        (left, up),
        (total + 1 - ranks - left, down + up),
        (left - 1, down[1:] + up),
        (rank, inputs),
        (left, down[1:]),
        (rank, weights[1:]),
        (rank, weights[:1]),
    ]


def pipedream(
    ranks: int,
    *,
    batches: int = 1,
    vertical_sync: bool = False,
    warmup: int = 0,
    replicas: Sequence[int] = (),
) -> Schedule:
    """PipeDream with weight stashing (arXiv:1806.03377, section 3.3): an update after every microbatch.

    Microbatch k reads at stage s of n the weights after max(k - (n - 1 - s), 0) updates, in forward and
    backward; with ``vertical_sync`` those after max(k - (n - 1), 0) at every stage. The first ``warmup``
    batches go through alone, from the newest weights; no later one reads older weights than theirs.

    With ``replicas`` r(s) of each stage, replica k mod r(s) takes microbatch k (1F1B-RR), and a stage is
    updated after every r(s) microbatches, with the mean of their gradients. Microbatch k reads
    max(floor(k / r(s)) - a(s), 0) of these updates, where a replica takes a(s) microbatches in before its
    first backward, with a(s) + 1 = ceil((r(s) + ... + r(n-1)) / r(s)), which is the paper's NOAM at stage 0.
    With ``vertical_sync`` a stage reads the newest version that has learned from no other microbatches than
    the first stage's. A batch is the least that all stages share evenly.

    Raises:
        OptionError: a count is below 1, or ``warmup`` below 0.
    """
    _require(ranks=ranks, batches=batches, warmup=warmup)
    replicas = _replicated(ranks, replicas)
    ahead = _ahead(replicas)

    def version(stage: int, microbatch: int) -> int:
        if not vertical_sync:
            return microbatch // replicas[stage] - ahead[stage]
        return (microbatch // replicas[0] - ahead[0]) * replicas[0] // replicas[stage]

    microbatches = lcm(*replicas)
    updates = [microbatches // count for count in replicas]
    return _flowing("pipedream", replicas, updates, microbatches, batches, warmup, version)


def two_bw(
    ranks: int, microbatches: int, *, batches: int = 1, warmup: int = 0, replicas: Sequence[int] = ()
) -> Schedule:
    """PipeDream-2BW (arXiv:2006.09503, section 3.1): 1F1B without a flush, and two versions of the weights.

    Batch t, counted from 0, reads the weights after max(t - 1, ``warmup``) updates; before that, the first
    ``warmup`` batches are flushed and read the newest. ``replicas`` of a stage take microbatches in turn.

    Raises:
        OptionError: there are fewer microbatches than ranks, for which two versions would not do, or a
            stage's replicas cannot share them evenly; a count is below 1, or ``warmup`` below 0.
    """
    _require(ranks=ranks, microbatches=microbatches, batches=batches, warmup=warmup)
    replicas = _replicated(ranks, replicas)
    if microbatches < ranks:
        raise OptionError(
            f"2BW with {ranks} ranks needs as many microbatches in a batch or more, not {microbatches}."
        )
    if microbatches % lcm(*replicas):
        raise OptionError(
            f"{microbatches} microbatches in a batch cannot be shared evenly by {list(replicas)} replicas of "
            f"stages. Take a multiple of {lcm(*replicas)}."
        )
    updates = [1] * len(replicas)
    return _flowing(
        "2bw",
        replicas,
        updates,
        microbatches,
        batches,
        warmup,
        lambda _, microbatch: microbatch // microbatches - 1,
    )


def _replicated(ranks: int, replicas: Sequence[int]) -> Sequence[int]:
    """Each stage's, one unless they are given."""
    replicas = replicas or [1] * ranks
    if min(replicas) < 1 or sum(replicas) != ranks:
        raise OptionError(
            f"stages have {list(replicas)} replicas, and there are {ranks} ranks: each stage needs one or "
            "more, and each rank a stage. Make them add up."
        )
    return replicas


def _ahead(replicas: Sequence[int]) -> list[int]:
    """Microbatches that a replica of each stage takes in before its first backward."""
    return [-(-sum(replicas[stage:]) // own) - 1 for stage, own in enumerate(replicas)]


def _looped(name: str, ranks: int, loops: int, microbatches: int, batches: int) -> Schedule:
    _require(ranks=ranks, microbatches=microbatches, batches=batches, loops=loops)
    ways = (Kind.FORWARD, range(loops)), (Kind.BACKWARD, range(loops)[::-1])

    def passes(rank: int) -> Passes:
        for kind, turns in ways:
            for loop in turns:
                yield from ((kind, loop * ranks + rank, microbatch) for microbatch in range(microbatches))

    return _flushing(name, [*range(ranks)] * loops, microbatches, batches, passes)


def _staggered(lags: Mapping[Kind, int], total: int | None = None) -> Iterator[tuple[Kind, int]]:
    """In turn one of each kind, each by its lag behind, as long as there are numbers below ``total``."""
    for turn in count() if total is None else range(total + max(lags.values())):
        for kind, lag in lags.items():
            if lag <= turn and (total is None or turn - lag < total):
                yield kind, turn - lag


# What crosses between stages: outputs forwards, and gradients back.
_CROSSING = {(Kind.FORWARD,): "forwards", (Kind.BACKWARD, Kind.INPUT): "backwards"}


def _taken(schedule: Schedule, stage: int, kinds: Collection[Kind]) -> list[int]:
    """The microbatches that a stage takes, in its order."""
    order = schedule.orders[schedule.placement[stage]]
    return [each.microbatch for each in order if each.stage == stage and each.kind in kinds]


def repeated(schedule: Schedule) -> Schedule:
    """The schedule with ``turns``: its first batch again and again, each with the weights of the last update.

    For orders of your own, so that ``squeezebox.pipeline.Runner`` can go on after their end.

    Raises:
        PlanError: see :func:`validate`; or it does not flush after each batch, so none stands for all; or two
            ranks have the microbatches that cross between them in different orders.
    """
    validate(schedule)
    for action in (action for order in schedule.orders for action in order):
        if action.version != schedule.batch_of(action):
            raise PlanError(
                f"schedule '{schedule.name}' cannot be repeated: {action} reads the weights after "
                f"{action.version} updates, in batch {schedule.batch_of(action)}. Flush after each batch."
            )
    for before, (one, other) in enumerate(pairwise(schedule.placement)):
        for kinds, what in _CROSSING.items():
            orders = [_taken(schedule, stage, kinds) for stage in (before, before + 1)]
            if one != other and orders[0] != orders[1]:
                raise PlanError(
                    f"schedule '{schedule.name}' cannot be carried out: rank {one} takes the {what} of stage "
                    f"{before} in another order of microbatches than rank {other} those of stage "
                    f"{before + 1}, and what crosses is known by its order. Give both the same."
                )

    def turns(rank: int, first: int) -> Iterator[Action]:
        own = [action for action in schedule.orders[rank] if schedule.batch_of(action) == 0]
        for batch in count(first):
            for action in own:
                passed = batch * (1 if action.kind is Kind.UPDATE else schedule.microbatches)
                yield replace(action, microbatch=passed + action.microbatch, version=batch)

    return replace(schedule, turns=turns)


def _flushing(
    name: str,
    placement: Iterable[int],
    microbatches: int,
    batches: int,
    passes: Callable[[int], Passes],
) -> Schedule:
    """Batch after batch, each with the weights that the one before has left."""
    placement = tuple(placement)

    def turns(rank: int, first: int) -> Iterator[Action]:
        for batch in count(first):
            before = batch * microbatches
            for kind, stage, microbatch in passes(rank):
                yield Action(kind=kind, stage=stage, microbatch=before + microbatch, version=batch)
            for stage in (stage for stage, owner in enumerate(placement) if owner == rank):
                yield Action(kind=Kind.UPDATE, stage=stage, microbatch=batch, version=batch)

    return _ended(name, placement, microbatches, batches, turns)


def _flowing(
    name: str,
    replicas: Sequence[int],
    updates: Sequence[int],
    microbatches: int,
    batches: int,
    warmup: int,
    version: Version,
) -> Schedule:
    """1F1B over all batches, a stage a rank; an update as soon as its gradients are complete.

    The first ``warmup`` batches are flushed, each beginning with the newest weights.
    """
    holders = [(stage, replica) for stage, count in enumerate(replicas) for replica in range(count)]
    ahead = _ahead(replicas)

    def turns(rank: int, first: int) -> Iterator[Action]:
        stage, _ = holders[rank]
        lags = {Kind.FORWARD: 0, Kind.BACKWARD: ahead[stage]}
        for batch in range(first, warmup):
            yield from actions(rank, batch, batch, _staggered(lags, microbatches // replicas[stage]))
        yield from actions(rank, max(first, warmup), warmup, _staggered(lags))

    def actions(rank: int, first: int, oldest: int, passes: Iterable[tuple[Kind, int]]) -> Iterator[Action]:
        stage, replica = holders[rank]
        per_update = microbatches // updates[stage]
        for kind, number in passes:
            microbatch = first * microbatches + number * replicas[stage] + replica
            read = max(version(stage, microbatch), oldest * updates[stage])
            yield Action(kind=kind, stage=stage, microbatch=microbatch, version=read)
            update, place = divmod(microbatch, per_update)
            if kind is Kind.BACKWARD and place + replicas[stage] >= per_update:
                yield Action(kind=Kind.UPDATE, stage=stage, microbatch=update, version=update)

    placement = tuple(accumulate(replicas, initial=0))[:-1]
    replicated = {"replicas": tuple(replicas), "updates": tuple(updates)} if max(replicas) > 1 else {}
    return _ended(name, placement, microbatches, batches, turns, **replicated)


def _ended(
    name: str,
    placement: tuple[int, ...],
    microbatches: int,
    batches: int,
    turns: Turns,
    **replicated: tuple[int, ...],
) -> Schedule:
    """A schedule without end, up to the last update of ``batches`` batches."""
    empty = Schedule(
        name=name,
        placement=placement,
        microbatches=microbatches,
        batches=batches,
        orders=(),
        turns=turns,
        **replicated,
    )

    def order(rank: int) -> Iterator[Action]:
        updates = batches * sum(empty.updates_of(stage) for stage in empty.stages_of(rank))
        for action in turns(rank, 0):
            if empty.batch_of(action) < batches:
                yield action
                updates -= action.kind is Kind.UPDATE
            if not updates:
                return

    ranks = max(empty.ranks_of(stage).stop for stage in range(len(placement)))
    return replace(empty, orders=tuple(tuple(order(rank)) for rank in range(ranks)))


def _require(**counts: int) -> None:
    for name, number in counts.items():
        least = 0 if name == "warmup" else 1
        if number < least:
            raise OptionError(f"{name} is {number}; give at least {least}.")
