"""Buffers as arrays and as MiniMalloc's CSV files: sizes, and who may not share bytes with whom."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from squeezebox.schema import Buffer, FormatError, Layout, OptionError

Integers = NDArray[np.int64]
Relation = NDArray[np.bool_]

_FAR = 2**62
_MOST = 50_000  # buffers, as the table of conflicts has a byte for each pair
_MOMENTS, _SEEDS = 64, 32  # fullest moments and largest buffers from which a bound is grown


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What a packer is given: offsets are wanted at which no two in conflict overlap.

    ``sizes`` are in units of the arena's alignment, as offsets are. ``conflicts`` is symmetric and false on
    its diagonal. ``lower`` and ``upper`` are times as issued; unless the conflicts were given, they are
    the pairs whose times overlap. No offsets reach less high than ``lower_bound``.
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
            alignment is below 1, sizes or times pass 2**62, or the relation has another shape or is not
            symmetric.
    """
    _check(buffers, alignment)
    lower = np.array([each.lower for each in buffers], np.int64)
    upper = np.array([each.upper for each in buffers], np.int64)
    sizes = np.array([-(-each.nbytes // alignment) for each in buffers], np.int64)
    relation = overlaps(lower, upper) if conflicts is None else _checked(conflicts, buffers)
    relation[sizes == 0] = relation[:, sizes == 0] = False  # nothing overlaps with no bytes
    bound = lower_bound(sizes, lower, upper, relation)
    return Problem(sizes=sizes, lower=lower, upper=upper, conflicts=relation, lower_bound=bound)


def overlaps(lower: Integers, upper: Integers) -> Relation:
    """Which two half-open intervals have a time in common; none with itself."""
    relation = lower[:, None] < upper
    relation &= relation.T
    np.fill_diagonal(relation, False)
    return relation


def lower_bound(sizes: Integers, lower: Integers, upper: Integers, conflicts: Relation) -> int:
    """The size of the largest clique found: its buffers lie on each other in every packing."""
    largest = np.argsort(-sizes, kind="stable")[:_SEEDS]
    seeds = np.zeros((len(largest), len(sizes)), np.bool_)
    seeds[np.arange(len(largest)), largest] = True
    starts = np.concatenate((_moments(sizes, lower, upper, _MOMENTS), seeds))
    return int((_cliques(starts, sizes, conflicts) @ sizes).max(initial=0))


def all_cliques(problem: Problem) -> Relation:
    """A clique around every moment at which a buffer begins, one a row."""
    starts = _moments(problem.sizes, problem.lower, problem.upper, len(problem.sizes))
    return np.unique(_cliques(starts, problem.sizes, problem.conflicts), axis=0)


def merged(problem: Problem, item_of: Integers) -> Problem:
    """The problem of items that each hold one buffer or several side by side, numbered from 0."""
    order = np.argsort(item_of, kind="stable")
    firsts = np.flatnonzero(np.diff(item_of[order], prepend=-1))
    rows = np.logical_or.reduceat(problem.conflicts[np.ix_(order, order)], firsts, axis=0)
    conflicts = np.logical_or.reduceat(rows, firsts, axis=1)
    np.fill_diagonal(conflicts, False)
    sizes = np.add.reduceat(problem.sizes[order], firsts)
    lower = np.minimum.reduceat(problem.lower[order], firsts)
    upper = np.maximum.reduceat(problem.upper[order], firsts)
    bound = max(problem.lower_bound, lower_bound(sizes, lower, upper, conflicts))
    return Problem(sizes=sizes, lower=lower, upper=upper, conflicts=conflicts, lower_bound=bound)


def _check(buffers: Sequence[Buffer], alignment: int) -> None:
    if alignment < 1:
        raise OptionError(f"alignment {alignment} is below 1; give bytes such as 64.")
    if len(buffers) > _MOST:
        raise OptionError(
            f"{len(buffers)} buffers are more than {_MOST}: who conflicts with whom would take "
            f"{len(buffers) ** 2 / 2**30:.1f} GiB. Leave the smallest out, or lay parts of them out apart."
        )
    total = sum(-(-each.nbytes // alignment) for each in buffers) * alignment
    if total >= _FAR:
        raise OptionError(f"the buffers have {total} bytes together; offsets are counted up to {_FAR}.")
    names: set[str] = set()
    for each in buffers:
        if each.lower >= each.upper:
            raise OptionError(
                f"buffer '{each.name}' lives during [{each.lower}, {each.upper}), which is no time at all; "
                "its upper must be greater than its lower."
            )
        if max(-each.lower, each.upper) >= _FAR:
            raise OptionError(
                f"buffer '{each.name}' lives during [{each.lower}, {each.upper}), and times are counted up "
                f"to {_FAR}; number the moments from 0."
            )
        if each.nbytes < 0:
            raise OptionError(f"buffer '{each.name}' has {each.nbytes} bytes; give 0 or more.")
        if each.name in names:
            raise OptionError(f"two buffers are called '{each.name}'; give each a name of its own.")
        names.add(each.name)


def _checked(conflicts: Relation, buffers: Sequence[Buffer]) -> Relation:
    relation = np.array(conflicts, np.bool_)
    count = len(buffers)
    if relation.shape != (count, count):
        raise OptionError(f"conflicts has shape {relation.shape}; {count} buffers need ({count}, {count}).")
    asymmetric = np.argwhere(relation != relation.T)
    if len(asymmetric):
        first, second = (buffers[number].name for number in asymmetric[0])
        raise OptionError(f"conflicts says two things of '{first}' and '{second}'; make it symmetric.")
    np.fill_diagonal(relation, False)
    return relation


def _moments(sizes: Integers, lower: Integers, upper: Integers, most: int) -> Relation:
    """Who lives when a buffer begins, at up to ``most`` moments: those at which most bytes do."""
    times = np.unique(lower)
    change = np.zeros(len(times) + 1, np.int64)
    np.add.at(change, np.searchsorted(times, lower), sizes)
    np.add.at(change, np.searchsorted(times, upper), -sizes)
    fullest = times[np.argsort(-np.cumsum(change)[:-1], kind="stable")[:most], None]
    return (lower <= fullest) & (fullest < upper)


def _cliques(starts: Relation, sizes: Integers, conflicts: Relation) -> Relation:
    """A clique for each row: as many as can be of its buffers, then of the others, the largest first."""
    by_size = np.argsort(-sizes, kind="stable")
    chosen: Relation = _grown(starts, by_size, conflicts)
    return chosen


@njit(cache=True, nogil=True)
def _grown(starts: Relation, by_size: Integers, conflicts: Relation) -> Relation:
    chosen = np.zeros_like(starts)
    members = np.empty(by_size.size, np.int64)
    for row in range(len(starts)):
        count = 0
        for wanted in (True, False):
            for buffer in by_size:
                if starts[row, buffer] != wanted:
                    continue
                i = 0
                while i < count and conflicts[buffer, members[i]]:
                    i += 1
                if i == count:
                    chosen[row, buffer] = True
                    members[count] = buffer
                    count += 1
    return chosen


_DIGITS, _SHOWN = 18, 40
_COLUMNS = ("id", "lower", "upper", "size")


def read_buffers(path: str | os.PathLike[str]) -> tuple[Buffer, ...]:
    """The buffers of a file with the columns id, lower, upper and size, in any order.

    Raises:
        FormatError: the file is missing or damaged, or has other columns; names the line that is wrong.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"'{path}' cannot be read: {error}.") from error
    try:
        return tuple(_buffers(csv.reader(io.StringIO(text), strict=True)))
    except (FormatError, csv.Error) as error:
        raise FormatError(
            f"'{path}' is no list of buffers: {error}. Its first line must be id,lower,upper,size; each "
            "other one a buffer that lives from lower until just before upper."
        ) from error


def layout_csv(buffers: Sequence[Buffer], layout: Layout) -> str:
    """The columns id, lower, upper, size and offset, one line for each buffer, as MiniMalloc writes them."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*_COLUMNS, "offset"))
    for each, offset in zip(buffers, layout.offsets, strict=True):
        writer.writerow((each.name, each.lower, each.upper, each.nbytes, offset))
    return text.getvalue()


def _buffers(rows: Any) -> Iterator[Buffer]:
    header = [name.strip() for name in next(rows, [])]
    if sorted(header) != sorted(_COLUMNS):
        raise FormatError(f"line 1 names the columns {','.join(header) or '(none)'}")
    lines: dict[str, int] = {}
    for row in rows:
        if row:
            line = rows.line_num  # where it ends
            buffer = _buffer(header, row, line)
            if buffer.name in lines:
                raise FormatError(f"lines {lines[buffer.name]} and {line} have the same id '{buffer.name}'")
            lines[buffer.name] = line
            yield buffer


def _buffer(header: list[str], row: list[str], line: int) -> Buffer:
    if len(row) != len(header):
        raise FormatError(f"line {line} has {len(row)} values for {len(header)} columns")
    values = dict(zip(header, row, strict=True))
    lower, upper, size = (_integer(values, column, line) for column in _COLUMNS[1:])
    if lower >= upper:
        raise FormatError(f"line {line} has lower {lower} and upper {upper}, which is no time at all")
    return Buffer(name=values["id"], lower=lower, upper=upper, nbytes=size)


def _integer(values: dict[str, str], column: str, line: int) -> int:
    text = values[column].strip()
    if not (text.isascii() and text.isdigit()) or len(text) > _DIGITS:
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        raise FormatError(
            f"line {line} has {column} '{shown}', which is no whole number from 0 of at most {_DIGITS} digits"
        )
    return int(text)
