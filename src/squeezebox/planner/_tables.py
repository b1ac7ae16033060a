"""Placements of embedding tables over ranks: which to try, by a cost that only has to order them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from squeezebox.schema import BudgetError, TableShard

_Array = np.ndarray[Any, Any]

# Seconds of one core, fitted to steps of single tables. Only their ratios matter, and those roughly.
_SHARD = 5e-4
_LOOKUP, _LOOKED_ELEMENT = 1e-7, 1.2e-9
_ROW, _ELEMENT = 5e-7, 8e-9  # distinct rows, and their elements with the optimizer's state
_FAR_ROW = 5e-7
_SENT = 2e-9
_KEPT = 3  # placements that are split further
_LEAST_DIM = 8  # columns that are not split further


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSample:
    """What a sample of steps looked up in a table.

    Attributes:
        size: (rows, dim).
        bags, lookups: of a step.
        ids: rows that were looked up, in order.
        early: in how many of the first half's steps each was.
        late: in what share of the other half's steps.
    """

    size: tuple[int, int]
    bags: float
    lookups: float
    ids: _Array
    early: _Array
    late: _Array


@dataclass(frozen=True, slots=True)
class _Piece:
    """A shard and what it costs: rows and late lookups by how often they were looked up early."""

    shard: TableShard
    share: float
    rows: _Array
    late: _Array
    cost: float

    @property
    def width(self) -> int:
        return self.shard.dim


Placement = tuple[TableShard, ...]


class TableSearch:
    """Placements of tables over ranks, by what their shards cost.

    A rank's memory goes to the rows looked up most often for their bytes.

    Args:
        samples: of each table.
        memory_bytes: of each rank.
        known_bytes: of each row at its rank, to know where it is.
        element_bytes: of an element with its optimizer state.
    """

    def __init__(
        self,
        samples: Sequence[TableSample],
        memory_bytes: Sequence[int],
        *,
        known_bytes: int,
        element_bytes: int,
    ) -> None:
        self._samples, self._memory = samples, memory_bytes
        self._known, self._element = known_bytes, element_bytes
        self._tables = [self._piece(_whole(table, sample)) for table, sample in enumerate(samples)]

    def best(self, most: int) -> list[Placement]:
        """Different placements, that with the cheapest slowest rank first.

        Tables go one by one to the rank that has least to do, the costliest first. The costliest shards are
        then split, by columns or by rows, and the cheapest placements are split further, as in NeuroShard
        (MLSys 2023).

        Raises:
            BudgetError: no placement was found in which ranks know where their rows are.
        """
        found: dict[Placement, float] = {}
        beams, problem = [self._tables], None
        for _ in range(2 * len(self._memory) if len(self._memory) > 1 else 1):
            scored = []
            for pieces in beams:
                cost = float("inf")
                try:
                    placement, cost = self._placed(pieces, lambda piece: piece.cost)
                    if len({(shard.table, shard.rank) for shard in placement}) == len(placement):
                        found[placement] = cost
                except BudgetError as error:
                    problem = problem or error
                scored.append((cost, pieces))
            scored.sort(key=lambda each: each[0])
            beams = [split for _, pieces in scored[:_KEPT] for split in self._splits(pieces)]
        if problem is not None and not found:
            raise problem
        return sorted(found, key=lambda placement: found[placement])[:most]

    def by_lookups(self) -> Placement | None:
        """Whole tables, those with most lookups first, each to the rank with fewest; None where none fit."""
        try:
            return self.whole([sample.lookups for sample in self._samples])
        except BudgetError:
            return None

    def whole(self, weights: Sequence[float]) -> Placement:
        """Whole tables, the heaviest first, each to the rank with the least weight.

        Raises:
            BudgetError: a rank cannot know where a table's rows are.
        """
        return self._placed(self._tables, lambda piece: weights[piece.shard.table])[0]

    def _piece(self, shard: TableShard) -> _Piece:
        sample = self._samples[shard.table]
        begin, end = np.searchsorted(sample.ids, (shard.first_row, shard.end_row))
        early, late = sample.early[begin:end], sample.late[begin:end]
        share = late.sum() / max(sample.late.sum(), 1e-9)
        distinct, lookups = float(late.sum()), sample.lookups * share
        cost = (
            _SHARD
            + lookups * (_LOOKUP + _LOOKED_ELEMENT * shard.dim)
            + distinct * (_ROW + _ELEMENT * shard.dim * self._element / 4)
            + _SENT * (sample.bags * shard.dim + 2 * lookups)
        )
        return _Piece(shard, share, np.bincount(early), np.bincount(early, late), cost)

    def _splits(self, pieces: list[_Piece]) -> list[list[_Piece]]:
        """Pieces with one of the costliest in two parts, by columns or by rows."""
        found = []
        for piece in sorted(pieces, key=lambda piece: -piece.cost)[:_KEPT]:
            for halves in (self._columns(piece.shard), self._rows(piece.shard)):
                if halves:
                    others = [each for each in pieces if each is not piece]
                    found.append([*others, *map(self._piece, halves)])
        return found

    def _placed(self, pieces: list[_Piece], weight: Callable[[_Piece], float]) -> tuple[Placement, float]:
        """Pieces at ranks, the heaviest first, each at the one with least weight that can know its rows."""
        ranks: list[list[_Piece]] = [[] for _ in self._memory]
        left, loads = list(self._memory), [0.0] * len(ranks)
        for piece in sorted(pieces, key=weight, reverse=True):
            known = self._known * piece.shard.rows
            able = [rank for rank in range(len(ranks)) if left[rank] > known]
            if not able:
                raise BudgetError(self._too_small(pieces))
            rank = min(able, key=lambda rank: (loads[rank], -left[rank]))
            ranks[rank].append(piece)
            loads[rank] += weight(piece)
            left[rank] -= known
        return self._finished(ranks)

    def _finished(self, ranks: list[list[_Piece]]) -> tuple[Placement, float]:
        """The shards in order with their memory, and the cost of the slowest rank."""
        shards, cost = [], 0.0
        for rank, pieces in enumerate(ranks):
            room, far = self._held(pieces, self._memory[rank])
            shards += [
                dataclasses.replace(piece.shard, rank=rank, memory_bytes=nbytes)
                for piece, nbytes in zip(pieces, room, strict=True)
            ]
            cost = max(cost, sum(piece.cost for piece in pieces) + _FAR_ROW * far)
        shards.sort(key=lambda each: (each.table, each.first_row, each.first_column))
        return tuple(shards), cost

    def _held(self, pieces: list[_Piece], memory_bytes: int) -> tuple[list[int], float]:
        """Bytes for each piece's rows in memory, and the rows of a step that are not."""
        left = memory_bytes - self._known * sum(piece.shard.rows for piece in pieces)
        room, far = [0] * len(pieces), sum(float(piece.late.sum()) for piece in pieces)
        gains = sorted(
            (-count / piece.width, number, count)
            for number, piece in enumerate(pieces)
            for count in range(1, len(piece.rows))
        )
        for _, number, count in gains:
            piece = pieces[number]
            record, rows = piece.width * self._element, int(piece.rows[count])
            taken = min(rows, left // record)
            far -= float(piece.late[count]) * taken / max(rows, 1)
            room[number] += taken * record
            left -= taken * record
        rests = [
            piece.shard.rows * piece.width * self._element - has
            for piece, has in zip(pieces, room, strict=True)
        ]
        for number, rest in enumerate(rests):  # what is left, by size
            room[number] += min(rest, int(left * rest / max(sum(rests), 1)))
        return room, far

    def _columns(self, shard: TableShard) -> tuple[TableShard, ...]:
        rows, dim = self._samples[shard.table].size
        middle = shard.first_column + shard.dim // 2
        if shard.rows < rows or shard.dim <= _LEAST_DIM:
            return ()
        return (
            dataclasses.replace(shard, end_column=middle),
            dataclasses.replace(shard, first_column=middle),
        )

    def _rows(self, shard: TableShard) -> tuple[TableShard, ...]:
        """Two halves of the lookups, or of the rows, where no rank can know them all."""
        sample = self._samples[shard.table]
        begin, end = np.searchsorted(sample.ids, (shard.first_row, shard.end_row))
        if shard.dim < sample.size[1] or end - begin < 2:
            return ()
        total = sample.late[begin:end].cumsum()
        middle = int(sample.ids[begin + 1 + np.searchsorted(total[:-2], total[-1] / 2)])
        if self._known * shard.rows >= max(self._memory):
            middle = (shard.first_row + shard.end_row) // 2
        return dataclasses.replace(shard, end_row=middle), dataclasses.replace(shard, first_row=middle)

    def _too_small(self, pieces: list[_Piece]) -> str:
        total, ranks = self._known * sum(piece.shard.rows for piece in pieces), len(self._memory)
        largest = self._known * max(piece.shard.rows for piece in pieces)
        least = largest + -(-(total - largest) // ranks) + 1
        return (
            f"memory= is {min(self._memory):,} bytes, and to know where each row is takes {total:,}, of one "
            f"table up to {largest:,}. Give each of {ranks} ranks {least:,}, or more ranks."
        )


def _whole(table: int, sample: TableSample) -> TableShard:
    rows, dim = sample.size
    return TableShard(
        table=table, rank=0, first_row=0, end_row=rows, first_column=0, end_column=dim, memory_bytes=0
    )
