"""One table's rows with their optimizer state: those looked up most often in memory, the others in a file."""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit

from squeezebox.codecs import in_threads, spans
from squeezebox.layers._table_log import RowLog
from squeezebox.schema import TableShard

KNOWN_BYTES = 12  # of each row, to know where it is and how often it was looked up
_PIECE_ROWS = 512  # of a thread, at least
_CHUNK_ROWS = 16 * 1024  # 16 divides it: torch draws normal numbers in groups of 16
_MOST_COUNTED = 1 << 16
_Array = np.ndarray[Any, Any]


def chunks(start: int, stop: int, least: int = 1) -> Iterator[_Array]:
    """Rows from start to stop, some at a time; the last are not fewer than ``least``, but for the first."""
    ends = [*range(start + _CHUNK_ROWS, stop - least + 1, _CHUNK_ROWS), stop]
    return (np.arange(begin, end) for begin, end in zip([start, *ends], ends, strict=False) if begin < end)


class TableRows:
    """A shard's records, all zero: a weight's ``dim`` elements, and as many for each state of the optimizer.

    Args:
        shard: how many rows, of how many columns, and bytes for records in memory.
        states: how many states.
        dtype: of all of it.
        folder: where the file is.

    Attributes:
        held: how many records are in memory.
        writes: how often records were changed.

    Raises:
        OutputError: the folder cannot be written to, or its disk has not enough room.
    """

    def __init__(self, shard: TableShard, states: int, dtype: torch.dtype, folder: Path) -> None:
        kind, rows = torch.empty(0, dtype=dtype).numpy().dtype, shard.rows
        self._rows, self._width = rows, shard.dim * (1 + states)
        self._file = RowLog(folder, rows, self._width, kind)
        self._room = min(rows, shard.memory_bytes // (self._width * kind.itemsize))
        self._held = np.empty((self._room, self._width), kind)
        self._owners = np.empty(self._room, np.int64)
        self._slots, self._place = self._file.where, np.full(rows, -1, np.int32)
        self._counts = np.zeros(rows, np.uint32)
        self._lookups = self._settled = 0
        self.held = self.writes = 0

    def distinct(self, indices: _Array) -> tuple[_Array, _Array]:
        """Each index once, in order, and for every index the place of its own.

        So torch sorts the gradients of bags as it does for a whole table, and adds equal rows in one order.
        """
        indices, ids = indices.ravel(), np.empty(min(indices.size, self._rows), np.int64)
        ids = ids[: _distinct(indices, self._place, ids)]
        ids.sort()
        return ids, _places(indices, self._place, ids, np.empty(indices.size, np.int64))

    def read(self, ids: _Array) -> _Array:
        """A copy of these records; ids are distinct."""
        found = np.empty((len(ids), self._width), self._held.dtype)
        pieces = spans(len(ids), _PIECE_ROWS)

        def take(piece: int) -> None:
            here = slice(*pieces[piece])
            far = np.empty(len(ids[here]), np.int64)
            far = far[: _take(ids[here], self._slots, self._held, found[here], far)]
            found[here][far] = self._file.read(ids[here][far])

        in_threads(take, len(pieces))
        return found

    def write(self, ids: _Array, records: _Array) -> None:
        """Change these records; ids are distinct. While memory has room, it takes those that the file had."""
        self.writes += 1
        if self.held < self._room:
            far = ids[self._slots[ids] < 0][: self._room - self.held]
            self._own(far, np.arange(self.held, self.held + far.size))
            self.held += int(far.size)
        far = np.flatnonzero(self._slots[ids] < 0)

        def put(piece: int) -> None:
            if piece:
                _put(ids, self._slots, self._held, records)
            elif far.size:
                self._file.write(ids[far], records[far])

        in_threads(put, 2)
        # Each time after twice the lookups, for it reads the counts of all rows.
        if 0 < self.held == self._room < self._rows and self._lookups >= 2 * self._settled:
            self._settle()

    def fill(self, place: int, values: _Array, start: int = 0) -> None:
        """Change one part of records from ``start`` on: the weight is the first, states follow."""
        dim = values.shape[1]
        for ids in chunks(start, start + len(values)):
            records = self.read(ids)
            records[:, place * dim : (place + 1) * dim] = values[ids - start]
            left = ids[self._slots[ids] < 0]
            self._held[self._slots[ids[self._slots[ids] >= 0]]] = records[self._slots[ids] >= 0]
            self._file.write(left, records[left - ids[0]])
        self.writes += 1

    def hot(self) -> _Array:
        """Which are in memory, in order."""
        return np.sort(self._owners[: self.held])

    def count(self, ids: _Array) -> None:
        """Note that these were looked up."""
        _count(ids, self._counts)
        self._lookups += len(ids)

    def _own(self, ids: _Array, slots: _Array) -> None:
        self._slots[ids], self._owners[slots] = slots, ids

    def _settle(self) -> None:
        """Exchange records, so that memory has those looked up most often."""
        self._settled = self._lookups
        while int(self._counts.max()) >= _MOST_COUNTED:
            self._counts //= 2
        least = _least(self._counts, self._room)
        come = np.flatnonzero((self._counts > least) & (self._slots < 0))
        held = self._counts[self._owners]
        leave = np.concatenate([np.flatnonzero(held < least), np.flatnonzero(held == least)])[: len(come)]
        for start in range(0, len(come), _CHUNK_ROWS):
            ids, slots = come[start : start + _CHUNK_ROWS], leave[start : start + _CHUNK_ROWS]
            slots = slots[np.argsort(self._owners[slots])]
            self._file.write(self._owners[slots], self._held[slots])
            self._held[slots] = self._file.read(ids)
            self._own(ids, slots)


def _least(counts: _Array, room: int) -> int:
    """The count above which at most ``room`` rows are, but not above one less."""
    numbers = _histogram(counts, np.zeros(_MOST_COUNTED, np.int64))
    above = numbers[::-1].cumsum()[::-1]  # rows with this count or more
    return int(np.flatnonzero(above > room).max(initial=0))


@njit(cache=True, nogil=True)
def _histogram(counts, numbers):
    for count in counts:
        numbers[count] += 1
    return numbers


@njit(cache=True, nogil=True)
def _distinct(indices, place, ids):
    found = 0
    for each in indices:
        if place[each] < 0:
            place[each] = found
            ids[found] = each
            found += 1
    return found


@njit(cache=True, nogil=True)
def _places(indices, place, ids, inverse):
    for at, each in enumerate(ids):
        place[each] = at
    for at, each in enumerate(indices):
        inverse[at] = place[each]
    for each in ids:
        place[each] = -1
    return inverse


@njit(cache=True, nogil=True)
def _take(ids, slots, held, found, far):
    """Copy records that are in memory; returns how many are ``far``, in the file."""
    count = 0
    for at, each in enumerate(ids):
        if slots[each] >= 0:
            found[at] = held[slots[each]]
        else:
            far[count] = at
            count += 1
    return count


@njit(cache=True, nogil=True)
def _put(ids, slots, held, records):
    for at, each in enumerate(ids):
        if slots[each] >= 0:
            held[slots[each]] = records[at]


@njit(cache=True, nogil=True)
def _count(ids, counts):
    for each in ids:
        counts[each] += 1
