"""What a layer of tables is given, checked: a plan, or whole tables, and indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from squeezebox.layers._table_rows import KNOWN_BYTES
from squeezebox.reports import parse_size
from squeezebox.schema import BudgetError, EmbeddingPlan, OptionError, TableShard


def problem_of(table: int, rows: int, indices: Any, offsets: Any) -> str | None:
    """What is wrong with a table's indices, or None."""
    for what, given in (("indices", indices), ("offsets", offsets)):
        if given is not None and not isinstance(given, Tensor):
            kind = type(given).__name__
            return f"{what} of table {table} are a {kind}; give a tensor of torch.int64, by torch.as_tensor."
    return _problem(table, rows, indices, offsets)


def _problem(table: int, rows: int, indices: Tensor, offsets: Tensor | None) -> str | None:
    if indices.device.type != "cpu":
        return (
            f"indices of table {table} are on {indices.device}, and tables lie in the host's memory or a "
            "file; give indices.cpu(), and move the sums to the device."
        )
    for what, given in (("indices", indices), ("offsets", offsets)):
        if given is not None and given.dtype not in (torch.int32, torch.int64):
            return f"{what} of table {table} are {given.dtype}; give torch.int64."
    if offsets is not None and offsets.dim() != 1:
        return f"offsets of table {table} have the shape {tuple(offsets.shape)}; give a number for each bag."
    if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= rows):
        return (
            f"indices of table {table} go from {int(indices.min()):,} to {int(indices.max()):,}, but "
            f"it has rows 0 to {rows - 1:,}; correct them, or make the table larger."
        )
    if indices.dim() != (2 if offsets is None else 1):
        return (
            f"indices of table {table} have the shape {tuple(indices.shape)}; give bags x rows, or all "
            "bags' one behind another with offsets."
        )
    if offsets is not None and offsets.numel():
        lengths = torch.diff(offsets, append=offsets.new_tensor([len(indices)]))
        if int(offsets[0]) or bool((lengths < 0).any()):
            return f"offsets of table {table} do not go up from 0 to its {len(indices):,} indices."
    return None


def require_table(table: int, count: int) -> None:
    """OptionError where there is no table of this number."""
    if not 0 <= table < count:
        raise OptionError(f"there are tables 0 to {count - 1:,}, and not {table:,}.")


def require_tables(tables: Sequence[tuple[int, int]]) -> None:
    """OptionError where one has no rows or columns, or there is none."""
    if not tables or min(min(table) for table in tables) < 1:
        raise OptionError(f"tables are {list(tables)}; give (rows, dim) of each, both at least 1.")


def planned(tables: Sequence[tuple[int, int]] | EmbeddingPlan, memory: int | str | None) -> EmbeddingPlan:
    """The plan, or whole tables here, with memory for each table's rows by its size."""
    if isinstance(tables, EmbeddingPlan):
        if memory is not None:
            raise OptionError("the plan says what each table has of memory; leave memory= out.")
        return tables
    require_tables(tables)
    if memory is None:
        raise OptionError('give memory= with the tables, such as memory="2GiB".')
    memory_bytes, known = parse_size("memory", memory), KNOWN_BYTES * sum(rows for rows, _ in tables)
    if memory_bytes <= known:
        raise BudgetError(
            f"memory= is {memory_bytes:,} bytes, and to know where each row is takes {known:,}. Give more."
        )
    share = (memory_bytes - known) / sum(rows * dim for rows, dim in tables)
    shards = [
        TableShard(
            table=number,
            rank=0,
            first_row=0,
            end_row=rows,
            first_column=0,
            end_column=dim,
            memory_bytes=int(share * rows * dim),
        )
        for number, (rows, dim) in enumerate(tables)
    ]
    return EmbeddingPlan(tables=tuple((rows, dim) for rows, dim in tables), ranks=1, shards=tuple(shards))
