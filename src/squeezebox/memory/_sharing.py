"""Which tensors may share memory when operators run on several streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from squeezebox.memory._problem import Integers, Relation
from squeezebox.schema import Buffer, Operator, OptionError


@dataclass(slots=True)
class _Lifetime:
    """Numbers of operators: who gives a tensor its first value (None: it has one before), and who uses it."""

    name: str
    producer: int | None
    users: list[int] = field(default_factory=list)


def safe_sharing(
    operators: Sequence[Operator], nbytes: Mapping[str, int], *, kept: Collection[str] = ()
) -> tuple[tuple[Buffer, ...], Relation]:
    """Say of every two tensors whether they may share memory, whatever the streams' relative speeds.

    The rule of SOMAS (MLSys'23): t may give its memory to u exactly if every user of t is an ancestor of
    u's producer. Ancestors are the operators that must have ended before another may begin: those issued
    to the same stream before it, those that produce what it reads, those it waits for, and theirs. The
    producer is a user too, so that a tensor nobody reads is not written over while it is written.

    A tensor whose first mention is a read, or that no operator mentions, is there from the step's
    start (half-lifelong); one that is kept stays to its end. With both it is lifelong and shares with none.

    Args:
        operators: of one step, in the order in which they are issued.
        nbytes: the tensors to place, by name. Others that operators mention are left out.
        kept: names of those that must outlive the step.

    Returns:
        A buffer for each of ``nbytes``, in that order, with times in numbers of operators as issued, and
        the symmetric relation that is true where two may not share, for ``layout``'s ``conflicts``.

    Raises:
        OptionError: two operators have the same name, one waits for what is not issued before it, or a name
            in ``kept`` is no tensor's.
    """
    lives = {name: _Lifetime(name, None) for name in nbytes}
    predecessors = _predecessors(operators, lives)
    if unknown := [name for name in kept if name not in lives]:
        raise OptionError(f"'{unknown[0]}' is kept, but has no size; name it in nbytes too.")
    places, streams = _places(operators)
    free = _free_before(lives.values(), _clocks(predecessors, places, streams), places, kept)
    buffers = tuple(
        Buffer(
            name=each.name,
            lower=each.producer or 0,
            upper=len(operators) + 1 if each.name in kept or not each.users else each.users[-1] + 1,
            nbytes=nbytes[each.name],
        )
        for each in lives.values()
    )
    conflicts = ~(free | free.T)
    np.fill_diagonal(conflicts, False)
    return buffers, conflicts


def _predecessors(operators: Sequence[Operator], lives: Mapping[str, _Lifetime]) -> list[set[int]]:
    """Whom each operator comes directly after; fills in the lifetimes on the way."""
    numbers: dict[str, int] = {}
    newest: dict[str, int] = {}  # by stream
    writers: dict[str, int | None] = {}  # who wrote a tensor first; None: it was there before
    predecessors = []
    for number, operator in enumerate(operators):
        _check(operator, numbers)
        after = {numbers[name] for name in operator.waits}
        if operator.stream in newest:
            after.add(newest[operator.stream])
        after |= _use(operator, number, writers, lives) - {number}
        numbers[operator.name] = newest[operator.stream] = number
        predecessors.append(after)
    return predecessors


def _use(
    operator: Operator, number: int, writers: dict[str, int | None], lives: Mapping[str, _Lifetime]
) -> set[int]:
    """Note what the operator uses, and return who wrote it first."""
    for names, writer in ((operator.reads, None), (operator.writes, number)):
        for name in names:
            writers.setdefault(name, writer)
    used = dict.fromkeys((*operator.reads, *operator.writes))
    for name in used.keys() & lives.keys():
        lives[name].producer = writers[name]
        lives[name].users.append(number)
    return {writer for name in used if (writer := writers[name]) is not None}


def _check(operator: Operator, numbers: Mapping[str, int]) -> None:
    if operator.name in numbers:
        raise OptionError(f"two operators are called '{operator.name}'; give each a name of its own.")
    for name in operator.waits:
        if name not in numbers:
            raise OptionError(
                f"'{operator.name}' waits for '{name}', which is not issued before it; a wait for an event "
                "that is not recorded yet does nothing."
            )


def _clocks(predecessors: Sequence[set[int]], places: Sequence[tuple[int, int]], streams: int) -> Integers:
    """(operator, stream): how many of the stream's operators have ended whenever the row's begins.

    A stream's operators end in order, so these counts tell all of an operator's ancestors.
    """
    clocks = np.zeros((len(predecessors), streams), np.int64)
    for number, before in enumerate(predecessors):
        for each in before:
            np.maximum(clocks[number], clocks[each], out=clocks[number])
        for stream, place in map(places.__getitem__, before):
            clocks[number, stream] = max(clocks[number, stream], place + 1)
    return clocks


def _places(operators: Sequence[Operator]) -> tuple[list[tuple[int, int]], int]:
    """Each operator's stream, numbered, and its place there; and how many streams there are, at least one."""
    numbers: dict[str, int] = {}
    counts: Counter[str] = Counter()
    places = []
    for operator in operators:
        stream = numbers.setdefault(operator.stream, len(numbers))
        places.append((stream, counts[operator.stream]))
        counts[operator.stream] += 1
    return places, max(len(numbers), 1)


def _free_before(
    lives: Collection[_Lifetime], clocks: Integers, places: Sequence[tuple[int, int]], kept: Collection[str]
) -> Relation:
    """(t, u): have all of t's users ended whenever u's producer begins?"""
    streams = clocks.shape[1]
    needed = np.zeros((len(lives), streams), np.int64)  # of each stream's operators, until t is done
    # A tensor without a producer was there from the start, before any count: -1.
    reached = np.full((len(lives), streams), -1, np.int64)  # when u's producer begins
    for row, each in enumerate(lives):
        for stream, place in map(places.__getitem__, each.users):
            needed[row, stream] = place + 1
        if each.producer is not None:
            reached[row] = clocks[each.producer]
        # More than any stream has: never done.
        if each.name in kept or not each.users:
            needed[row] = len(places) + 1
    free = np.ones((len(lives), len(lives)), np.bool_)
    for stream in range(streams):
        free &= needed[:, stream, None] <= reached[:, stream]
    return free
