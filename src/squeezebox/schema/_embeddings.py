"""Which parts of embedding tables are at which rank, and how much of that rank's memory each has."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from squeezebox.schema._errors import FormatError
from squeezebox.schema._files import checked, load_json, plain_fields, save_json
from squeezebox.schema._sizes import human_bytes

_VERSION = 1
_AGAIN = "'squeezebox embeddings' or squeezebox.plan_embeddings(...).save(path)"


@dataclass(frozen=True, kw_only=True, slots=True)
class TableShard:
    """Rows and columns of a table at a rank, from the first up to the end.

    ``memory_bytes`` are for its rows in memory, with their optimizer state; the others are in a file.
    """

    table: int
    rank: int
    first_row: int
    end_row: int
    first_column: int
    end_column: int
    memory_bytes: int

    @property
    def rows(self) -> int:
        """How many."""
        return self.end_row - self.first_row

    @property
    def place(self) -> tuple[slice, slice]:
        """Where they are in the table."""
        return slice(self.first_row, self.end_row), slice(self.first_column, self.end_column)

    @property
    def dim(self) -> int:
        """How many columns."""
        return self.end_column - self.first_column


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingPlan:
    """Where tables of (rows, dim) lie: ``shards`` in the order of tables, rows and columns.

    A table is whole, or split by rows, or by columns. ``seconds`` is what a step of all bags took (forward,
    backward and update, at the slowest rank), and ``others`` what it took with the other placements measured.
    """

    tables: tuple[tuple[int, int], ...]
    ranks: int
    shards: tuple[TableShard, ...]
    seconds: float = 0.0
    others: tuple[float, ...] = ()

    def of(self, table: int) -> tuple[TableShard, ...]:
        """A table's shards."""
        return tuple(each for each in self.shards if each.table == table)

    def is_split_by_rows(self, table: int) -> bool:
        """Whether bags of a table are sums of what several shards give."""
        return len({shard.first_row for shard in self.of(table)}) > 1

    def __str__(self) -> str:
        lines = [f"{'table':>5} {'rank':>4} {'rows':>23} {'columns':>9} {'in memory':>10}"]
        for each in self.shards:
            rows, columns = f"{each.first_row:,}-{each.end_row:,}", f"{each.first_column}-{each.end_column}"
            memory = human_bytes(each.memory_bytes)
            lines.append(f"{each.table:>5} {each.rank:>4} {rows:>23} {columns:>9} {memory:>10}")
        if self.seconds:
            others = ", ".join(f"{seconds:.3g}" for seconds in self.others)
            lines.append(
                f"A step took {self.seconds:.3g} s; with other placements {others or 'not measured'}."
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written by :meth:`save`."""
        return {"version": _VERSION, **plain_fields(self)}

    @classmethod
    def from_dict(cls, values: Any, where: str = "") -> EmbeddingPlan:
        """The plan of such values; FormatError names the field that is wrong, which lies at ``where``."""
        version = values.get("version") if isinstance(values, dict) else None
        if version != _VERSION:
            raise FormatError(f"its version is {version!r}, and this Squeezebox reads {_VERSION}")
        found = cls(**checked(cls, values, where, besides=["version"]))
        for table, size in enumerate(found.tables):
            if not _covers(found.of(table), size) or any(s.rank >= found.ranks for s in found.of(table)):
                raise FormatError(
                    f"the shards of table {table} are not the whole of it, on {found.ranks} ranks"
                )
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan whole or not at all; OutputError if the path cannot be written."""
        save_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> EmbeddingPlan:
        """What :meth:`save` wrote; FormatError if the file is missing, damaged, or of another version."""
        return load_json(path, "plan of embeddings", _AGAIN, cls.from_dict)


def _covers(shards: tuple[TableShard, ...], size: tuple[int, int]) -> bool:
    """Whether shards in order are a table, each with all of its rows or all of its columns."""
    rows = [(each.first_row, each.end_row) for each in shards]
    columns = [(each.first_column, each.end_column) for each in shards]
    return any(
        set(whole) == {(0, full)} and _follow(parts, end)
        for whole, full, parts, end in ((rows, size[0], columns, size[1]), (columns, size[1], rows, size[0]))
    )


def _follow(parts: list[tuple[int, int]], end: int) -> bool:
    begins, ends = [first for first, _ in parts], [last for _, last in parts]
    return begins == [0, *ends[:-1]] and ends[-1] == end and all(first < last for first, last in parts)
